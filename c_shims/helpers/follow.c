/* penroot-follow: show a running container the files of the host that change, and print a line for the first FUSE server of
 * the container that is killed.
 *
 *   penroot-follow PID [--child] [--server LINE]... [FILE DIGEST]...
 *                         for the container of process PID, or of its child, until PID ends. Descriptor 3 is a pidfd of
 *                         PID. The next ones are pipes, one for each LINE, which each server keeps open; a byte in a
 *                         pipe means that the server has started. DIGEST is the text of FILE when the container
 *                         started: digest.h.
 *   penroot-follow 0 [FILE DIGEST]...
 *                         for the container whose user and mount namespaces are descriptors 4 and 5, until the pipe
 *                         that is descriptor 3 closes
 *
 * Resolvers rename a new /etc/resolv.conf into place. A bind mount in a container still shows the old file, so
 * the new file is bound in its place, read-only. A container keeps a file that it may write to, and one with
 * another text than the host's had.
 *
 * The files are looked at every second: a user may have 128 inotify(7) instances, and many containers on a node.
 */
#include "../digest.h"
#include "../linux.h"
#include "../proc.h"

#include <err.h>
#include <limits.h>
#include <linux/openat2.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>

enum { END = 3, SERVERS = 4, USER = 4, MOUNTS = 5 }; /* descriptors */
enum { MAX_SERVERS = 16, MAX_FILES = 8, ALL_FAILED = (1 << MAX_FILES) - 1 };
enum { LOOK_MS = 1000, EXITING = 0x4 }; /* PF_EXITING of proc_pid_stat(5) */
enum { TREE_CLONE = 0x01, FROM_EMPTY_PATH = 0x04, TO_EMPTY_PATH = 0x40 }; /* open_tree(2), move_mount(2) */
enum { ATTRIBUTES = 0x0f }; /* rdonly, nosuid, nodev, noexec of mount_setattr(2) */

static struct {
	const char *path;
	struct stat status;
	struct penroot_digest shown, now; /* the host's text that the container shows, and the one on the host */
	int tree;
} files[MAX_FILES];
static size_t count;
static const char *lines[MAX_SERVERS];
static size_t servers;
static bool waits; /* the parent is outside of the container, and waits for a child that is in it */

/* Open a path beneath the directory `root`, out of which no symlink leads. */
static int open_in(int root, const char *path, int flags)
{
	path += strspn(path, "/");
	return linux_openat2(root, *path ? path : ".", (uint64_t)(flags | O_CLOEXEC), 0, RESOLVE_IN_ROOT);
}

