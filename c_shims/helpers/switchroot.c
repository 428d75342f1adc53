/* penroot-switchroot: make a directory the root of this mount namespace and run a command there.
 *
 * The last step of a start: pivot_root(2), no new privileges, no capabilities
 * unless root inside, the system call filter. Then a shell runs the command
 * script, /etc/rc of the image or --rcfile, or the command, or is interactive.
 */
#include "common.h"
#include "environment.h"

#include "../seccomp.h"

#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

/* On stdout and with success also where arguments are missing: as enroot's. */
static void __attribute__((noreturn)) usage(void)
{
	printf("Usage: %s [options] [--] ROOTFS [COMMAND] [ARG...]\n\n"
	       " Options:\n"
	       "   --login           use a login shell\n"
	       "   --norc            leave out the command script of the image, /etc/rc\n"
	       "   --exec            run COMMAND itself, without shell or script\n"
	       "   --rcfile FILE     command script instead of the image's\n"
	       "   --envfile FILE    environment, lines KEY=VALUE, instead of the caller's\n"
	       "   --env KEY=VALUE   one variable more\n"
	       "   --workdir DIR     working directory inside\n"
	       "   --lock            keep root inside from changing the mounts, in a second user namespace\n"
	       "   --net --uts       with --lock: give that one a network, or a host name, to configure\n"
	       "   --drop            drop the capabilities of root too\n"
	       "   --keyring         a new session keyring, without the caller's keys\n"
	       "   --close           close all descriptors but stdin, stdout and stderr\n",
	       program_invocation_short_name);
	exit(EXIT_SUCCESS);
}

static void load_environment(const char *path)
{
	AUTO_CLOSE fd = open(path, O_RDONLY | O_CLOEXEC);
	AUTO_FREE all = fd < 0 ? NULL : read_all(fd, NULL);
	struct variable variable;
	char *rest = all;

	if (!all)
		err(EXIT_FAILURE, "cannot read %s", path);
	clearenv();
	while (next_variable(&rest, &variable))
		setenv(variable.name, variable.value, 1);
}

/* pivot_root(2), "new_root and put_old may be the same directory". */
static void switch_root(const char *rootfs)
{
	AUTO_CLOSE old = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);

	if (old < 0 || chdir(rootfs) < 0)
		err(EXIT_FAILURE, "cannot enter %s", rootfs);
	if (linux_pivot_root(".", ".") < 0) {
		/* It must be a mount point, and not one that propagates. */
		if ((errno != EINVAL && errno != EBUSY) || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0 ||
		    mount(".", ".", NULL, MS_BIND | MS_REC, NULL) < 0 || chdir("..") < 0 || chdir(rootfs) < 0)
			err(EXIT_FAILURE, "cannot make %s a mount point", rootfs);
		if (linux_pivot_root(".", ".") < 0)
			err(EXIT_FAILURE, "cannot make %s the root", rootfs);
	}
	if (fchdir(old) < 0 || mount(NULL, ".", NULL, MS_REC | MS_SLAVE, NULL) < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
		err(EXIT_FAILURE, "cannot drop the old root");
	if (unshare(CLONE_NEWCGROUP) < 0 && errno != EINVAL)
		err(EXIT_FAILURE, "cannot create a cgroup namespace");
}

enum { LOGIN = 2, NORC = 4, DIRECT = 8, LOCK = 16, DROP = 32, KEYRING = 64, CLOSE = 128 };

static void withhold(int flags)
{
	if (flags & CLOSE && linux_close_range(STDERR_FILENO + 1, ~0U, 0) < 0)
		err(EXIT_FAILURE, "cannot close descriptors");
	if (penroot_withhold_descriptors() < 0)
		err(EXIT_FAILURE, "cannot look through the open descriptors");
	if (flags & KEYRING && penroot_renew_keyring() < 0)
		err(EXIT_FAILURE, "cannot create a session keyring");
}

static void drop_privileges(int flags)
{
	/* Mounts that come from a namespace with another owner stay as they are, mount_namespaces(7). */
	if (flags & LOCK) {
		enter_user(geteuid(), getegid());
		enter_namespaces(CLONE_NEWNS | (flags & (CLONE_NEWNET | CLONE_NEWUTS)));
	}
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		err(EXIT_FAILURE, "cannot give up privileges");
	if ((flags & DROP ? penroot_drop_capabilities() : penroot_drop_capabilities_unless_root()) < 0)
		err(EXIT_FAILURE, "cannot drop capabilities");
	if (penroot_install_filter() < 0)
		err(EXIT_FAILURE, "cannot install the system call filter");
}

/* The value of "KEY VALUE" in login.defs(5), else NULL; a static buffer. */
static const char *login_def(const char *key)
{
	AUTO_CLOSE fd = open_regular("/etc/login.defs");
	AUTO_FREE all = fd < 0 ? NULL : read_all(fd, NULL);
	static char value[4096];
	char *rest = all, *line;

	while (rest && (line = strsep(&rest, "\n"))) {
		size_t n = strlen(key);

		line += strspn(line, " \t");
		if (strncmp(line, key, n) || !strchr(" \t", line[n]))
			continue;
		line += n + strspn(line + n, " \t\"");
		snprintf(value, sizeof(value), "%.*s", (int)strcspn(line, " \t\"\r"), line);
		return value;
	}
	return NULL;
}

