/* penroot-guard: wait for a command of penroot exec. After a timeout or the end of the caller, kill the command and all processes
 * that it has started.
 *
 *   penroot-guard PID TIMEOUT   PID is a child of this process. Descriptor 3 is a pipe that closes with the caller.
 *                               TIMEOUT is in milliseconds, 0 for none.
 *
 * Exits with the status of the child, with 128 + N if signal N has ended the child, or with 124 after the timeout. Signals are
 * forwarded to the child. Orphans of the command become children of this process: PR_SET_CHILD_SUBREAPER of prctl(2).
 */
#include "../linux.h"

#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>

enum { CALLER = 3 };
enum { TIMED_OUT = 124, KILLED = 128 + SIGKILL };
enum { GRACE_MS = 5000, PAUSE_MS = 20 };

static pid_t command;
static int status = -1; /* of the command */

static long now_ms(void)
{
	struct timespec time;

	(void)clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

static bool caller_has_ended(void)
{
	struct pollfd caller = { .fd = CALLER, .events = POLLIN };

	return poll(&caller, 1, 0) > 0;
}

/* Reap children. With `stops`, stop this process if the command has stopped: then the caller's waitpid(2) reports the stop. SIGCONT
 * of the caller continues this process. If the caller ends, the kernel sends SIGCONT. With a timeout, `stops` must be false, because
 * this process measures the time. Returns whether the command has ended. */
static bool reap(bool stops)
{
	int change;
	pid_t pid;

	while ((pid = waitpid(-1, &change, WNOHANG | WUNTRACED)) > 0) {
		if (pid != command)
			continue;
		if (WIFSTOPPED(change)) {
			if (stops && !caller_has_ended())
				(void)kill(getpid(), SIGSTOP);
		} else {
			status = WIFSIGNALED(change) ? 128 + WTERMSIG(change) : WEXITSTATUS(change);
		}
	}
	return status >= 0;
}

static bool is_dead(pid_t pid)
{
	char path[64], line[128], state = 'X';
	FILE *file;

	(void)snprintf(path, sizeof(path), "/proc/%d/status", pid);
	file = fopen(path, "re");
	while (file && fgets(line, sizeof(line), file) && sscanf(line, "State: %c", &state) != 1)
		;
	if (file)
		(void)fclose(file);
	return state == 'Z' || state == 'X';
}

/* Send a signal to all descendants of a process. This can miss orphans in the PID namespace of a container: they become children of
 * process 1 of this namespace, which may be no descendant. Returns whether any of the descendants was alive. */
static bool send_below(pid_t parent, int number)
{
	bool alive = false;
	char path[64];
	struct dirent *task;
	DIR *tasks;

	(void)snprintf(path, sizeof(path), "/proc/%d/task", parent);
	tasks = opendir(path);
	while (tasks && (task = readdir(tasks))) {
		FILE *children;
		int pid;

		if (task->d_name[0] == '.')
			continue;
		(void)snprintf(path, sizeof(path), "/proc/%d/task/%.16s/children", parent, task->d_name);
		children = fopen(path, "re");
		while (children && fscanf(children, "%d", &pid) == 1) {
			alive |= send_below(pid, number) | !is_dead(pid);
			(void)kill(pid, number);
		}
		if (children)
			(void)fclose(children);
	}
	if (tasks)
		(void)closedir(tasks);
	return alive;
}

/* Kill all descendants, and the orphans that become children, until none is left: a process that waits for a disk ends late. */
static void kill_all(void)
{
	pid_t pid;

	(void)send_below(getpid(), SIGSTOP); /* stopped processes start no others */
	for (;;) {
		while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
			;
		if (pid < 0 && errno == ECHILD)
			return;
		if (!send_below(getpid(), SIGKILL) && waitpid(-1, NULL, WNOHANG) == 0)
			return; /* a process of the container traces the dead, so only that process can reap them */
		(void)poll(NULL, 0, PAUSE_MS);
	}
}

/* Forward a signal to the command. Do not forward the SIGCHLD of a child. If the command is in the process group of this process,
 * do not forward a signal of the terminal: the command has received it too. */
static void forward(const struct signalfd_siginfo *caught)
{
	int number = (int)caught->ssi_signo;
	bool of_terminal = number == SIGTSTP || number == SIGTTIN || number == SIGTTOU || number == SIGINT || number == SIGQUIT ||
			   number == SIGWINCH;

	if (number == SIGCHLD && caught->ssi_code > 0)
		return;
	if (caught->ssi_code == SI_KERNEL && of_terminal && getpgid(command) == getpgrp())
		return;
	(void)kill(command, number);
}

/* Wait until the command or the caller has ended. When the time is over, terminate the command, and wait GRACE_MS at most. Returns
 * whether the time was over. */
static bool watch(int signals, long timeout_ms)
{
	long deadline = now_ms() + timeout_ms;
	bool timed_out = false;

	while (!reap(!timeout_ms) && !caller_has_ended()) {
		struct pollfd fds[] = { { .fd = signals, .events = POLLIN }, { .fd = CALLER, .events = POLLIN } };
		long left = deadline - now_ms();
		struct signalfd_siginfo caught;
		int ready = timeout_ms && left <= 0 ? 0 : poll(fds, 2, timeout_ms ? (int)(left < 1 << 30 ? left : 1 << 30) : -1);

		if (ready > 0 && fds[0].revents && read(signals, &caught, sizeof(caught)) == sizeof(caught) && !caller_has_ended())
			forward(&caught);
		if (ready != 0 || now_ms() < deadline)
			continue;
		if (timed_out)
			break;
		timed_out = true;
		deadline = now_ms() + GRACE_MS;
		(void)send_below(getpid(), SIGTERM);
		(void)send_below(getpid(), SIGCONT); /* a stopped process handles no signal */
	}
	return timed_out;
}

int main(int argc, char *argv[])
{
	sigset_t all;
	bool timed_out;
	int signals;

	if (argc != 3)
		errx(1, "usage: penroot-guard PID TIMEOUT");
	command = atoi(argv[1]);
	(void)memset(&all, 0xff, sizeof(all)); /* musl's sigfillset(3) leaves out the signals that musl uses */
	(void)sigprocmask(SIG_SETMASK, &all, NULL);
	/* When the caller ends, SIGCONT wakes this process, even if it is stopped. */
	if (linux_prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) < 0 || linux_prctl(PR_SET_PDEATHSIG, SIGCONT, 0, 0, 0) < 0)
		err(1, "prctl");
	signals = signalfd(-1, &all, SFD_CLOEXEC);
	if (signals < 0)
		err(1, "signalfd");
	timed_out = watch(signals, atol(argv[2]));
	if (timed_out || status < 0)
		kill_all();
	return timed_out ? TIMED_OUT : status < 0 ? KILLED : status;
}
