/* A task, as the user: start or find the helper, and join its container. */
#include "plugin.h"

#include <signal.h>
#include <sys/time.h>

/* replace_launcher() searches only below this number for Slurm's descriptor of slurmstepd. */
enum { LAUNCHER_FD_LIMIT = 256 };
/* After so many polls, report the wait for a stopped task. */
enum { NOTICE_POLLS = 2 };

static int begin_task_request(struct step *step, struct request *request, const char *verb)
{
	int local_id = 0, argc = 0;
	char **argv = NULL;
	uint32_t global_id = 0;
	spank_err_t rc;

	if ((rc = get_item(step, S_TASK_ID, &local_id)) != ESPANK_SUCCESS ||
	    (rc = get_item(step, S_TASK_GLOBAL_ID, &global_id)) != ESPANK_SUCCESS)
		return fail(step, "cannot get the task from Slurm: %s", spank_strerror(rc));
	if (begin_step_request(step, request, verb) < 0)
		return -1;
	request_add(request, "taskid", "%d", local_id);
	request_add(request, "procid", "%u", global_id);
	rc = get_item(step, S_JOB_ARGV, &argc, &argv);
	if (rc == ESPANK_SUCCESS && argc > 0)
		request_add(request, "command", "%s", argv[0]);
	else if (step->step_id == SLURM_BATCH_SCRIPT)
		return fail(step, "cannot get the batch script: %s", spank_strerror(rc));
	return 0;
}

/* In the first task: start the helper, and wait until the container is ready. The helper may have to import the image. */
static int start_container(struct step *step, struct answer *answer)
{
	struct shared *shared = step->shared;
	cleanup(request_free) struct request request = { 0 };
	cleanup(helper_free) struct helper process = HELPER_NONE;

	if (!getcwd(shared->cwd, sizeof(shared->cwd)))
		shared->cwd[0] = '\0';
	if (begin_task_request(step, &request, "step") < 0)
		return -1;
	shared->started = true;
	shared->helper = (struct identity){ 0 };
	int taken = take_ahead(step, &process);
	if (taken == NO_ANSWER) {
		if (cgroup_read(getpid(), shared->cgroups, sizeof(shared->cgroups)) < 0)
			return fail(step, "cannot read /proc/self/cgroup: %s", strerror(errno));
		if (helper_start(&process, "step", step->control[1], NULL, true) < 0)
			return fail(step, "cannot start %s: %s", interpreter(), strerror(errno));
	} else if (taken < 0) {
		return -1;
	}
	if (ask(step, &process, &request, answer) < 0)
		return -1;
	const char *helper = answer_get(answer, "helper");
	if (!helper) /* there is no container to join */
		return 0;
	shared->saves = answer_get(answer, "saves") != NULL;
	if (sscanf(helper, "%d %llu", &shared->helper.pid, &shared->helper.started) != 2 || shared->helper.pid <= 0)
		return fail(step, "the helper sent no valid process id: %s", helper);
	return 0;
}

/* In the other tasks: ask the helper for the container that the first task has started. */
static int find_container(struct step *step, struct answer *answer)
{
	cleanup(request_free) struct request request = { 0 };
	cleanup(helper_free) struct helper process = HELPER_NONE;

	if (!step->shared->helper.pid)
		return 0;
	if (begin_task_request(step, &request, "join") < 0)
		return -1;
	if (helper_connect(&process, step->control[0], &step->shared->helper, FOREVER, false) < 0)
		return fail(step, "the helper process of the container is gone: %s", strerror(errno));
	return ask(step, &process, &request, answer);
}

/* Take or release the lock of the step, fcntl(2). Children of this process do not inherit it. */
static int lock(struct step *step, int command, short type)
{
	struct flock all = { .l_type = type };

	return fcntl(step->lock, command, &all);
}

