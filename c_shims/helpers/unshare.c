/* penroot-unshare: run a command in new namespaces, or in those of a process.
 *
 * Without options a user namespace in which the caller is root, and a mount
 * namespace. Called enroot-nsenter, nothing is entered unless it is asked for.
 */
#include "common.h"

#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

extern char **environ;

enum { REMAP = 2 };

static const char *target, *envfd, *envfile, *workdir;
static const struct word words[] = {
	/* In the order in which they are joined: the user namespace first gives the right to the others. */
	{ "--user", .bit = CLONE_NEWUSER },
	{ "--pid", .bit = CLONE_NEWPID },
	{ "--ipc", .bit = CLONE_NEWIPC },
	{ "--uts", .bit = CLONE_NEWUTS },
	{ "--net", .bit = CLONE_NEWNET },
	{ "--cgroup", .bit = CLONE_NEWCGROUP },
	{ "--mount", .bit = CLONE_NEWNS },
	{ "--remap-root", .bit = REMAP },
	{ "--target", .value = &target },
	{ "--envfd", .value = &envfd },
	{ "--envfile", .value = &envfile },
	{ "--workdir", .value = &workdir },
	{ 0 },
};

/* What /proc/PID/ns calls the first of them. */
static const char *const names[] = { "user", "pid", "ipc", "uts", "net", "cgroup", "mnt" };

/* On stdout and with success also where arguments are missing: as enroot's. */
static void __attribute__((noreturn)) usage(void)
{
	printf("Usage: %s [options] [--] COMMAND [ARG...]\n\n"
	       "Run a command in new namespaces: by default as root of a user namespace, with\n"
	       "a mount namespace of its own.\n\n"
	       " Options:\n"
	       "   --user --mount --pid --net --ipc --uts --cgroup   namespaces to create, or to join\n"
	       "   --remap-root      be root in the new user namespace, not oneself\n"
	       "   --target PID      join the namespaces of a process, its cgroup namespace too\n"
	       "   --envfd FD        take the environment from lines KEY=VALUE of a file descriptor\n"
	       "   --envfile FILE    the same from a file\n"
	       "   --workdir DIR     change to a directory\n",
	       program_invocation_short_name);
	exit(EXIT_SUCCESS);
}

static void create(int flags, bool remap)
{
	if (flags & CLONE_NEWUSER) {
		enter_user(remap ? 0 : geteuid(), remap ? 0 : getegid());
		if (!remap)
			keep_capabilities();
	}
	if (flags & ~CLONE_NEWUSER)
		enter_namespaces(flags & ~CLONE_NEWUSER);
	/* With a new user namespace mounts arrive as slaves, mount_namespaces(7). */
	if ((flags & (CLONE_NEWNS | CLONE_NEWUSER)) == CLONE_NEWNS && mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0)
		err(EXIT_FAILURE, "cannot detach mounts from the host's");
	if (flags & CLONE_NEWPID)
		fork_and_forward();
}

static bool is_ours(int fd, const char *name)
{
	AUTO_FREE path = text("/proc/self/ns/%s", name);
	struct stat theirs, ours;

	return fstat(fd, &theirs) == 0 && stat(path, &ours) == 0 && theirs.st_ino == ours.st_ino && theirs.st_dev == ours.st_dev;
}

static void join(int flags)
{
	int fds[LENGTH(names)];

	/* All first: in its mount namespace /proc may be another one. */
	for (size_t i = 0; i < LENGTH(names); i++) {
		AUTO_FREE path = text("/proc/%s/ns/%s", target, names[i]);

		fds[i] = flags & words[i].bit ? open(path, O_RDONLY | O_CLOEXEC) : -1;
		if (fds[i] < 0 && flags & words[i].bit)
			err(EXIT_FAILURE, "cannot open the %s namespace of process %s", names[i], target);
		if (fds[i] < 0 || is_ours(fds[i], names[i]))
			flags &= ~words[i].bit;
	}
	/* Who is root there could look at this process, and at what it has of the host, until it executes the command. */
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	for (size_t i = 0; i < LENGTH(names); i++) {
		if (flags & words[i].bit && setns(fds[i], words[i].bit) < 0)
			err(EXIT_FAILURE, "cannot join the %s namespace of process %s", names[i], target);
		close_fd(&fds[i]);
	}
	if (flags & CLONE_NEWUSER && geteuid() != 0)
		keep_capabilities();
	if (flags & CLONE_NEWPID)
		fork_and_forward();
}

static void load_environment(int fd, const char *origin)
{
	char *lines = fd < 0 ? NULL : read_all(fd, NULL), *line;

	if (!lines)
		err(EXIT_FAILURE, "cannot read %s", origin);
	close(fd);
	clearenv();
	while ((line = strsep(&lines, "\n")))
		if (strchr(line, '=') && *line != '=')
			putenv(line);
}

int main(int argc, char **argv)
{
	int flags = 0, at = parse_options(argv, 1, words, &flags);

	(void)argc;
	if (flags & HELP || !argv[at])
		usage();
	if (target) {
		AUTO_CLOSE directory = workdir ? open(workdir, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;

		if (target[strspn(target, "0123456789")] || !*target)
			errx(EXIT_FAILURE, "not a process id: %s", target);
		join(flags | CLONE_NEWCGROUP);
		/* /proc/PID/cwd names it only from outside. */
		if (workdir && (directory < 0 || fchdir(directory) < 0) && chdir(workdir) < 0)
			err(EXIT_FAILURE, "cannot change to %s", workdir);
	} else {
		if (!(flags & ~REMAP) && !strstr(program_invocation_short_name, "nsenter"))
			flags = CLONE_NEWUSER | CLONE_NEWNS | REMAP;
		create(flags & ~REMAP, flags & REMAP);
		if (workdir && chdir(workdir) < 0)
			err(EXIT_FAILURE, "cannot change to %s", workdir);
	}
	if (envfd)
		load_environment(atoi(envfd), envfd);
	if (envfile)
		load_environment(open(envfile, O_RDONLY | O_CLOEXEC), envfile);
	execvp(argv[at], argv + at);
	err(errno == ENOENT ? 127 : 126, "cannot run %s", argv[at]);
}
