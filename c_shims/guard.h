/* Continue this process as a grandchild of itself. The child between the two executes a program that watches the grandchild.
 *
 * Two calls of fork(2) would copy the memory of a Python process twice, page by page as the processes write to it: 4 ms of CPU
 * time. So vfork(2) makes the child: only the grandchild is a copy of this process.
 */
#ifndef PENROOT_GUARD_H
#define PENROOT_GUARD_H

#include "linux.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

enum { GUARD_FAILED = 125 };

/* Fork the child and the grandchild. The child executes `path` without an environment. Its argv is `name`, the PID of the
 * grandchild and `word`. Its only descriptors are stderr and 3, a copy of `fd`. The child becomes the parent of orphans:
 * PR_SET_CHILD_SUBREAPER. Returns 0 in the grandchild, otherwise the PID of the child, or -1 with errno. The caller must have
 * blocked all signals. */
static inline int penroot_fork_below(const char *path, const char *name, const char *word, int fd)
{
	static char number[16];
	static char *argv[4];
	char *environment[] = { NULL };
	pid_t child, grandchild;

	argv[0] = (char *)name;
	argv[1] = number;
	argv[2] = (char *)word;
	child = vfork();
	if (child != 0)
		return child;
	(void)linux_prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
	/* Do not call fork(3): it would use locks of the C library, in memory that this process still shares with its parent. */
	grandchild = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (grandchild == 0)
		return 0; /* the grandchild may return: it has its own copy of the stack, which the vfork(2) child has not */
	if (grandchild > 0) {
		(void)snprintf(number, sizeof(number), "%d", grandchild);
		(void)close(STDIN_FILENO); /* so that a reader of the caller's stdout waits for the grandchild only */
		(void)close(STDOUT_FILENO);
		if (fd == STDERR_FILENO + 1)
			(void)fcntl(fd, F_SETFD, 0);
		else
			(void)dup3(fd, STDERR_FILENO + 1, 0);
		(void)linux_close_range(STDERR_FILENO + 2, ~0U, 0);
		(void)execve(path, argv, environment);
		(void)kill(grandchild, SIGKILL);
	}
	_exit(GUARD_FAILED);
}

#endif
