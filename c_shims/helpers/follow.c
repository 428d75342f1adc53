/* penroot-follow: show a running container the files of the host that change while it runs.
 *
 *   penroot-follow FILE...            for the container of the parent process, until that ends
 *   penroot-follow --child FILE...    for that of the parent's child
 *   penroot-follow --spaces FILE...   for the container whose user and mount namespace are descriptors 3 and 4, until
 *                                     standard input ends
 *
 * Resolvers rename a new /etc/resolv.conf into place. A bind mount in a container still shows the old file, so
 * the new file is bound in its place, read-only. A container keeps a file that it may write to, and one with
 * another text than the host's had.
 */
#include "../linux.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

enum { USER = 3, MOUNTS = 4, MAX_FILES = 8, ALL_FAILED = (1 << MAX_FILES) - 1 };
enum { TREE_CLONE = 0x01, FROM_EMPTY_PATH = 0x04, TO_EMPTY_PATH = 0x40 }; /* open_tree(2), move_mount(2) */
enum { ATTRIBUTES = 0x0f }; /* rdonly, nosuid, nodev, noexec of mount_setattr(2) */

#define CLEANUP(function) __attribute__((cleanup(function)))
#define AUTO_CLOSE CLEANUP(close_fd) int
#define AUTO_FREE CLEANUP(free_text) char *

/* Enough to tell one text of a file from another. */
struct digest {
	uint64_t size, hash;
};

static struct {
	const char *path;
	struct digest shown, now; /* the host's text that the container shows, and the one on the host */
	int tree;
} files[MAX_FILES];
static size_t count;
static bool waits; /* the parent is outside of the container, and waits for a child that is in it */

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void free_text(char **text)
{
	free(*text);
}

/* Open a path beneath the directory `root`, out of which no symlink leads. */
static int open_in(int root, const char *path, int flags)
{
	path += strspn(path, "/");
	return linux_openat2(root, *path ? path : ".", (uint64_t)(flags | O_CLOEXEC), 0, RESOLVE_IN_ROOT);
}

/* FNV-1a of a regular file; false if it cannot be read. Closes the descriptor. */
static bool digest(int fd, struct digest *digest)
{
	AUTO_CLOSE file = fd;
	struct stat info;
	unsigned char block[4096];
	ssize_t length;

	if (file < 0 || fstat(file, &info) < 0 || !S_ISREG(info.st_mode))
		return false;
	*digest = (struct digest){.hash = 14695981039346656037U};
	while ((length = read(file, block, sizeof(block))) > 0) {
		digest->size += (uint64_t)length;
		for (ssize_t i = 0; i < length; i++)
			digest->hash = (digest->hash ^ block[i]) * 1099511628211U;
	}
	return length == 0;
}

static bool is_same(const struct digest *a, const struct digest *b)
{
	return a->size == b->size && a->hash == b->hash;
}

static int open_namespace(pid_t pid, const char *name)
{
	char path[64];

	(void)snprintf(path, sizeof(path), "/proc/%d/ns/%s", pid, name);
	return open(path, O_RDONLY | O_CLOEXEC);
}

static bool is_ours(int namespace, const char *name)
{
	char path[64];
	struct stat here, there;

	(void)snprintf(path, sizeof(path), "/proc/self/ns/%s", name);
	return stat(path, &here) < 0 || fstat(namespace, &there) < 0 || (here.st_dev == there.st_dev && here.st_ino == there.st_ino);
}

/* The child of a process that is in a PID namespace of its own; 0 while there is none. Other children are FUSE servers. */
static pid_t child_of(pid_t pid)
{
	char path[64], children[4096];

	(void)snprintf(path, sizeof(path), "/proc/%d/task/%d/children", pid, pid);
	AUTO_CLOSE fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t length = fd < 0 ? 0 : read(fd, children, sizeof(children) - 1);

	children[length > 0 ? length : 0] = '\0';
	for (char *rest = children; (pid = (pid_t)strtol(rest, &rest, 10)) > 0;) {
		AUTO_CLOSE processes = open_namespace(pid, "pid");

		if (processes >= 0 && !is_ours(processes, "pid"))
			return pid;
	}
	return 0;
}

/* Enter the container; return 0, or 1 if there is none to enter yet, -1 on failure. The host's files are opened on the way, in a mount namespace
 * that the container's user namespace owns: open_tree(2) wants that. */
static int enter(pid_t pid)
{
	int user = USER, mounts = MOUNTS;

	if (pid) {
		pid = waits ? child_of(pid) : pid;
		mounts = open_namespace(pid, "mnt");
		user = open_namespace(pid, "user");
	}
	if (user < 0 || mounts < 0 || is_ours(mounts, "mnt"))
		return 1;
	if ((!is_ours(user, "user") && setns(user, CLONE_NEWUSER) < 0) || unshare(CLONE_NEWNS) < 0)
		return -1;
	for (size_t i = 0; i < count; i++) {
		files[i].tree = linux_open_tree(AT_FDCWD, files[i].path, TREE_CLONE | O_CLOEXEC);
		if (files[i].tree >= 0 && linux_mount_setattr(files[i].tree, "", AT_EMPTY_PATH, ATTRIBUTES, 0, MS_PRIVATE) < 0)
			close_fd(&files[i].tree);
	}
	return setns(mounts, CLONE_NEWNS);
}

