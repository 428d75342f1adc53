/* penroot-follow: if a file of the host changes, show the new file in a running container. Print a line if a FUSE server of the
 * container is killed.
 *
 *   penroot-follow PID [--child] [--server LINE]... [FILE DIGEST]...
 *                         Follow the container of process PID (with --child, of its child) until PID ends. Descriptor 3
 *                         is a pidfd of PID. The next descriptors are pipes, one for each LINE. Each server keeps its pipe open, and
 *                         writes "+" after its start. A "=" in the pipe says that the container shares a server with
 *                         other containers: the descriptor after the pipes is a pidfd of this server. DIGEST is the
 *                         digest of FILE when the container started (digest.h).
 *   penroot-follow 0 [FILE DIGEST]...
 *                         Follow the container whose user and mount namespaces are descriptors 4 and 5, until the pipe
 *                         at descriptor 3 closes.
 *
 * Resolvers rename a new /etc/resolv.conf into place. A bind mount in a container still shows the old file, so this program binds
 * the new file over it, read-only. This program leaves a file of the container alone if its mount is writable, or if its text is
 * not the old text of the host's file.
 *
 * The program checks the files every second. It does not use inotify(7), because a user may have more containers on a node than
 * inotify(7) instances (128).
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
enum { CHECK_INTERVAL_MS = 1000, EXITING = 0x4 }; /* PF_EXITING of proc_pid_stat(5) */
enum { TREE_CLONE = 0x01, FROM_EMPTY_PATH = 0x04, TO_EMPTY_PATH = 0x40 }; /* open_tree(2), move_mount(2) */
enum { ATTRIBUTES = 0x0f }; /* rdonly, nosuid, nodev, noexec of mount_setattr(2) */

static struct {
	const char *path;
	struct stat status;
	struct penroot_digest shown; /* of the text in the container */
	struct penroot_digest now;   /* of the text on the host */
	int tree;
} files[MAX_FILES];
static size_t count;
static const char *lines[MAX_SERVERS];
static size_t servers;
static bool is_parent; /* PID is outside of the container, and waits for a child that is in it */

/* Open a path beneath the directory `root`. No symlink leads out of `root`. */
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
	struct stat ours, other;

	(void)snprintf(path, sizeof(path), "/proc/self/ns/%s", name);
	return stat(path, &ours) < 0 || fstat(namespace, &other) < 0 || (ours.st_dev == other.st_dev && ours.st_ino == other.st_ino);
}

/* Return the child of a process, if the child is in another PID namespace than this program. Otherwise return 0. Children in the
 * same PID namespace are FUSE servers. */
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

/* Clone the mounts of the host's files in a mount namespace that the container's user namespace owns, as open_tree(2) requires.
 * Then enter the container. Returns 0 in the container, 1 if there is no container yet, -1 after an error. */