/* What login(1) sets and nobody else did. The image's own passwd(5), read here: a static program has no NSS. */
static void complete_environment(bool login)
{
	AUTO_CLOSE fd = open_regular("/etc/passwd");
	AUTO_FREE all = fd < 0 ? NULL : read_all(fd, NULL);
	char *rest = all, *line;
	const char *value;

	while (rest && (line = strsep(&rest, "\n"))) {
		char *fields[7] = { 0 };
		int n = 0;

		while (n < 7 && (fields[n] = strsep(&line, ":")))
			n++;
		if (n < 7 || !*fields[2] || strtoul(fields[2], NULL, 10) != geteuid())
			continue;
		setenv("USER", fields[0], 0);
		setenv("LOGNAME", fields[0], 0);
		setenv("HOME", *fields[5] ? fields[5] : "/", 0);
		setenv("SHELL", *fields[6] && access(fields[6], X_OK) == 0 ? fields[6] : "/bin/sh", 0);
		break;
	}
	setenv("HOME", geteuid() ? "/" : "/root", 0);
	setenv("SHELL", "/bin/sh", 0);
	if (login) {
		setenv("TERM", "dumb", 0);
		value = login_def(geteuid() ? "ENV_PATH" : "ENV_SUPATH");
		if (value)
			setenv("PATH", value + (strncmp(value, "PATH=", 5) ? 0 : 5), 0);
		value = login_def("UMASK");
		if (value)
			umask((mode_t)strtoul(value, NULL, 8) & 0777);
		if (chdir(getenv("HOME")) < 0 && chdir("/") < 0)
			err(EXIT_FAILURE, "cannot enter /");
	}
	setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 0);
}

/* The command script as a file without a name: the file system it came from is gone. */
static char *keep_script(const char *path)
{
	AUTO_CLOSE from = open(path, O_RDONLY | O_CLOEXEC);
	size_t length = 0;
	AUTO_FREE all = from < 0 ? NULL : read_all(from, &length);
	int fd = memfd_create("rc", 0);

	if (!all || fd < 0 || !write_all(fd, all, length) || lseek(fd, 0, SEEK_SET) < 0)
		err(EXIT_FAILURE, "cannot read %s", path);
	return text("/proc/self/fd/%d", fd);
}

static void __attribute__((noreturn)) failed(const char *name)
{
	err(errno == ENOENT || errno == ENOTDIR ? 127 : 126, "cannot run %s", name);
}

static void __attribute__((noreturn)) run(char **command, int count, const char *script, bool login)
{
	const char *shell = getenv("SHELL");
	char *argv[count + 5], **next = argv;

	if (!shell || access(shell, X_OK) < 0)
		shell = "/bin/sh";
	if (access(shell, X_OK) < 0 && !script && count) {
		execvp(command[0], command); /* an image without a shell */
		failed(command[0]);
	}
	*next++ = text("%s%s", login ? "-" : "", strrchr(shell, '/') ? strrchr(shell, '/') + 1 : shell);
	if (script) {
		*next++ = (char *)script;
	} else if (count) {
		*next++ = "-c";
		*next++ = "exec \"$@\"";
		*next++ = "sh";
	}
	memcpy(next, command, ((size_t)count + 1) * sizeof(char *)); /* and the NULL behind them */
	execv(shell, argv);
	failed(shell);
}

int main(int argc, char **argv)
{
	const char *rcfile = NULL, *envfile = NULL, *workdir = NULL, *script = NULL;
	const char *variables[argc], **end = variables;
	const struct word words[] = {
		{ "--login", .bit = LOGIN },        { "--norc", .bit = NORC },
		{ "--exec", .bit = DIRECT },        { "--rcfile", .value = &rcfile },
		{ "--envfile", .value = &envfile }, { "--workdir", .value = &workdir },
		{ "--env", .list = &end },          { "--lock", .bit = LOCK },
		{ "--net", .bit = CLONE_NEWNET },   { "--uts", .bit = CLONE_NEWUTS },
		{ "--drop", .bit = DROP },          { "--keyring", .bit = KEYRING },
		{ "--close", .bit = CLOSE },        { 0 },
	};
	int flags = 0, at = parse_options(argv, 1, words, &flags);

	if (flags & HELP || !argv[at])
		usage();
	for (const char **variable = variables; variable < end; variable++)
		if (!strchr(*variable, '=') || **variable == '=')
			errx(EXIT_FAILURE, "--env %s: not KEY=VALUE", *variable);
	withhold(flags);
	if (rcfile)
		script = keep_script(rcfile);
	if (envfile)
		load_environment(envfile);
	for (const char **variable = variables; variable < end; variable++)
		putenv((char *)*variable);
	switch_root(argv[at++]);
	complete_environment(flags & LOGIN);
	if (workdir && chdir(workdir) < 0)
		err(EXIT_FAILURE, "cannot enter %s", workdir);
	drop_privileges(flags);
	if (!rcfile && !(flags & NORC) && access("/etc/rc", F_OK) == 0)
		script = "/etc/rc";
	if (flags & DIRECT && argv[at]) {
		AUTO_FREE here = getcwd(NULL, 0);

		/* What a shell would set that had run the command. */
		setenv("PWD", here ? here : "/", 1);
		setenv("SHLVL", "0", 0);
		execvp(argv[at], argv + at);
		failed(argv[at]);
	}
	run(argv + at, argc - at, script, flags & LOGIN);
}
