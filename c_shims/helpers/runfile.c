/* penroot-runfile: what a bundle's driver (enroot_py/bundle.sh) cannot do in shell.
 *
 *   guard DIR COMMAND...       run COMMAND, delete DIR when it has ended, whatever ended it
 *   enter OPTIONS COMMAND...   namespaces and root file system of the container, then COMMAND
 *   extract FILE OFFSET DIR    unpack the squashfs image at OFFSET into a new directory
 *   size FILE OFFSET           bytes that it takes unpacked
 *   compressions               those that extract can undo
 *   get ROOT PATH              print a file beneath ROOT; no symlink leads out; status 3 where there is none
 *   put ROOT PATH              write stdin to it, by rename
 *   mkdir ROOT PATH MODE       make a directory and its parents; --named: also in a tree of the host
 *   symlink ROOT TARGET PATH   make a symbolic link
 *   exists ROOT PATH           whether there is such a file
 *   substitute                 stdin to stdout, ${VAR} replaced
 *   environment [WORDS PARTS]  variables of an .env file with ${VAR} replaced; of an image, which gets no secrets
 *   check                      whether this host can run bundles
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
#include <sys/mman.h>
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
	struct pollfd waiting = {.fd = pidfd, .events = POLLIN};

	while (poll(&waiting, 1, -1) < 0 && errno == EINTR)
		;
}

/* A process that outlives a killed guard, to end the container and delete its directory. */
static void watch(const char *directory, pid_t child)
{
	int guard_fd = linux_pidfd_open(getpid()), child_fd = linux_pidfd_open(child), null;
	pid_t middle = guard_fd < 0 || child_fd < 0 ? -1 : fork();

	if (middle < 0)
		err(EXIT_FAILURE, "cannot fork");
	if (middle > 0) {
		while (waitpid(middle, NULL, 0) < 0 && errno == EINTR)
			;
		close(guard_fd);
		close(child_fd);
		return;
	}
	if (fork())
		_exit(EXIT_SUCCESS);
	setsid();
	for (int signal_ = 1; signal_ < NSIG; signal_++)
		signal(signal_, SIG_IGN);
	/* No pipe of the caller's may stay open because of us. */
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	for (int fd = 0; fd < 3; fd++)
		dup2(null, fd);
	if (chdir("/") < 0)
		_exit(EXIT_FAILURE);
	await(guard_fd);
	if (access(directory, F_OK) < 0)
		_exit(EXIT_SUCCESS);
	kill(child, SIGKILL);
	await(child_fd);
	delete_directory(directory);
	_exit(EXIT_SUCCESS);
}

