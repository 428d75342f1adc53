/* With --container-save, each task is two processes. The outer process waits for the user's program. The last outer process saves
 * the container, and fails if the save fails. This is needed because Slurm ignores the status of a callback after the last task. */
#include "plugin.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>

/* Replace slurmstepd's descriptors by /dev/null: a process at the other end may wait for end of file. The numbers stay in use,
 * because Slurm's log may write to them. */
static void replace_descriptors(struct step *step)
{
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);
	long limit = sysconf(_SC_OPEN_MAX);

	for (int fd = 0; null >= 0 && fd < limit && fd < 4096; fd++) {
		if (fd != STDERR_FILENO && fd != null && fd != step->lock && fd != step->control[0] && fcntl(fd, F_GETFD) >= 0)
			(void)dup3(null, fd, O_CLOEXEC);
	}
}

/* Let the helper save the container. If the helper is gone, finish_step() saves it. */
static int save(struct step *step)
{
	cleanup(request_free) struct request request = { 0 };
	cleanup(answer_free) struct answer answer = { 0 };
	cleanup(helper_free) struct helper process = HELPER_NONE;

	if (begin_step_request(step, &request, "save") < 0 ||
	    helper_connect(&process, step->control[0], &step->shared->helper, FOREVER, false) < 0)
		return 0;
	return exchange(step, &process, &request, &answer) == REFUSED ? -1 : 0;
}

void end_like(int status)
{
	if (WIFSIGNALED(status)) {
		int number = WTERMSIG(status);
		sigset_t only;

		(void)setrlimit(RLIMIT_CORE, &(struct rlimit){ 0 });
		(void)signal(number, SIG_DFL);
		(void)sigemptyset(&only);
		(void)sigaddset(&only, number);
		(void)sigprocmask(SIG_UNBLOCK, &only, NULL);
		(void)raise(number);
	}
	_exit(WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE);
}

/* Wait for the end of a process. Forward signals of Slurm, which knows only this process, but not signals that the whole process
 * group has received. If the sender is in an outer PID namespace, `si_pid` is 0: forward the signal. */
static int await_end(pid_t child)
{
	int status = 0;
	sigset_t all;
	siginfo_t info;

	(void)sigfillset(&all);
	while (waitpid(child, &status, WNOHANG) == 0) {
		int number = sigwaitinfo(&all, &info);
		if (number > 0 && number != SIGCHLD && info.si_code <= 0 && (info.si_pid == 0 || getpgid(info.si_pid) != getpgrp()))
			(void)kill(child, number);
	}
	return status;
}

static _Noreturn void await(struct step *step, pid_t child)
{
	replace_descriptors(step);
	int status = await_end(child);
	bool is_last = atomic_fetch_add(&step->shared->ended, 1) + 1 == step->local_tasks;
	if (is_last && !was_killed(status) && atomic_load(&step->shared->entered) == step->local_tasks && save(step) < 0 &&
	    WIFEXITED(status) && WEXITSTATUS(status) == 0)
		_exit(EXIT_FAILURE);
	end_like(status);
}

/* Continue in a child, which becomes the user's program. */
int continue_in_child(struct step *step)
{
	sigset_t all, before;

	(void)sigfillset(&all);
	if (signal(SIGCHLD, SIG_DFL) == SIG_ERR || sigprocmask(SIG_BLOCK, &all, &before) < 0)
		return fail(step, "cannot block signals: %s", strerror(errno));
	step->outer = getpid();
	pid_t child = fork();
	if (child < 0)
		return fail(step, "cannot fork: %s", strerror(errno));
	if (child > 0)
		await(step, child);
	return sigprocmask(SIG_SETMASK, &before, NULL) < 0 ? fail(step, "cannot restore signals: %s", strerror(errno)) : 0;
}

/* Let the kernel kill this process when its parent ends. Call this after the last change of credentials, because each change undoes
 * it. */
void end_with_parent(struct step *step)
{
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != step->outer) /* the parent has ended before */
		(void)raise(SIGKILL);
}
