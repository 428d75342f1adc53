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

static const struct {
	const char *option, *name;
	int flag;
} kinds[] = {
	/* In the order in which they are joined: the user namespace first gives the right to the others. */
	{"--user", "user", CLONE_NEWUSER}, {"--pid", "pid", CLONE_NEWPID}, {"--ipc", "ipc", CLONE_NEWIPC},
	{"--uts", "uts", CLONE_NEWUTS},	   {"--net", "net", CLONE_NEWNET}, {"--cgroup", "cgroup", CLONE_NEWCGROUP},
	{"--mount", "mnt", CLONE_NEWNS},
};

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

	return fstat(fd, &theirs) == 0 && stat(path, &ours) == 0 && theirs.st_ino == ours.st_ino &&
	       theirs.st_dev == ours.st_dev;
}

static void join(const char *target, int flags)
{
	int fds[LENGTH(kinds)];
	bool fork_after = false, as_user = false;

	/* All first: in its mount namespace /proc may be another one. */
	for (size_t i = 0; i < LENGTH(kinds); i++) {
		AUTO_FREE path = text("/proc/%s/ns/%s", target, kinds[i].name);

		fds[i] = -1;
		if (!(flags & kinds[i].flag))
			continue;
		fds[i] = open(path, O_RDONLY | O_CLOEXEC);
		if (fds[i] < 0)
			err(EXIT_FAILURE, "cannot open the %s namespace of process %s", kinds[i].name, target);
		if (is_ours(fds[i], kinds[i].name)) {
			close(fds[i]);
			fds[i] = -1;
		}
	}
	/* Who is root there could look at this process, and at what it has of the host, until it executes the command. */
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	for (size_t i = 0; i < LENGTH(kinds); i++) {
		if (fds[i] < 0)
			continue;
		if (setns(fds[i], kinds[i].flag) < 0)
			err(EXIT_FAILURE, "cannot join the %s namespace of process %s", kinds[i].name, target);
		close(fds[i]);
		fork_after |= kinds[i].flag == CLONE_NEWPID;
		as_user |= kinds[i].flag == CLONE_NEWUSER;
	}
	if (as_user && geteuid() != 0)
		keep_capabilities();
	if (fork_after)
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
	const char *target = NULL, *envfd = NULL, *envfile = NULL, *workdir = NULL, *value;
	bool remap = false;
	int flags = 0, at = 1;

	(void)argc;
	while (argv[at] && argv[at][0] == '-') {
		size_t i = 0;

		if (!strcmp(argv[at], "--")) {
			at++;
			break;
		}
		if (!strcmp(argv[at], "--help") || !strcmp(argv[at], "-h"))
			usage();
		if (!strcmp(argv[at], "--remap-root")) {
			remap = true;
			at++;
			continue;
		}
		if ((value = option(argv, &at, "--target"))) {
			target = value;
			continue;
		}
		if ((value = option(argv, &at, "--envfd"))) {
			envfd = value;
			continue;
		}
		if ((value = option(argv, &at, "--envfile"))) {
			envfile = value;
			continue;
		}
		if ((value = option(argv, &at, "--workdir"))) {
			workdir = value;
			continue;
		}
		while (i < LENGTH(kinds) && strcmp(argv[at], kinds[i].option))
			i++;
		if (i == LENGTH(kinds))
			errx(EXIT_FAILURE, "unknown option: %s", argv[at]);
		flags |= kinds[i].flag;
		at++;
	}
	if (!argv[at])
		usage();
	if (target) {
		AUTO_CLOSE directory = workdir ? open(workdir, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;

		if (!target[strspn(target, "0123456789")] && *target)
			join(target, flags | CLONE_NEWCGROUP);
		else
			errx(EXIT_FAILURE, "not a process id: %s", target);
		/* /proc/PID/cwd names it only from outside. */
		if (workdir && (directory < 0 || fchdir(directory) < 0) && chdir(workdir) < 0)
			err(EXIT_FAILURE, "cannot change to %s", workdir);
	} else {
		if (!flags && !strstr(program_invocation_short_name, "nsenter")) {
			flags = CLONE_NEWUSER | CLONE_NEWNS;
			remap = true;
		}
		create(flags, remap);
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