/* Whether a container that may not write to a file sees this text in it. */
static bool shows(int root, const char *path, const struct digest *expected)
{
	int fd = open_in(root, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
	struct statvfs mounted;
	struct digest there;

	if (fd >= 0 && (fstatvfs(fd, &mounted) < 0 || !(mounted.f_flag & ST_RDONLY)))
		close_fd(&fd);
	return digest(fd, &there) && is_same(&there, expected);
}

/* ENOENT if the file that is seen there was deleted on the host: nothing can be mounted on that. */
static int cover(int root, const char *path, int tree)
{
	AUTO_CLOSE target = open_in(root, path, O_PATH | O_NOFOLLOW);

	return target < 0 ? -1 : linux_move_mount(tree, "", target, "", FROM_EMPTY_PATH | TO_EMPTY_PATH);
}

/* Take away what is bound on a file of the container. */
static void uncover(int root, const char *path)
{
	const char *name = strrchr(path, '/');
	AUTO_FREE parent = strndup(path, (size_t)(name - path));
	AUTO_CLOSE directory = parent ? open_in(root, parent, O_PATH | O_DIRECTORY) : -1;

	if (directory >= 0 && fchdir(directory) == 0)
		(void)umount2(name + 1, MNT_DETACH | UMOUNT_NOFOLLOW);
}

/* In a child: bind the new files where the container shows the old texts. Return a bit for each file that failed. */
static int show(pid_t pid)
{
	int status = enter(pid), failed = 0;
	AUTO_CLOSE root = status == 0 ? open("/", O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;

	if (root < 0)
		return status == 1 ? 0 : ALL_FAILED; /* a container that begins later binds the new files itself */
	for (size_t i = 0; i < count; i++) {
		if (is_same(&files[i].shown, &files[i].now) || !shows(root, files[i].path, &files[i].shown))
			continue;
		int covered = cover(root, files[i].path, files[i].tree);

		if (covered < 0 && errno == ENOENT && files[i].tree >= 0) {
			uncover(root, files[i].path);
			covered = cover(root, files[i].path, files[i].tree);
		}
		failed |= (covered < 0) << i;
	}
	return failed;
}

/* Watch the directories in which the files and the files that they link to may be replaced. */
static void watch(int inotify)
{
	for (size_t i = 0; i < count; i++) {
		AUTO_FREE real = realpath(files[i].path, NULL);
		AUTO_FREE near = strdup(files[i].path);

		for (size_t j = 0; j < 2; j++) {
			char *directory = j ? real : near, *slash = directory ? strrchr(directory, '/') : NULL;

			if (slash && slash > directory) {
				*slash = '\0';
				(void)inotify_add_watch(inotify, directory, IN_MOVED_TO | IN_CREATE | IN_CLOSE_WRITE | IN_ONLYDIR);
			}
		}
	}
}

static bool has_changed(void)
{
	bool changed = false;

	for (size_t i = 0; i < count; i++) {
		if (!digest(open(files[i].path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), &files[i].now))
			files[i].now = files[i].shown; /* it is gone: the container keeps what it has */
		changed |= !is_same(&files[i].now, &files[i].shown);
	}
	return changed;
}

static void update(pid_t pid)
{
	pid_t child = fork();
	int status = -1;

	if (child == 0)
		_exit(show(pid));
	while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	int failed = WIFEXITED(status) ? WEXITSTATUS(status) : ALL_FAILED;

	for (size_t i = 0; i < count; i++) {
		if (!(failed & 1 << i)) /* else the next change in the directory tries again */
			files[i].shown = files[i].now;
	}
}

static void follow(pid_t pid, int end)
{
	AUTO_CLOSE inotify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	struct pollfd ready[] = {{.fd = end, .events = POLLIN}, {.fd = inotify, .events = POLLIN}};
	char events[4096] __attribute__((aligned(8)));

	if (inotify < 0) /* the user has as many as may be: the container keeps the old files */
		return;
	watch(inotify);
	while (poll(ready, 2, -1) > 0 || errno == EINTR) {
		if (ready[0].revents)
			return;
		while (read(inotify, events, sizeof(events)) > 0)
			;
		if (has_changed())
			update(pid);
		watch(inotify);
	}
}

int main(int argc, char **argv)
{
	bool spaces = argc > 1 && strcmp(argv[1], "--spaces") == 0;

	waits = argc > 1 && strcmp(argv[1], "--child") == 0;
	pid_t pid = spaces ? 0 : getppid();
	int end = STDIN_FILENO;

	for (int i = 1 + (spaces || waits); i < argc && count < MAX_FILES; i++) {
		if (digest(open(argv[i], O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), &files[count].shown))
			files[count++].path = argv[i];
	}
	/* Root in the container could trace the process that enters. setns(2) keeps this flag. */
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
		return EXIT_FAILURE;
	(void)linux_close_range(spaces ? MOUNTS + 1 : STDERR_FILENO + 1, ~0U, 0);
	if (!spaces) {
		end = linux_pidfd_open(pid);
		if (end < 0 || getppid() != pid || fork() != 0) /* no child of the program that the parent becomes */
			return EXIT_SUCCESS;
		(void)setpgid(0, 0);
	}
	for (int signal_ = 1; signal_ < NSIG; signal_++)
		if (signal_ != SIGCHLD)
			(void)signal(signal_, SIG_IGN);
	if (count && chdir("/") == 0)
		follow(pid, end);
	return EXIT_SUCCESS;
}
