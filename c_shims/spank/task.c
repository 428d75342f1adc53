/* A task, as the user: it starts the helper, or finds it, and joins its container. */
#define _GNU_SOURCE
#include "plugin.h"

#include "cgroup.h"
#include "enter.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include <slurm/slurm.h>

static struct shared *lock(struct shared *shared)
{
	int rc = pthread_mutex_lock(&shared->lock);

	if (rc == EOWNERDEAD) /* the task that started the helper was killed: the helper goes with it, we are next */
		rc = pthread_mutex_consistent(&shared->lock);
	errno = rc;
	return rc ? NULL : shared;
}

static void unlock(struct shared **shared)
{
	if (*shared)
		(void)pthread_mutex_unlock(&(*shared)->lock);
}

static int begin_task(struct request *request, spank_t sp, const char *verb, int ac, char **av, const char *cwd)
{
	int local_id = 0, argc = 0;
	char **argv = NULL;
	uint32_t global_id = 0;
	spank_err_t rc;

	if ((rc = spank_get_item(sp, S_TASK_ID, &local_id)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_TASK_GLOBAL_ID, &global_id)) != ESPANK_SUCCESS)
		return fail("cannot learn about the task: %s", spank_strerror(rc));
	if (begin_step(request, sp, verb, ac, av, cwd) < 0)
		return -1;
	request_add_number(request, "taskid", (unsigned long)local_id);
	request_add_number(request, "procid", global_id);
	rc = spank_get_item(sp, S_JOB_ARGV, &argc, &argv);
	if (rc == ESPANK_SUCCESS && argc > 0)
		request_add(request, "command", argv[0]);
	else if (step.step_id == SLURM_BATCH_SCRIPT)
		return fail("cannot get the batch script: %s", spank_strerror(rc));
	if (request_finish(request) < 0)
		return fail("cannot write a message: %s", strerror(errno));
	return 0;
}

/* The first task: start the helper and wait until the container is ready, which may take an import. */
static int start_container(spank_t sp, int ac, char **av, struct answer *answer)
{
	struct shared *shared = step.shared;
	cleanup(request_free) struct request request = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	if (!getcwd(shared->cwd, sizeof(shared->cwd)))
		shared->cwd[0] = '\0';
	if (begin_task(&request, sp, "step", ac, av, shared->cwd) < 0)
		return -1;
	if (cgroup_read(getpid(), shared->cgroups, sizeof(shared->cgroups)) < 0)
		return fail("cannot read /proc/self/cgroup: %s", strerror(errno));
	shared->started = true;
	shared->helper = (struct identity){ 0 };
	if (coprocess_start(&process, "step", step.control[1], NULL, true) < 0)
		return fail("cannot start " PENROOT_PYTHON ": %s", strerror(errno));
	if (ask(&process, &request, answer) < 0)
		return -1;
	const char *who = answer_get(answer, "helper");
	if (!who) /* nothing to join */
		return 0;
	shared->saves = answer_get(answer, "saves") != NULL;
	if (sscanf(who, "%d %llu", &shared->helper.pid, &shared->helper.started) != 2 || shared->helper.pid <= 0)
		return fail("the helper does not say who it is: %s", who);
	return 0;
}

/* The others: the helper hands them what the first task has got. */
static int find_container(spank_t sp, int ac, char **av, struct answer *answer)
{
	cleanup(request_free) struct request request = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	if (!step.shared->helper.pid)
		return 0;
	if (begin_task(&request, sp, "join", ac, av, step.shared->cwd) < 0)
		return -1;
	if (coprocess_connect(&process, step.control[0], &step.shared->helper, FOREVER, false) < 0)
		return fail("the helper process of the container is gone: %s", strerror(errno));
	return ask(&process, &request, answer);
}

static int get_container(spank_t sp, int ac, char **av, struct answer *answer)
{
	{
		cleanup(unlock) struct shared *shared = lock(step.shared);
		if (!shared)
			return fail("cannot lock the step: %s", strerror(errno));
		if (shared->failed) {
			for (char *line, *rest = shared->why; is_heard() && (line = strsep(&rest, "\n")) && *line;)
				print_error(line);
			return -1; /* else the task that failed has said why */
		}
		if (!shared->ready) {
			step.starts = true;
			shared->ready = start_container(sp, ac, av, answer) == 0;
			step.starts = false;
			shared->failed = !shared->ready;
			return shared->ready ? 0 : -1;
		}
	}
	return find_container(sp, ac, av, answer);
}

static void free_string(char **string)
{
	free(*string);
}

static int change_environment(spank_t sp, const struct answer *answer)
{
	const char *key, *value;

	for (size_t at = 0; answer_next(answer, &at, &key, &value);) {
		spank_err_t rc = ESPANK_SUCCESS;
		if (strcmp(key, "unset") == 0) {
			rc = spank_unsetenv(sp, value);
		} else if (strcmp(key, "set") == 0) {
			cleanup(free_string) char *name = strdup(value);
			if (!name)
				return fail("out of memory");
			char *equals = strchr(name, '=');
			if (!equals)
				return fail("the helper set %s to nothing", value);
			*equals = '\0';
			rc = spank_setenv(sp, name, equals + 1, 1);
		}
		if (rc != ESPANK_SUCCESS)
			return fail("cannot %s %s: %s", key, value, spank_strerror(rc));
	}
	return 0;
}

static int enter_container(const struct answer *answer)
{
	int fds[NAMESPACE_COUNT];
	size_t used = 0;
	const char *key, *value;
	char failed[PATH_MAX + 64];

	for (int i = 0; i < NAMESPACE_COUNT; i++)
		fds[i] = -1;
	for (size_t at = 0; answer_next(answer, &at, &key, &value);) {
		if (strcmp(key, "ns") != 0)
			continue;
		int kind = 0;
		while (kind < NAMESPACE_COUNT && strcmp(namespace_names[kind], value) != 0)
			kind++;
		if (kind == NAMESPACE_COUNT || used == answer->fd_count)
			return fail("the helper named a namespace that it did not send: %s", value);
		fds[kind] = answer->fds[used++];
	}
	if (!step.shared->helper.pid) /* no container for this step */
		return 0;
	if (enter(fds, answer_get(answer, "workdir"), failed, sizeof(failed)) < 0)
		return fail("%s: %s", failed, strerror(errno));
	return 0;
}

/* Until exec resets it a task has slurmstepd's handler for what cancels it, which since Slurm 24.11 does
 * nothing: an import would go on until Slurm kills the step. */
static void heed_cancel(void)
{
	static const int numbers[] = { SIGTERM, SIGINT };
	struct sigaction now;

	for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
		if (sigaction(numbers[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN)
			(void)signal(numbers[i], SIG_DFL);
	}
}

int init_task(spank_t sp, int ac, char **av)
{
	cleanup(answer_free) struct answer answer = { 0 };

	step.is_task = true;
	heed_cancel();
	if (geteuid() != step.job.uid)
		return fail("this task runs as user %u, not %u", (unsigned int)geteuid(), (unsigned int)step.job.uid);
	if (step.failure)
		return fail("%s", step.failure);
	if (get_container(sp, ac, av, &answer) < 0 || change_environment(sp, &answer) < 0 || enter_container(&answer) < 0)
		return -1;
	atomic_fetch_add(&step.shared->entered, 1);
	return 0;
}