static int enter(pid_t pid)
{
	int user = USER, mounts = MOUNTS;

	if (pid) {
		pid = is_parent ? child_of(pid) : pid;
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

/* Check whether a file of the container is read-only and has this digest. */
static bool shows(int root, const char *path, const struct penroot_digest *expected)
{
	int fd = open_in(root, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
	struct statvfs mounted;
	struct penroot_digest digest;

	if (fd >= 0 && (fstatvfs(fd, &mounted) < 0 || !(mounted.f_flag & ST_RDONLY)))
		close_fd(&fd);
	return penroot_digest_of(fd, &digest) && is_same(&digest, expected);
}

/* Mount `tree` on a file of the container. Fails with ENOENT if the visible file was deleted on the host: no file can be mounted
 * on a deleted file. */
static int cover(int root, const char *path, int tree)
{
	cleanup(close_fd) int target = open_in(root, path, O_PATH | O_NOFOLLOW);

	return target < 0 ? -1 : linux_move_mount(tree, "", target, "", FROM_EMPTY_PATH | TO_EMPTY_PATH);
}

/* Remove the mount on a file of the container. */
static void uncover(int root, const char *path)
{
	const char *name = strrchr(path, '/');
	char parent[PATH_MAX];

	(void)snprintf(parent, sizeof(parent), "%.*s", (int)(name - path), path);
	cleanup(close_fd) int directory = open_in(root, parent, O_PATH | O_DIRECTORY);

	if (directory >= 0 && fchdir(directory) == 0)
		(void)umount2(name + 1, MNT_DETACH | UMOUNT_NOFOLLOW);
}

/* In a child: bind the new files over the old files of the container. Returns a bit for each file that failed. */
static int show(pid_t pid)
{
	int status = enter(pid), failed = 0;
	cleanup(close_fd) int root = status == 0 ? open("/", O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;

	if (root < 0)
		return status == 1 ? 0 : ALL_FAILED; /* 1: the container will bind the new files when it starts */
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

/* Check whether a path leads to another file than at the last check, or whether the file has been written to. */
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
		if (!is_touched(i)) /* true at the first check */
			continue;
		if (!penroot_digest_at(files[i].path, &files[i].now))
			files[i].now = files[i].shown; /* the file is gone: the container keeps its text */
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
		if (!(failed & 1 << i)) /* after a failure, the next change of the file triggers another try */
			files[i].shown = files[i].now;
	}
}

/* Check whether a process is exiting or gone. The FUSE servers of such a process end because it leaves its mount namespace. Such an
 * end is not reported. */
static bool is_exiting(pid_t pid)
{
	struct process_stat stat;

	return !read_stat(pid, &stat) || stat.flags & EXITING;
}

/* Called when the pipe of a server, or the pidfd of a shared server, is ready. Returns true if the server has started and then
 * ended. */
static bool has_ended(struct pollfd *server, int pipe_, int pidfd)
{
	char started;

	if (server->fd == pidfd)
		return true;
	server->fd = -1;
	if (read(pipe_, &started, 1) != 1)
		return false;
	if (started == '=')
		*server = (struct pollfd){ .fd = pidfd, .events = POLLIN };
	return started != '=';
}

static void follow(pid_t pid)
{
	struct pollfd ready[1 + MAX_SERVERS] = { { .fd = END, .events = POLLIN } };
	const int pidfd = SERVERS + (int)servers;
	int changes;

	for (size_t i = 0; i < servers; i++)
		ready[1 + i].fd = SERVERS + (int)i; /* POLLHUP is reported in any case */
	while ((changes = poll(ready, 1 + servers, count ? CHECK_INTERVAL_MS : -1)) >= 0 || errno == EINTR) {
		if (changes > 0 && ready[0].revents)
			return;
		for (size_t i = 0; changes > 0 && i < servers; i++) {
			if (!ready[1 + i].revents || !has_ended(&ready[1 + i], SERVERS + (int)i, pidfd))
				continue;
			if (is_exiting(is_parent ? child_of(pid) : pid))
				return;
			(void)!write(STDERR_FILENO, lines[i], strlen(lines[i]));
			servers = 0; /* report only one: the same cause may have ended the other servers */
		}
		if (has_changed())
			update(pid);
	}
}

/* Parse the command line. Returns the index of the first file. */
static int parse(int argc, char **argv, pid_t *pid)
{
	int at = 2;

	*pid = argc > 1 ? (pid_t)strtol(argv[1], NULL, 10) : 0;
	for (; at < argc && *argv[at] == '-'; at++) {
		if (strcmp(argv[at], "--child") == 0)
			is_parent = true;
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

	/* Keep no pipe of the caller open: a reader would wait for this process. */
	if (null < 0 || dup2(null, STDOUT_FILENO) < 0 || dup2(null, STDIN_FILENO) < 0 || (!servers && dup2(null, STDERR_FILENO) < 0))
		return EXIT_FAILURE;
	/* Root in the container could trace a process that enters the container: clear the dumpable flag. setns(2) does not set it
	 * again. */
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
