/* penroot-runfile: what a bundle's driver (configs/bundle/driver.sh) cannot do in shell.
 *
 *   guard DIR COMMAND...       run COMMAND, delete DIR when it has ended, whatever ended it
 *   enter OPTIONS COMMAND...   namespaces and root file system of the container, then COMMAND
 *   try COMMAND...             run COMMAND in a user and a mount namespace
 *   extract FILE OFFSET DIR    unpack the squashfs image at OFFSET into a new directory, by rename; --quiet
 *   size FILE OFFSET           bytes that it takes unpacked
 *   compressions               those that extract can undo
 *   get ROOT PATH              print a file beneath ROOT; no symlink leads out; status 3 where there is none
 *   put ROOT PATH              write stdin to it, by rename
 *   mkdir ROOT PATH MODE       make a directory and its parents; --named: also in a tree of the host
 *   symlink ROOT TARGET PATH   make a symbolic link
 *   exists ROOT PATH           whether there is such a file
 *   substitute                 stdin to stdout, ${VAR} replaced
 *   environment [WORDS PARTS]  variables of an .env file with ${VAR} replaced; of an image, which gets no secrets
 */
#include "common.h"

#include "../linux.h"
#include "environment.h"
#include "squashfs.h"

#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SPARE = 64 << 20, ABANDONED = 3600, NONE = 3 };

static const char prefix[] = "penroot-bundle.", live[] = "live";

static long long number(const char *word)
{
	char *end;
	long long n = strtoll(word, &end, 10);

	if (!*word || *end || n < 0)
		errx(EXIT_FAILURE, "not a number: %s", word);
	return n;
}

/* The directory of a path, which is cut there; *name is the rest. */
static char *parent_of(const char *path, const char **name)
{
	char *parent = text("%s", path), *slash = strrchr(parent, '/');

	if (!slash || !slash[1])
		errx(EXIT_FAILURE, "not an absolute path: %s", path);
	*slash = '\0';
	*name = slash + 1;
	return parent;
}

/* Fork a process that nobody waits for, and that no signal of the caller's reaches. True in it. */
static bool fork_away(void)
{
	pid_t middle = fork();
	int null;

	if (middle < 0)
		err(EXIT_FAILURE, "cannot fork");
	if (middle > 0) {
		while (waitpid(middle, NULL, 0) < 0 && errno == EINTR)
			;
		return false;
	}
	if (fork())
		_exit(EXIT_SUCCESS);
	setsid();
	for (int signal_ = 1; signal_ < NSIG; signal_++)
		if (signal_ != SIGCHLD)
			signal(signal_, SIG_IGN);
	/* No pipe of the caller's may stay open because of us. */
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	for (int fd = 0; fd < 3; fd++)
		dup2(null, fd);
	if (chdir("/") < 0)
		_exit(EXIT_FAILURE);
	return true;
}

/* -- the working directory ------------------------------------------------------------------------------------ */