static int guard(char **argv)
{
	AUTO_FREE directory = realpath(argv[0], NULL);
	AUTO_FREE parent = directory ? strdup(directory) : NULL;
	AUTO_CLOSE fd = -1, mark = -1;
	pid_t child;
	int status;

	if (!directory || !parent)
		err(EXIT_FAILURE, "cannot find %s", argv[0]);
	*strrchr(parent, '/') = '\0';
	fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		err(EXIT_FAILURE, "cannot open %s", directory);
	flock(fd, LOCK_EX | LOCK_NB); /* where a file system has none, nothing is swept */
	mark = openat(fd, live, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	sweep(*parent ? parent : "/");
	catch_signals();
	child = fork();
	if (child < 0)
		err(EXIT_FAILURE, "cannot fork");
	if (child == 0) {
		release_signals();
		execv(argv[1], argv + 1);
		err(EXIT_FAILURE, "cannot run %s", argv[1]);
	}
	watch(directory, child);
	status = wait_and_forward(child);
	delete_directory(directory);
	if (status > 128) {
		signal(status - 128, SIG_DFL);
		raise(status - 128);
	}
	return status;
}

/* -- the image ------------------------------------------------------------------------------------------------ */

struct mapping {
	uint8_t *data;
	size_t length;
};

static void unmap(struct mapping *mapping)
{
	munmap(mapping->data, mapping->length);
}

static struct mapping map(const char *path)
{
	AUTO_CLOSE fd = open(path, O_RDONLY | O_CLOEXEC);
	struct mapping mapping;
	struct stat is;

	if (fd < 0 || fstat(fd, &is) < 0)
		err(EXIT_FAILURE, "cannot open %s", path);
	mapping.length = (size_t)is.st_size;
	mapping.data = mmap(NULL, mapping.length ? mapping.length : 1, PROT_READ, MAP_PRIVATE, fd, 0);
	if (mapping.data == MAP_FAILED)
		err(EXIT_FAILURE, "cannot read %s", path);
	return mapping;
}

static void extract(const char *path, long long offset, const char *to, bool quiet)
{
	CLEANUP(unmap) struct mapping file = map(path);
	AUTO_CLOSE directory = open(to, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct squashfs *fs;
	struct statvfs room;
	uint64_t need;

	if ((size_t)offset > file.length)
		errx(EXIT_FAILURE, "%s is truncated: %zu of more than %lld bytes", path, file.length, offset);
	if (directory < 0 || fstatvfs(directory, &room) < 0)
		err(EXIT_FAILURE, "cannot open %s", to);
	fs = squashfs_open(file.data + offset, file.length - (size_t)offset);
	need = squashfs_size(fs);
	if ((uint64_t)room.f_bavail * room.f_frsize < need)
		errx(EXIT_FAILURE,
		     "not enough space in %s: %llu MiB are needed, %llu MiB are free; set ENROOT_TEMP_PATH to another directory",
		     to, (unsigned long long)need >> 20, (unsigned long long)room.f_bavail * room.f_frsize >> 20);
	squashfs_unpack(fs, directory, !quiet && isatty(STDERR_FILENO) && need > SPARE);
	squashfs_close(fs);
}

/* DIR appears when it is complete, and nothing is left where it never is. */
static int extract_new(const char *path, long long offset, const char *to, bool quiet)
{
	AUTO_FREE copy = strdup(to);
	char *slash = copy ? strrchr(copy, '/') : NULL;
	AUTO_FREE temporary = NULL;
	pid_t child;
	int status;

	if (!slash || !slash[1])
		errx(EXIT_FAILURE, "not an absolute path: %s", to);
	*slash = '\0';
	temporary = text("%s/.%s.%d", copy, slash + 1, getpid());
	if (access(to, F_OK) == 0)
		errx(EXIT_FAILURE, "file exists: %s", to);
	if (*copy) {
		AUTO_CLOSE root = open_root("/");
		AUTO_CLOSE parent = create_in(root, copy, S_IFDIR, 0700, ANYWHERE);

		if (parent < 0)
			err(EXIT_FAILURE, "cannot create %s", copy);
	}
	if (mkdir(temporary, 0700) < 0)
		err(EXIT_FAILURE, "cannot create %s", temporary);
	catch_signals();
	child = fork();
	if (child == 0) {
		release_signals();
		prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
		extract(path, offset, temporary, quiet);
		_exit(EXIT_SUCCESS);
	}
	status = child < 0 ? EXIT_FAILURE : wait_and_forward(child);
	if (status == 0 && rename(temporary, to) < 0) {
		warn("cannot create %s", to);
		status = EXIT_FAILURE;
	}
	if (status)
		delete_directory(temporary);
	return status;
}

static int print_size(const char *path, long long offset)
{
	CLEANUP(unmap) struct mapping file = map(path);
	struct squashfs *fs;

	if ((size_t)offset > file.length)
		errx(EXIT_FAILURE, "%s is truncated", path);
	fs = squashfs_open(file.data + offset, file.length - (size_t)offset);
	printf("%llu\n", (unsigned long long)squashfs_size(fs));
	squashfs_close(fs);
	return EXIT_SUCCESS;
}

/* -- the root file system ------------------------------------------------------------------------------------- */

struct server {
	int fuse, go;
};

static char *find_program(const char *name)
{
	const char *path = getenv("PATH");
	AUTO_FREE search = text("%s", path ? path : "/usr/local/bin:/usr/bin:/bin");
	char *rest = search, *directory;

	while ((directory = strsep(&rest, ":"))) {
		char *program = text("%s/%s", directory, name);

		if (*directory == '/' && access(program, X_OK) == 0)
			return program;
		free(program);
	}
	return NULL;
}

/* Forks the process that serves the image, where one is installed and /dev/fuse is open to us. It stays in the
 * old mount namespace and ends when the kernel ends the connection, with the last process of the new one. */
static bool start_server(struct server *server, const char *image, long long offset, const char *program)
{
	int go[2];
	pid_t middle;

	/* The descriptor must belong to the user namespace that mounts. */
	server->fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	if (server->fuse < 0)
		return false;
	if (pipe2(go, O_CLOEXEC) < 0 || (middle = fork()) < 0)
		err(EXIT_FAILURE, "cannot start %s", program);
	if (middle == 0) {
		AUTO_FREE options = text("offset=%lld", offset);
		char c;
		int null;

		if (fork())
			_exit(EXIT_SUCCESS);
		setsid();
		for (int signal_ = 1; signal_ < NSIG; signal_++)
			if (signal_ != SIGCHLD)
				signal(signal_, SIG_IGN);
		close(go[1]);
		if (read(go[0], &c, 1) != 1)
			_exit(EXIT_SUCCESS);
		null = open("/dev/null", O_RDWR | O_CLOEXEC);
		for (int fd = 0; fd < 3; fd++)
			dup2(null, fd);
		if (server->fuse == 3)
			fcntl(3, F_SETFD, 0);
		else
			dup2(server->fuse, 3);
		if (chdir("/") == 0)
			execle(program, program, "-f", "-o", options, image, "/dev/fd/3", NULL,
			       (char *[]){"PATH=/usr/bin:/bin", NULL});
		_exit(127);
	}
	close(go[0]);
	server->go = go[1];
	while (waitpid(middle, NULL, 0) < 0 && errno == EINTR)
		;
	return true;
}

/* Mounts what is served; false where the server does not answer: libfuse 2 takes no descriptor. */
static bool mount_served(struct server *server, const char *target)
{
	AUTO_FREE data = text("fd=%d,rootmode=40000,user_id=%u,group_id=%u,allow_other,default_permissions", server->fuse,
			      geteuid(), getegid());
	bool mounted = mount("squashfuse", target, "fuse.squashfuse", MS_RDONLY | MS_NOSUID | MS_NODEV, data) == 0;
	struct stat is;

	if (mounted && write(server->go, "g", 1) != 1)
		warn("cannot start the FUSE server");
	close(server->go);
	close(server->fuse);
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

static const char enter_usage[] = "enter --work DIR --image FILE --offset N [--keep DIR] [--root] [--rw] [--quiet] "
				  "[--pid] [--net] [--ipc] [--uts] COMMAND...";

static int enter(char **argv)
{
	static const struct {
		const char *option;
		int flag;
	} kinds[] = {{"--pid", CLONE_NEWPID}, {"--net", CLONE_NEWNET}, {"--ipc", CLONE_NEWIPC}, {"--uts", CLONE_NEWUTS}};
	const char *work = NULL, *image = NULL, *offset = NULL, *keep = NULL, *value;
	bool remap = false, writable = false, quiet = false, served = false;
	int flags = CLONE_NEWNS | CLONE_NEWCGROUP, at = 0;
	uid_t uid = geteuid();
	gid_t gid = getegid();
	AUTO_FREE program = NULL;
	AUTO_FREE root = NULL;
	struct server server;

	while (argv[at] && argv[at][0] == '-') {
		size_t i = 0;

		if ((value = option(argv, &at, "--work"))) {
			work = value;
			continue;
		}
		if ((value = option(argv, &at, "--image"))) {
			image = value;
			continue;
		}
		if ((value = option(argv, &at, "--offset"))) {
			offset = value;
			continue;
		}
		if ((value = option(argv, &at, "--keep"))) {
			keep = value;
			continue;
		}
		while (i < LENGTH(kinds) && strcmp(kinds[i].option, argv[at]))
			i++;
		if (i < LENGTH(kinds))
			flags |= kinds[i].flag;
		else if (!strcmp(argv[at], "--root"))
			remap = true;
		else if (!strcmp(argv[at], "--rw"))
			writable = true;
		else if (!strcmp(argv[at], "--quiet"))
			quiet = true;
		else
			break;
		at++;
	}
	if (!work || !image || !offset || !argv[at])
		errx(EXIT_FAILURE, "usage: %s", enter_usage);
	if (remap)
		uid = gid = 0;
	root = text("%s/mnt/root", work);
	{
		/* Where we are, by a way that stays right when the working directory changes to the mounts' one. */
		AUTO_CLOSE here = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);

		if (!keep) {
			program = find_program("squashfuse_ll");
			if (!program)
				program = find_program("squashfuse");
		}
		if (chdir(work) < 0)
			err(EXIT_FAILURE, "cannot enter %s", work);
		make_directory("mnt");
		make_directory("upper");
		make_directory("ovl");
		if (program) {
			/* Files of the image belong to root: to the caller in a namespace where he is root, and
			 * to him under his own number in another one inside it. With --root it is another one too:
			 * who is root there cannot look at the server, whose root directory is the host's. */
			enter_user(0, 0);
			served = start_server(&server, image, number(offset), program);
			enter_namespaces(CLONE_NEWNS);
		} else {
			enter_user(uid, gid);
			enter_namespaces(flags & ~CLONE_NEWPID);
		}
		if (mount("tmpfs", "mnt", "tmpfs", MS_NOSUID | MS_NODEV, "mode=700") < 0)
			err(EXIT_FAILURE, "cannot mount a tmpfs on %s/mnt", work);
		make_directory("mnt/root");
		make_directory("mnt/lower");
		served = served && mount_served(&server, "mnt/lower");
		if (program) {
			enter_user(uid, gid);
			enter_namespaces(flags & ~CLONE_NEWPID);
		}
		if (served && mount("overlay", "mnt/root", "overlay", MS_NOSUID | MS_NODEV,
				    "lowerdir=mnt/lower,upperdir=upper,workdir=ovl,userxattr,xino=off") < 0)
			served = false; /* a file system that cannot hold an upper directory */
		if (!served) {
			AUTO_CLOSE directory = -1;

			if (!keep) {
				make_directory("rootfs");
				extract(image, number(offset), "rootfs", quiet);
			} else if (fchdir(here) < 0) {
				err(EXIT_FAILURE, "cannot go back");
			}
			directory = open(keep ? keep : "rootfs", O_PATH | O_DIRECTORY | O_CLOEXEC);
			if (directory < 0 || chdir(work) < 0)
				err(EXIT_FAILURE, "cannot open %s", keep ? keep : "rootfs");
			{
				AUTO_FREE source = text("/proc/self/fd/%d", directory);
				AUTO_FREE data = text("lowerdir=%s,upperdir=upper,workdir=ovl,userxattr", source);

				/* A directory that is kept is changed only with --rw; one that is not is ours alone. */
				if ((writable || mount("overlay", "mnt/root", "overlay", MS_NOSUID | MS_NODEV, data) < 0) &&
				    mount(source, "mnt/root", NULL, MS_BIND | MS_REC, NULL) < 0)
					err(EXIT_FAILURE, "cannot mount the root file system");
			}
		}
		if (uid)
			keep_capabilities();
		if (fchdir(here) < 0 && chdir("/") < 0)
			err(EXIT_FAILURE, "cannot go back");
	}
	if (flags & CLONE_NEWPID) {
		if (unshare(CLONE_NEWPID) < 0)
			err(EXIT_FAILURE, "cannot create a PID namespace");
		fork_and_forward();
	}
	setenv("ENROOT_ROOTFS", root, 1);
	execv(argv[at], argv + at);
	err(EXIT_FAILURE, "cannot run %s", argv[at]);
}

/* -- files beneath the root ----------------------------------------------------------------------------------- */

static int get(const char *directory, const char *path)
{
	AUTO_CLOSE root = open_root(directory);
	AUTO_CLOSE fd = strcmp(directory, "/") ? open_regular_in(root, path) : open(path, O_RDONLY | O_CLOEXEC);
	size_t length;
	AUTO_FREE all = fd < 0 ? NULL : read_all(fd, &length);

	if (!all) {
		if (errno == ENOENT || errno == ENOTDIR)
			return NONE;
		if (errno == EINVAL)
			errx(EXIT_FAILURE, "cannot read %s of the image: it is not a regular file", path);
		err(EXIT_FAILURE, "cannot read %s of the image", path);
	}
	return write_all(STDOUT_FILENO, all, length) ? EXIT_SUCCESS : EXIT_FAILURE;
}

static int put(const char *directory, const char *path)
{
	size_t length;
	AUTO_FREE all = read_all(STDIN_FILENO, &length);
	AUTO_FREE parent_path = strdup(path);
	AUTO_FREE temporary = text(".penroot.%d", getpid());
	AUTO_CLOSE root = open_root(directory);
	AUTO_CLOSE parent = -1, fd = -1;
	char *slash;

	if (!all || !parent_path || !(slash = strrchr(parent_path, '/')))
		errx(EXIT_FAILURE, "cannot write %s", path);
	*slash = '\0';
	parent = create_in(root, parent_path, S_IFDIR, 0755, OWN);
	if (parent >= 0 && !is_own(root, parent))
		errx(EXIT_FAILURE, "cannot write %s: the image links to what is mounted from the host", path);
	fd = parent < 0 ? -1 : openat(parent, temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
	if (fd < 0 || !write_all(fd, all, length) || renameat(parent, temporary, parent, slash + 1) < 0)
		err(EXIT_FAILURE, "cannot write %s", path);
	return EXIT_SUCCESS;
}

static int make(const char *directory, const char *path, const char *mode, enum place place)
{
	AUTO_CLOSE root = open_root(directory);
	AUTO_CLOSE fd = -1;

	umask(0);
	fd = create_in(root, path, S_IFDIR, (mode_t)strtoul(mode, NULL, 8), place);
	if (fd < 0 && errno == EXDEV)
		errx(EXIT_FAILURE, "cannot create %s: it leads to what is mounted from the host", path);
	if (fd < 0)
		err(EXIT_FAILURE, "cannot create %s", path);
	return EXIT_SUCCESS;
}

static int make_symlink(const char *directory, const char *target, const char *path)
{
	AUTO_FREE parent_path = strdup(path);
	char *slash = parent_path ? strrchr(parent_path, '/') : NULL;
	AUTO_CLOSE root = open_root(directory);
	AUTO_CLOSE parent = -1;

	if (!slash)
		errx(EXIT_FAILURE, "not an absolute path: %s", path);
	*slash = '\0';
	parent = create_in(root, parent_path, S_IFDIR, 0755, OWN);
	if (parent >= 0 && !is_own(root, parent))
		errx(EXIT_FAILURE, "cannot create %s: the image links to what is mounted from the host", path);
	if (parent < 0 || symlinkat(target, parent, slash + 1) < 0)
		err(EXIT_FAILURE, "cannot create %s", path);
	return EXIT_SUCCESS;
}

static int exists(const char *directory, const char *path)
{
	AUTO_CLOSE root = open_root(directory);
	AUTO_CLOSE fd = open_in(root, path, O_PATH);

	return fd >= 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

static int print_substituted(void)
{
	AUTO_FREE all = read_all(STDIN_FILENO, NULL);
	AUTO_FREE done = all ? substitute(all) : NULL;

	return done && write_all(STDOUT_FILENO, done, strlen(done)) ? EXIT_SUCCESS : EXIT_FAILURE;
}

static int environment(const struct secrets *secrets)
{
	AUTO_FREE all = read_all(STDIN_FILENO, NULL);

	if (!all)
		err(EXIT_FAILURE, "cannot read the environment");
	print_environment(all, secrets);
	return fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* -- whether this host can ------------------------------------------------------------------------------------ */

static bool try(void (*function)(void))
{
	pid_t child = fork();
	int status = 1;

	if (child == 0) {
		int null = open("/dev/null", O_WRONLY | O_CLOEXEC);

		dup2(null, STDERR_FILENO);
		function();
		_exit(EXIT_SUCCESS);
	}
	return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

static void try_user(void)
{
	enter_user(0, 0);
	enter_namespaces(CLONE_NEWNS);
}

static void try_overlay(void)
{
	try_user();
	/* Upon /sys, which every host has, in a mount namespace of our own. */
	if (mount("tmpfs", "/sys", "tmpfs", 0, NULL) < 0 || chdir("/sys") < 0 || mkdir("l", 0755) < 0 || mkdir("m", 0755) < 0 || mkdir("r", 0755) < 0 ||
	    mount("overlay", "r", "overlay", 0, "lowerdir=l:m,userxattr") < 0)
		_exit(EXIT_FAILURE);
}

static void try_fuse(void)
{
	int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		_exit(EXIT_FAILURE);
}

static void try_filter(void)
{
	if (access("/proc/sys/kernel/seccomp/actions_avail", R_OK) < 0)
		_exit(EXIT_FAILURE);
}

static void report(const char *what, bool ok, const char *otherwise)
{
	printf("%-45s: %s%s%s%s\n", what, ok ? "OK" : "KO", ok ? "" : " (", ok ? "" : otherwise, ok ? "" : ")");
}

static int check(void)
{
	AUTO_FREE low_level = find_program("squashfuse_ll");
	AUTO_FREE high_level = find_program("squashfuse");
	bool user = try(try_user), filter = try(try_filter);

	report("User and mount namespaces", user, "required: see user_namespaces(7)");
	report("System call filter", filter, "required: CONFIG_SECCOMP_FILTER");
	report("Overlay file system in a user namespace", try(try_overlay), "optional");
	report("/dev/fuse", try(try_fuse), "optional: starts without extracting");
	report("squashfuse", low_level || high_level, "optional: starts without extracting");
	return user && filter ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(int argc, char **argv)
{
	const char *verb = argc > 1 ? argv[1] : "";
	char **rest = argv + 2;

	if (!strcmp(verb, "guard") && argc > 3)
		return guard(rest);
	if (!strcmp(verb, "enter") && argc > 3)
		return enter(rest);
	if (!strcmp(verb, "extract") && (argc == 5 || (argc == 6 && !strcmp(rest[3], "--quiet"))))
		return extract_new(rest[0], number(rest[1]), rest[2], argc == 6);
	if (!strcmp(verb, "size") && argc == 4)
		return print_size(rest[0], number(rest[1]));
	if (!strcmp(verb, "get") && argc == 4)
		return get(rest[0], rest[1]);
	if (!strcmp(verb, "put") && argc == 4)
		return put(rest[0], rest[1]);
	if (!strcmp(verb, "mkdir") && (argc == 5 || (argc == 6 && !strcmp(rest[3], "--named"))))
		return make(rest[0], rest[1], rest[2], argc == 6 ? NAMED : OWN);
	if (!strcmp(verb, "exists") && argc == 4)
		return exists(rest[0], rest[1]);
	if (!strcmp(verb, "symlink") && argc == 5)
		return make_symlink(rest[0], rest[1], rest[2]);
	if (!strcmp(verb, "substitute") && argc == 2)
		return print_substituted();
	if (!strcmp(verb, "environment") && argc == 2)
		return environment(NULL);
	if (!strcmp(verb, "environment") && argc == 4)
		return environment(&(struct secrets){.words = rest[0], .parts = rest[1]});
	if (!strcmp(verb, "check") && argc == 2)
		return check();
	if (!strcmp(verb, "compressions") && argc == 2) {
		puts(SQUASHFS_COMPRESSIONS);
		return EXIT_SUCCESS;
	}
	fprintf(stderr, "%s is called by bundles, not by people\n", program_invocation_short_name);
	return EXIT_FAILURE;
}
