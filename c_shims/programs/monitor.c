/* penroot-monitor: wait for the program of a detached container, kill the container's other processes, write the exit status.
 *
 *   penroot-monitor PID NAME   PID is a child of this process. Descriptor 3 is the directory of the container's record (see
 *                              enroot_py/runtime/detached.py). The lock of the record ends with this process. NAME is for ps(1).
 *
 * Orphans become children of this process: PR_SET_CHILD_SUBREAPER of prctl(2). When the program has ended, this process kills the
 * orphans in the program's user namespace. The record's file `userns` contains the inode number of the namespace. FUSE servers
 * are in another user namespace, and may serve other containers. The record's file `status` gets the program's exit status, as a
 * shell reports it.
 */
#include "../linux.h"

#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/nsfs.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { RECORD = 3 };
enum { PAUSE_MS = 20 };

/* Wait until the program has ended, and reap its orphans meanwhile. Returns the status of waitpid(2). */
static int await(pid_t program)
{
	for (;;) {
		int status;
		pid_t pid = waitpid(-1, &status, 0);

		if (pid == program)
			return status;
		if (pid < 0 && errno != EINTR)
			err(1, "the program %d", program);
	}
}

static ino_t read_namespace(void)
{
	char text[32] = "";
	int fd = openat(RECORD, "userns", O_RDONLY | O_NOFOLLOW | O_CLOEXEC);

	if (fd < 0) /* nothing to kill: the program was not executed, or the kernel kills its whole PID namespace */
		return 0;
	if (read(fd, text, sizeof(text) - 1) < 0)
		err(1, "the file userns");
	(void)close(fd);
	return (ino_t)strtoull(text, NULL, 10);
}

/* Return whether a process is in the user namespace `wanted`, or in a descendant of this namespace. */
static bool is_in(pid_t pid, ino_t wanted)
{
	char path[64];
	struct stat state;
	bool is_inside = false;
	int fd;

	(void)snprintf(path, sizeof(path), "/proc/%d/ns/user", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	while (fd >= 0 && !is_inside) {
		int parent = ioctl(fd, NS_GET_PARENT);

		is_inside = fstat(fd, &state) == 0 && state.st_ino == wanted;
		(void)close(fd);
		fd = parent;
	}
	if (fd >= 0)
		(void)close(fd);
	return is_inside;
}

/* Kill the children of this process that are in a user namespace. Returns whether a signal was sent. */
static bool kill_children(ino_t namespace)
{
	FILE *children = fopen("/proc/thread-self/children", "re");
	bool killed = false;
	int pid;

	if (!children)
		err(1, "/proc/thread-self/children");
	while (fscanf(children, "%d", &pid) == 1)
		if (is_in(pid, namespace))
			killed |= kill(pid, SIGKILL) == 0;
	(void)fclose(children);
	return killed;
}

/* Kill all descendants in a user namespace: children, then the orphans that become children. */
static void end_orphans(ino_t namespace)
{
	while (namespace && kill_children(namespace)) {
		(void)poll(NULL, 0, PAUSE_MS); /* a process may wait for a disk before it ends */
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
	}
}

static void write_status(int status)
{
	int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
	int fd = openat(RECORD, ".status", O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);

	if (fd < 0 || dprintf(fd, "%d\n", code) < 0 || close(fd) < 0 || renameat(RECORD, ".status", RECORD, "status") < 0)
		err(1, "the file status");
}

int main(int argc, char *argv[])
{
	sigset_t all;
	int status;

	if (argc != 3)
		errx(1, "usage: penroot-monitor PID NAME");
	(void)memset(&all, 0xff, sizeof(all)); /* musl's sigfillset(3) leaves out the signals that musl uses */
	(void)sigprocmask(SIG_SETMASK, &all, NULL); /* only SIGKILL ends the monitor, and thereby its container */
	if (linux_prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) < 0)
		err(1, "PR_SET_CHILD_SUBREAPER");
	status = await(atoi(argv[1]));
	end_orphans(read_namespace());
	write_status(status);
	return 0;
}