/* Directories of bundles that nobody cleaned up, for all their processes were killed: the lock is free. */
static void sweep(const char *parent)
{
	CLEANUP(close_dir) DIR *entries = opendir(parent);
	struct dirent *entry;

	while (entries && (entry = readdir(entries))) {
		AUTO_CLOSE fd = -1;
		struct stat is;

		if (strncmp(entry->d_name, prefix, strlen(prefix)))
			continue;
		fd = openat(dirfd(entries), entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (fd < 0 || fstat(fd, &is) < 0 || is.st_uid != geteuid() || flock(fd, LOCK_EX | LOCK_NB) < 0)
			continue;
		/* One that was never locked may be a start in this very moment. */
		if (faccessat(fd, live, F_OK, 0) < 0 && time(NULL) - is.st_mtime < ABANDONED)
			continue;
		if (delete_beneath(fd))
			unlinkat(dirfd(entries), entry->d_name, AT_REMOVEDIR);
	}
}

static void delete_directory(const char *path)
{
	AUTO_CLOSE fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

	if (fd >= 0 && (!delete_beneath(fd) || rmdir(path) < 0))
		warn("cannot delete %s", path);
}

static void await(int pidfd)
{
	struct pollfd waiting = { .fd = pidfd, .events = POLLIN };

	while (poll(&waiting, 1, -1) < 0 && errno == EINTR)
		;
}

/* A process that outlives a killed guard, to end the container and delete its directory. */
static void watch(const char *directory, pid_t child)
{
	AUTO_CLOSE guard_fd = linux_pidfd_open(getpid());
	AUTO_CLOSE child_fd = linux_pidfd_open(child);

	if (guard_fd < 0 || child_fd < 0)
		err(EXIT_FAILURE, "cannot watch over processes");
	if (!fork_away())
		return;
	await(guard_fd);
	if (access(directory, F_OK) == 0) {
		kill(child, SIGKILL);
		await(child_fd);
		delete_directory(directory);
	}
	_exit(EXIT_SUCCESS);
}

static int guard(char **argv)
{
	AUTO_FREE directory = realpath(argv[0], NULL);
	AUTO_CLOSE fd = directory ? open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
	AUTO_CLOSE mark = -1;
	const char *name;
	pid_t child;
	int status;

	if (fd < 0)
		err(EXIT_FAILURE, "cannot open %s", argv[0]);
	AUTO_FREE parent = parent_of(directory, &name);
	flock(fd, LOCK_EX | LOCK_NB); /* where a file system has none, nothing is swept */
	mark = openat(fd, live, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	sweep(*parent ? parent : "/");
	child = fork_heard();
	if (child == 0) {
		execv(argv[1], argv + 1);
		err(EXIT_FAILURE, "cannot run %s", argv[1]);
	}
	watch(directory, child);
	status = wait_and_forward(child);
	delete_directory(directory);
	return end_as(status);
}

/* -- the image ------------------------------------------------------------------------------------------------ */

static void unpack(const char *path, const char *offset, const char *to, bool quiet)
{
	AUTO_CLOSE directory = open(to, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct squashfs *fs = squashfs_open(path, number(offset));
	uint64_t need = squashfs_size(fs), room;
	struct statvfs is;

	if (directory < 0 || fstatvfs(directory, &is) < 0)
		err(EXIT_FAILURE, "cannot open %s", to);
	room = (uint64_t)is.f_bavail * is.f_frsize;
	if (room < need)
		errx(EXIT_FAILURE,
		     "not enough space in %s: %llu MiB are needed, %llu MiB are free; set ENROOT_TEMP_PATH to another directory", to,
		     (unsigned long long)need >> 20, (unsigned long long)room >> 20);
	squashfs_unpack(fs, directory, !quiet && isatty(STDERR_FILENO) && need > SPARE);
	squashfs_close(fs);
}

/* DIR appears when it is complete, and nothing is left where it never is. */
static int extract(char **argv)
{
	const char *to = argv[2], *name;
	AUTO_FREE parent = parent_of(to, &name);
	AUTO_FREE temporary = text("%s/.%s.%d", parent, name, getpid());
	pid_t child;
	int status;

	if (access(to, F_OK) == 0)
		errx(EXIT_FAILURE, "file exists: %s", to);
	if (mkdir(temporary, 0700) < 0)
		err(EXIT_FAILURE, "cannot create %s", temporary);
	child = fork_heard();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
		unpack(argv[0], argv[1], temporary, argv[3]);
		_exit(EXIT_SUCCESS);
	}
	status = wait_and_forward(child);
	if (status == 0 && rename(temporary, to) < 0) {
		warn("cannot create %s", to);
		status = EXIT_FAILURE;
	}
	if (status)
		delete_directory(temporary);
	return status;
}

static int size(char **argv)
{
	struct squashfs *fs = squashfs_open(argv[0], number(argv[1]));

	printf("%llu\n", (unsigned long long)squashfs_size(fs));
	squashfs_close(fs);
	return EXIT_SUCCESS;
}

static int compressions(char **argv)
{
	(void)argv;
	puts(SQUASHFS_COMPRESSIONS);
	return EXIT_SUCCESS;
}

/* -- the root file system ------------------------------------------------------------------------------------- */

enum { REMAP = 2, WRITABLE = 4, QUIET = 8, APART = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS };

static struct {
	const char *work, *image, *offset, *keep, *server;
	int flags;
} start;

static int try(char **argv)
{
	enter_user(0, 0);
	enter_namespaces(CLONE_NEWNS);
	execv(argv[0], argv);
	err(EXIT_FAILURE, "cannot run %s", argv[0]);
}

/* Forks the process that serves the image, where /dev/fuse is open to us. It stays in the old mount namespace and ends
 * when the kernel ends the connection, with the last process of the new one. Returns the descriptor of the connection,
 * or -1; what is written to *go begins it. */
static int start_server(int *go)
{
	/* The descriptor must belong to the user namespace that mounts. */
	int fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC), pair[2];

	if (fuse < 0)
		return -1;
	if (pipe2(pair, O_CLOEXEC) < 0)
		err(EXIT_FAILURE, "cannot start %s", start.server);
	if (fork_away()) {
		AUTO_FREE options = text("offset=%lld", number(start.offset));
		char c;

		close(pair[1]);
		if (read(pair[0], &c, 1) != 1)
			_exit(EXIT_SUCCESS);
		if (fuse == 3)
			fcntl(3, F_SETFD, 0);
		else
			dup2(fuse, 3);
		execle(start.server, start.server, "-f", "-o", options, start.image, "/dev/fd/3", NULL,
		       (char *[]){ "PATH=/usr/bin:/bin", NULL });
		_exit(127);
	}
	close(pair[0]);
	*go = pair[1];
	return fuse;
}

/* Mounts what is served; false where the server does not answer: libfuse 2 takes no descriptor. */
static bool mount_served(int fuse, int go, const char *target)
{
	AUTO_FREE data =
		text("fd=%d,rootmode=40000,user_id=%u,group_id=%u,allow_other,default_permissions", fuse, geteuid(), getegid());
	bool mounted = mount("squashfuse", target, "fuse.squashfuse", MS_RDONLY | MS_NOSUID | MS_NODEV, data) == 0;
	struct stat is;

	if (mounted && write(go, "g", 1) != 1)
		warn("cannot start the FUSE server");
	close(go);
	close(fuse);
	if (!mounted)
		return false;
	if (stat(target, &is) == 0 && access(target, X_OK) == 0) {
		CLEANUP(close_dir) DIR *entries = opendir(target);

		if (entries && readdir(entries))
			return true;
	}
	umount2(target, MNT_DETACH);
	return false;
}

static void make_directory(const char *path)
{
	if (mkdir(path, 0755) < 0 && errno != EEXIST)
		err(EXIT_FAILURE, "cannot create %s", path);
}

static bool mount_overlay(const char *lower, const char *more)
{
	AUTO_FREE data = text("lowerdir=%s,upperdir=upper,workdir=ovl,userxattr%s", lower, more);

	return mount("overlay", "mnt/root", "overlay", MS_NOSUID | MS_NODEV, data) == 0;
}

static void mount_unpacked(void)
{
	const char *path = start.keep ? start.keep : "rootfs";
	AUTO_CLOSE directory = -1;
	AUTO_FREE source = NULL;

	if (!start.keep) {
		make_directory(path);
		unpack(start.image, start.offset, path, start.flags & QUIET);
	}
	directory = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (directory < 0)
		err(EXIT_FAILURE, "cannot open %s", path);
	source = text("/proc/self/fd/%d", directory);
	/* A directory that is kept is changed only with --rw; one that is not is ours alone. */
	if ((start.flags & WRITABLE || !mount_overlay(source, "")) && mount(source, "mnt/root", NULL, MS_BIND | MS_REC, NULL) < 0)
		err(EXIT_FAILURE, "cannot mount the root file system");
}

/* In the working directory, WORK. */
static void mount_root(uid_t uid, gid_t gid)
{
	int flags = (start.flags & APART & ~CLONE_NEWPID) | CLONE_NEWNS | CLONE_NEWCGROUP, fuse = -1, go = -1;
	bool served;

	make_directory("mnt");
	make_directory("upper");
	make_directory("ovl");
	if (start.server) {
		/* Files of the image belong to root: to the caller in a namespace where he is root, and to him under
		 * his own number in another one inside it. With --root it is another one too: who is root there
		 * cannot look at the server, whose root directory is the host's. */
		enter_user(0, 0);
		fuse = start_server(&go);
		enter_namespaces(CLONE_NEWNS);
	} else {
		enter_user(uid, gid);
		enter_namespaces(flags);
	}
	if (mount("tmpfs", "mnt", "tmpfs", MS_NOSUID | MS_NODEV, "mode=700") < 0)
		err(EXIT_FAILURE, "cannot mount a tmpfs on %s/mnt", start.work);
	make_directory("mnt/root");
	make_directory("mnt/lower");
	served = fuse >= 0 && mount_served(fuse, go, "mnt/lower");
	if (start.server) {
		enter_user(uid, gid);
		enter_namespaces(flags);
	}
	/* Some file systems cannot hold an upper directory. */
	if (!served || !mount_overlay("mnt/lower", ",xino=off"))
		mount_unpacked();
	if (uid)
		keep_capabilities();
}

static int enter(char **argv)
{
	static const struct word words[] = {
		{ "--work", .value = &start.work },
		{ "--image", .value = &start.image },
		{ "--offset", .value = &start.offset },
		{ "--keep", .value = &start.keep },
		{ "--server", .value = &start.server },
		{ "--root", .bit = REMAP },
		{ "--rw", .bit = WRITABLE },
		{ "--quiet", .bit = QUIET },
		{ "--pid", .bit = CLONE_NEWPID },
		{ "--net", .bit = CLONE_NEWNET },
		{ "--ipc", .bit = CLONE_NEWIPC },
		{ "--uts", .bit = CLONE_NEWUTS },
		{ 0 },
	};
	/* Where we are, by a way that stays right when the working directory changes to the mounts' one. */
	AUTO_CLOSE here = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
	char **command = argv + parse_options(argv, 0, words, &start.flags);
	bool remap = start.flags & REMAP;
	AUTO_FREE root = NULL;

	if (!start.work || !start.image || !start.offset || !*command)
		errx(EXIT_FAILURE, "usage: enter --work DIR --image FILE --offset N COMMAND...");
	if (chdir(start.work) < 0)
		err(EXIT_FAILURE, "cannot enter %s", start.work);
	mount_root(remap ? 0 : geteuid(), remap ? 0 : getegid());
	if (fchdir(here) < 0 && chdir("/") < 0)
		err(EXIT_FAILURE, "cannot go back");
	if (start.flags & CLONE_NEWPID) {
		if (unshare(CLONE_NEWPID) < 0)
			err(EXIT_FAILURE, "cannot create a PID namespace");
		fork_and_forward();
	}
	root = text("%s/mnt/root", start.work);
	setenv("ENROOT_ROOTFS", root, 1);
	execv(*command, command);
	err(EXIT_FAILURE, "cannot run %s", *command);
}

/* -- files beneath the root ----------------------------------------------------------------------------------- */

static int get(char **argv)
{
	const char *path = argv[1];
	AUTO_CLOSE root = open_root(argv[0]);
	AUTO_CLOSE fd = strcmp(argv[0], "/") ? open_regular_in(root, path) : open(path, O_RDONLY | O_CLOEXEC);
	size_t length;
	AUTO_FREE all = fd < 0 ? NULL : read_all(fd, &length);

	if (all)
		return write_all(STDOUT_FILENO, all, length) ? EXIT_SUCCESS : EXIT_FAILURE;
	if (errno == ENOENT || errno == ENOTDIR)
		return NONE;
	if (errno == EINVAL)
		errx(EXIT_FAILURE, "cannot read %s of the image: it is not a regular file", path);
	err(EXIT_FAILURE, "cannot read %s of the image", path);
}

/* The directory of a path of the container's own, which is made where there is none. */
static int make_parent(const char *root_path, const char *path, const char **name, const char *what)
{
	AUTO_CLOSE root = open_root(root_path);
	int parent = create_in(root, parent_of(path, name), S_IFDIR, 0755, OWN);

	if (parent >= 0 && !is_own(root, parent))
		errx(EXIT_FAILURE, "cannot %s %s: the image links to what is mounted from the host", what, path);
	if (parent < 0)
		err(EXIT_FAILURE, "cannot %s %s", what, path);
	return parent;
}

static int put(char **argv)
{
	size_t length;
	AUTO_FREE all = read_all(STDIN_FILENO, &length);
	AUTO_FREE temporary = text(".penroot.%d", getpid());
	const char *name;
	AUTO_CLOSE parent = make_parent(argv[0], argv[1], &name, "write");
	AUTO_CLOSE fd = all ? openat(parent, temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644) : -1;

	if (fd < 0 || !write_all(fd, all, length) || renameat(parent, temporary, parent, name) < 0)
		err(EXIT_FAILURE, "cannot write %s", argv[1]);
	return EXIT_SUCCESS;
}

static int make(char **argv)
{
	AUTO_CLOSE root = open_root(argv[0]);
	AUTO_CLOSE fd = -1;

	umask(0);
	fd = create_in(root, argv[1], S_IFDIR, (mode_t)strtoul(argv[2], NULL, 8), argv[3] ? NAMED : OWN);
	if (fd < 0 && errno == EXDEV)
		errx(EXIT_FAILURE, "cannot create %s: it leads to what is mounted from the host", argv[1]);
	if (fd < 0)
		err(EXIT_FAILURE, "cannot create %s", argv[1]);
	return EXIT_SUCCESS;
}

static int make_symlink(char **argv)
{
	const char *name;
	AUTO_CLOSE parent = make_parent(argv[0], argv[2], &name, "create");

	if (symlinkat(argv[1], parent, name) < 0)
		err(EXIT_FAILURE, "cannot create %s", argv[2]);
	return EXIT_SUCCESS;
}

static int exists(char **argv)
{
	AUTO_CLOSE root = open_root(argv[0]);
	AUTO_CLOSE fd = open_in(root, argv[1], O_PATH);

	return fd >= 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

static int print_substituted(char **argv)
{
	AUTO_FREE all = read_all(STDIN_FILENO, NULL);
	AUTO_FREE done = all ? substitute(all) : NULL;

	(void)argv;
	return done && write_all(STDOUT_FILENO, done, strlen(done)) ? EXIT_SUCCESS : EXIT_FAILURE;
}

static int environment(char **argv)
{
	AUTO_FREE all = read_all(STDIN_FILENO, NULL);

	if (!all)
		err(EXIT_FAILURE, "cannot read the environment");
	print_environment(all, argv[0] && argv[1] ? &(struct secrets){ .words = argv[0], .parts = argv[1] } : NULL);
	return fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

static const struct {
	const char *name;
	int least, most; /* of its arguments */
	int (*run)(char **argv);
} verbs[] = {
	{ "guard", 2, INT_MAX, guard },
	{ "enter", 2, INT_MAX, enter },
	{ "try", 1, INT_MAX, try },
	{ "extract", 3, 4, extract },
	{ "size", 2, 2, size },
	{ "compressions", 0, 0, compressions },
	{ "get", 2, 2, get },
	{ "put", 2, 2, put },
	{ "mkdir", 3, 4, make },
	{ "symlink", 3, 3, make_symlink },
	{ "exists", 2, 2, exists },
	{ "substitute", 0, 0, print_substituted },
	{ "environment", 0, 2, environment },
};

int main(int argc, char **argv)
{
	for (size_t i = 0; argc > 1 && i < LENGTH(verbs); i++)
		if (!strcmp(argv[1], verbs[i].name) && argc - 2 >= verbs[i].least && argc - 2 <= verbs[i].most)
			return verbs[i].run(argv + 2);
	fprintf(stderr, "%s is called by bundles, not by people\n", program_invocation_short_name);
	return EXIT_FAILURE;
}