static pid_t lock_holder(const struct step *step)
{
	struct flock all = { .l_type = F_WRLCK };

	return fcntl(step->lock, F_GETLK, &all) < 0 || all.l_type == F_UNLCK ? 0 : all.l_pid;
}

static volatile sig_atomic_t polls;

static void count_poll(int number)
{
	(void)number;
	polls++;
}

/* Wait for the lock in fcntl(2). SIGALRM interrupts the wait, to check whether the task that holds the lock is stopped. */
static int wait_for_lock(struct step *step)
{
	int seen = polls, stopped = 0;

	while (lock(step, F_SETLKW, F_WRLCK) < 0) {
		if (errno != EINTR)
			return fail(step, "cannot lock the step: %s", strerror(errno));
		if (seen == polls)
			continue;
		seen = polls;
		pid_t holder = lock_holder(step);
		stopped = holder > 0 && is_stopped(holder) ? stopped + 1 : 0;
		if (stopped == MAX_STOPPED_POLLS)
			return fail(step,
				    "process %d, the task that starts the container on this node, is stopped: "
				    "resume it with kill -CONT, or cancel the step",
				    (int)holder);
		if (stopped == NOTICE_POLLS && !atomic_exchange(&step->shared->awaited, true)) {
			char text[128];
			(void)snprintf(text, sizeof(text),
				       "waiting for process %d, the task that starts the container on this node: it is stopped",
				       (int)holder);
			print_log(step, "warn", text);
		}
	}
	return 0;
}

static int take_lock(struct step *step)
{
	const struct timeval interval = { POLL_INTERVAL_MS / 1000, POLL_INTERVAL_MS % 1000 * 1000 };
	const struct itimerval every_interval = { interval, interval }, never = { { 0, 0 }, { 0, 0 } };
	struct sigaction poll = { .sa_handler = count_poll }, before;
	sigset_t alarm_, mask;

	if (lock(step, F_SETLK, F_WRLCK) == 0)
		return 0;
	(void)sigemptyset(&alarm_);
	(void)sigaddset(&alarm_, SIGALRM);
	if (sigaction(SIGALRM, &poll, &before) < 0 || sigprocmask(SIG_UNBLOCK, &alarm_, &mask) < 0 ||
	    setitimer(ITIMER_REAL, &every_interval, NULL) < 0)
		return fail(step, "cannot set a timer: %s", strerror(errno));
	int rc = wait_for_lock(step);
	(void)setitimer(ITIMER_REAL, &never, NULL);
	(void)sigprocmask(SIG_SETMASK, &mask, NULL);
	(void)sigaction(SIGALRM, &before, NULL);
	return rc;
}

static int get_container(struct step *step, struct answer *answer)
{
	struct shared *shared = step->shared;

	if (take_lock(step) < 0)
		return -1;
	/* A task that was killed while it held the lock has set neither flag. Its helper ends too, and this task starts another. */
	step->starts = !shared->ready && !shared->failed;
	if (step->starts) {
		shared->ready = start_container(step, answer) == 0;
		shared->failed = !shared->ready;
	} else if (shared->failed) { /* print the errors that nobody has seen */
		for (char *line, *rest = shared->unseen_errors; is_stderr_seen() && (line = strsep(&rest, "\n")) && *line;)
			print_error(step, line);
	}
	bool joins = !step->starts && shared->ready;
	step->starts = false;
	(void)lock(step, F_SETLK, F_UNLCK);
	return shared->failed ? -1 : joins ? find_container(step, answer) : 0;
}