static bool is_same(const struct penroot_digest *a, const struct penroot_digest *b)
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
	if (read_file(path, children, sizeof(children)) < 0)
		return 0;
	for (char *rest = children; (pid = (pid_t)strtol(rest, &rest, 10)) > 0;) {
		cleanup(close_fd) int processes = open_namespace(pid, "pid");

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
static bool shows(int root, const char *path, const struct penroot_digest *expected)
{
	int fd = open_in(root, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
	struct statvfs mounted;
	struct penroot_digest there;

	if (fd >= 0 && (fstatvfs(fd, &mounted) < 0 || !(mounted.f_flag & ST_RDONLY)))
		close_fd(&fd);
	return penroot_digest_of(fd, &there) && is_same(&there, expected);
}

/* ENOENT if the file that is seen there was deleted on the host: nothing can be mounted on that. */
static int cover(int root, const char *path, int tree)
{
	cleanup(close_fd) int target = open_in(root, path, O_PATH | O_NOFOLLOW);

	return target < 0 ? -1 : linux_move_mount(tree, "", target, "", FROM_EMPTY_PATH | TO_EMPTY_PATH);
}

/* Take away what is bound on a file of the container. */
static void uncover(int root, const char *path)
{
	const char *name = strrchr(path, '/');
	char parent[PATH_MAX];

	(void)snprintf(parent, sizeof(parent), "%.*s", (int)(name - path), path);
	cleanup(close_fd) int directory = open_in(root, parent, O_PATH | O_DIRECTORY);

	if (directory >= 0 && fchdir(directory) == 0)
		(void)umount2(name + 1, MNT_DETACH | UMOUNT_NOFOLLOW);
}

/* In a child: bind the new files where the container shows the old texts. Return a bit for each file that failed. */
static int show(pid_t pid)
{
	int status = enter(pid), failed = 0;
	cleanup(close_fd) int root = status == 0 ? open("/", O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;

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

/* Whether a path leads to another file than at the last look, or the file was written to. */
static bool is_touched(size_t i)
{
	struct stat now = { 0 }, before = files[i].status;

	(void)stat(files[i].path, &now);
	files[i].status = now;
	return now.st_dev != before.st_dev || now.st_ino != before.st_ino || now.st_size != before.st_size ||
	       now.st_ctim.tv_sec != before.st_ctim.tv_sec || now.st_ctim.tv_nsec != before.st_ctim.tv_nsec;
}

static bool has_changed(void)
{
	bool changed = false;

	for (size_t i = 0; i < count; i++) {
		if (!is_touched(i)) /* is_touched() is true at first */
			continue;
		if (!penroot_digest_at(files[i].path, &files[i].now))
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
		if (!(failed & 1 << i)) /* else the next change of the file tries again */
			files[i].shown = files[i].now;
	}
}

/* Whether a process has begun to exit: it then leaves its mount namespace, and the FUSE servers end with that. */
static bool is_exiting(pid_t pid)
{
	struct process_stat stat;

	return !read_stat(pid, &stat) || stat.flags & EXITING;
}

static void follow(pid_t pid)
{
	struct pollfd ready[1 + MAX_SERVERS] = { { .fd = END, .events = POLLIN } };
	char started;
	int changes;

	for (size_t i = 0; i < servers; i++)
		ready[1 + i].fd = SERVERS + (int)i; /* POLLHUP is reported in any case */
	while ((changes = poll(ready, 1 + servers, count ? LOOK_MS : -1)) >= 0 || errno == EINTR) {
		if (changes > 0 && ready[0].revents)
			return;
		for (size_t i = 0; changes > 0 && i < servers; i++) {
			if (!ready[1 + i].revents)
				continue;
			if (is_exiting(pid))
				return;
			ready[1 + i].fd = -1;
			if (read(SERVERS + (int)i, &started, 1) == 1) {
				(void)!write(STDERR_FILENO, lines[i], strlen(lines[i]));
				servers = 0; /* the others may have ended with this one */
			}
		}
		if (has_changed())
			update(pid);
	}
}

/* Read the words of the command line; return how many come before the files. */
static int parse(int argc, char **argv, pid_t *pid)
{
	int at = 2;

	*pid = argc > 1 ? (pid_t)strtol(argv[1], NULL, 10) : 0;
	for (; at < argc && *argv[at] == '-'; at++) {
		if (strcmp(argv[at], "--child") == 0)
			waits = true;
		else if (strcmp(argv[at], "--server") == 0 && at + 1 < argc && servers < MAX_SERVERS)
			lines[servers++] = argv[++at];
		else
			errx(EXIT_FAILURE, "unknown option: %s", argv[at]);
	}
	return at;
}

int main(int argc, char **argv)
{
	pid_t pid;
	int at = parse(argc, argv, &pid);
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	/* Nobody waits for what a container has left behind if this process keeps no pipe of the caller open. */
	if (null < 0 || dup2(null, STDOUT_FILENO) < 0 || dup2(null, STDIN_FILENO) < 0 || (!servers && dup2(null, STDERR_FILENO) < 0))
		return EXIT_FAILURE;
	/* Root in the container could trace the process that enters. setns(2) keeps this flag. */
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
		return EXIT_FAILURE;
	if (pid)
		(void)setpgid(0, 0);
	for (int signal_ = 1; signal_ < NSIG; signal_++)
		if (signal_ != SIGCHLD)
			(void)signal(signal_, SIG_IGN);
	for (; at + 1 < argc && count < MAX_FILES; at += 2) {
		files[count].path = argv[at];
		count += penroot_digest_parse(argv[at + 1], &files[count].shown);
	}
	if ((count || servers) && chdir("/") == 0)
		follow(pid);
	return EXIT_SUCCESS;
}
