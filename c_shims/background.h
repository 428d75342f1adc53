/* Start a program, now or later, without waiting until execve(2) has read it.
 *
 * posix_spawn(3) would wait for execve(2). fork(2) would copy the page tables of a Python process, which takes a millisecond.
 */
#ifndef PENROOT_BACKGROUND_H
#define PENROOT_BACKGROUND_H

#include "linux.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>

enum { BACKGROUND_STACK_BYTES = 16384 };

/* The arguments and stacks of the new processes. Until execve(2), the processes share memory and errno with their parent, so they
 * only make system calls. */
static struct {
	const char *path;
	char *const *argv;
	const int *fds;
	int count, delay_ms;
	char stacks[2][BACKGROUND_STACK_BYTES] __attribute__((aligned(64)));
} penroot_background;

static int penroot_background_execute(void *unused)
{
	struct pollfd end = { .fd = STDERR_FILENO + 1, .events = POLLIN };
	char *environment[] = { NULL };
	int last = STDERR_FILENO;

	(void)unused;
	for (int i = 0; i < penroot_background.count; i++) {
		int fd = penroot_background.fds[i];

		if (fd == ++last)
			(void)fcntl(fd, F_SETFD, 0);
		else
			(void)dup3(fd, last, 0);
	}
	(void)linux_close_range((unsigned int)last + 1, ~0U, 0); /* keep no lock or pipe of the parent open */
	if (penroot_background.delay_ms && poll(&end, 1, penroot_background.delay_ms) > 0)
		return (int)syscall(SYS_exit, 0);
	(void)execve(penroot_background.path, penroot_background.argv, environment);
	return (int)syscall(SYS_exit, 1);
}

static int penroot_background_fork(void *unused)
{
	(void)clone(penroot_background_execute, penroot_background.stacks[1] + BACKGROUND_STACK_BYTES, CLONE_VM, unused);
	return (int)syscall(SYS_exit, 0);
}

/* Execute `path` without an environment, with stdin, stdout and stderr of this process, and with all signals blocked. `fds`, which
 * must be in ascending order, become the descriptors from 3 on. With `delay_ms`, wait so long first, and do not execute the program
 * if the first of `fds` becomes readable during the wait, or its other end is closed. `path`, `argv` and `fds` must stay in memory.
 * Call this function only once. Returns a child to wait for, or -1 with errno. The child is the program, or, with `orphan`, its
 * former parent, which ends at once. */
static inline int penroot_start_background(const char *path, char *const argv[], const int fds[], int count, int delay_ms, int orphan)
{
	sigset_t all, before;
	int pid;

	penroot_background.path = path;
	penroot_background.argv = argv;
	penroot_background.fds = fds;
	penroot_background.count = count;
	penroot_background.delay_ms = delay_ms;
	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &before);
	pid = clone(orphan ? penroot_background_fork : penroot_background_execute,
		    penroot_background.stacks[0] + BACKGROUND_STACK_BYTES, CLONE_VM | SIGCHLD, NULL);
	(void)pthread_sigmask(SIG_SETMASK, &before, NULL);
	return pid;
}

#endif