static int change_environment(struct step *step, const struct answer *answer)
{
	const char *key, *value;

	for (size_t at = 0; answer_next(answer, &at, &key, &value);) {
		spank_err_t rc = ESPANK_SUCCESS;
		if (strcmp(key, "unset") == 0) {
			rc = spank_unsetenv(step->spank, value);
		} else if (strcmp(key, "set") == 0) {
			const char *equals = strchr(value, '=');
			char *name = equals ? strndup(value, (size_t)(equals - value)) : NULL;
			if (!equals)
				return fail(step, "the helper sent a variable without a value: %s", value);
			if (!name)
				return fail(step, "out of memory");
			rc = spank_setenv(step->spank, name, equals + 1, 1);
			free(name);
		}
		if (rc != ESPANK_SUCCESS)
			return fail(step, "cannot %s %s: %s", key, value, spank_strerror(rc));
	}
	return 0;
}

/* Until exec, a task has slurmstepd's handlers for cancel signals. Since Slurm 24.11 the handlers do nothing: an import would
 * continue until Slurm kills the step. */
static void reset_cancel_signals(void)
{
	static const int numbers[] = { SIGTERM, SIGINT };
	struct sigaction now;

	for (size_t i = 0; i < LENGTH(numbers); i++) {
		if (sigaction(numbers[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN)
			(void)signal(numbers[i], SIG_DFL);
	}
}

/* Check whether this Slurm starts a TaskProlog through slurmstepd, whose loader and libraries no image has. Slurm 24.11.0 to
 * 24.11.6, 25.05.0 and 25.05.1 do this: ticket 22853. */
static bool launches_by_stepd(struct step *step)
{
	const char *major, *minor, *micro;

	if (get_item(step, S_SLURM_VERSION_MAJOR, &major) != ESPANK_SUCCESS ||
	    get_item(step, S_SLURM_VERSION_MINOR, &minor) != ESPANK_SUCCESS ||
	    get_item(step, S_SLURM_VERSION_MICRO, &micro) != ESPANK_SUCCESS)
		return false;
	int release = 100 * atoi(major) + atoi(minor);
	return (release == 2411 && atoi(micro) < 7) || (release == 2505 && atoi(micro) < 2);
}

/* Slurm has a descriptor of slurmstepd for the start of a TaskProlog: run_command.c, run_command_init(). In this process only,
 * replace it by a descriptor of penroot-launch, a static program with the same function. */
static void replace_launcher(struct step *step)
{
	struct stat stepd, info;

	if (!launches_by_stepd(step) || stat("/proc/self/exe", &stepd) < 0)
		return;
	char launcher[PATH_MAX];
	(void)snprintf(launcher, sizeof(launcher), "%s/libexec/penroot-launch", library());
	cleanup(close_fd) int replacement = open(launcher, O_PATH | O_CLOEXEC);
	for (int fd = STDERR_FILENO + 1; replacement >= 0 && fd < LAUNCHER_FD_LIMIT; fd++) {
		if (fstat(fd, &info) == 0 && info.st_dev == stepd.st_dev && info.st_ino == stepd.st_ino)
			(void)dup3(replacement, fd, O_CLOEXEC);
	}
}

int init_task(struct step *step)
{
	cleanup(answer_free) struct answer answer = { 0 };

	step->is_task = true;
	reset_cancel_signals();
	if (*step->failure)
		return fail(step, "%s", step->failure);
	if (geteuid() != step->job.uid)
		return fail(step, "this task runs as user %u, not %u", (unsigned int)geteuid(), (unsigned int)step->job.uid);
	if (get_container(step, &answer) < 0 || change_environment(step, &answer) < 0)
		return -1;
	if (step->shared->helper.pid) { /* otherwise the step has no container */
		bool saves = step->shared->saves;
		if (saves && continue_in_child(step) < 0)
			return -1;
		replace_launcher(step);
		if (enter(step, &answer) < 0)
			return -1;
		/* If execve(2) fails, slurmstepd prints the error and the program's path. Print the cause here: the interpreter, link
		 * or mount. */
		if (answer_get(&answer, "broken"))
			(void)fail(step, "%s", answer_get(&answer, "broken"));
		if (saves)
			end_with_parent(step);
	}
	atomic_fetch_add(&step->shared->entered, 1);
	return 0;
}
