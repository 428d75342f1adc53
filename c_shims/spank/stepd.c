/* In slurmstepd, as root: before the first task of a step and after the last one. */
#define _GNU_SOURCE
#include "plugin.h"

#include "cgroup.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <slurm/slurm.h>

/* How long root waits for what the user's processes do, in milliseconds: after a step was killed, less than Slurm's
 * patience; at a normal end without anything to save, before another process does it. */
enum { KILLED_WAIT = 3000, END_WAIT = 10000 };

static struct shared *make_shared(void)
{
	pthread_mutexattr_t attributes;
	struct shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (shared == MAP_FAILED)
		return NULL;
	if ((errno = pthread_mutexattr_init(&attributes)))
		return NULL;
	/* Robust: a task that is killed while it holds the lock does not block the others. */
	if (!(errno = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED)) &&
	    !(errno = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST)))
		errno = pthread_mutex_init(&shared->lock, &attributes);
	(void)pthread_mutexattr_destroy(&attributes);
	return errno ? NULL : shared;
}

static int get_job(spank_t sp)
{
	gid_t *groups = NULL;
	int count = 0;
	spank_err_t rc;

	if ((rc = spank_get_item(sp, S_JOB_UID, &step.job.uid)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_GID, &step.job.gid)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_SUPPLEMENTARY_GIDS, &groups, &count)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_ID, &step.job_id)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_STEPID, &step.step_id)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_LOCAL_TASK_COUNT, &step.local_tasks)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_TOTAL_TASK_COUNT, &step.total_tasks)) != ESPANK_SUCCESS)
		return fail("cannot learn about the job: %s", spank_strerror(rc));
	step.job.groups = calloc((size_t)count + 1, sizeof(gid_t));
	if (!step.job.groups)
		return fail("out of memory");
	for (int i = 0; i < count; i++)
		step.job.groups[i] = groups[i];
	step.job.group_count = count;
	return 0;
}

/* Errors wait for the tasks: one here would make slurmd drain the node, or srun exit with 0. */
int init_step(spank_t sp, int ac, char **av)
{
	const char *directory = runtime_path(ac, av);
	uint32_t step_id = 0;

	if (spank_get_item(sp, S_JOB_STEPID, &step_id) == ESPANK_SUCCESS && step_id == SLURM_BATCH_SCRIPT &&
	    take_forwarded(sp) < 0)
		return -1;
	if (take_variables(sp) < 0)
		return -1;
	step.active = container_asked_for(sp);
	if (!step.active)
		return 0;
	if (get_job(sp) < 0)
		return -1;
	step.shared = make_shared();
	/* Our end lives as long as slurmstepd and its children before exec: by its end the helper sees theirs. */
	if (!step.shared || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, step.control) < 0)
		return fail("cannot prepare the step: %s", strerror(errno));
	if (make_user_directory(directory, &step.job) < 0 &&
	    asprintf(&step.failure, "cannot make the directory %s/%u: %s; it is to be the user's own, in a runtime_path of root's",
		     directory, (unsigned int)step.job.uid, strerror(errno)) < 0)
		return fail("out of memory");
	return 0;
}

/* Let the helper finish. SILENT if it does not: with ESRCH if it was dead before. */
static int finish_by_helper(const struct request *request, int64_t until)
{
	cleanup(answer_free) struct answer answer = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	errno = ESRCH;
	if (!step.shared->helper.pid || coprocess_connect(&process, step.control[0], &step.shared->helper, until, true) < 0)
		return SILENT;
	/* It was the helper that said who it is. What is in the step's cgroups ends with the step. */
	if (!cgroup_holds(step.shared->helper.pid, step.shared->cgroups, step.job.uid)) {
		errno = ESRCH;
		return SILENT;
	}
	int rc = converse(&process, request, &answer);
	int why = errno;
	/* Where slurmstepd still finds a process of the step, it sleeps for a second. */
	process.until = in_milliseconds(rc == SILENT ? 0 : KILLED_WAIT);
	if (coprocess_wait_end(&process) < 0)
		slurm_info("pyxis: %s: the helper process has not ended, and was killed", node);
	errno = why;
	return rc;
}

/* What the end of the step is to be told; `failed`: there is nothing to save. */
static int begin_finish(struct request *request, spank_t sp, int ac, char **av, bool failed)
{
	if (begin_step(request, sp, "finish", ac, av, step.shared->cwd) < 0)
		return -1;
	request_add_number(request, "failed", failed);
	request_add_number(request, "killed", step.killed);
	if (request_finish(request) < 0)
		return fail("cannot write a message: %s", strerror(errno));
	return 0;
}

/* Where the helper does not, another process finishes, in the same cgroups: so it ends when Slurm ends the step. */
static int finish_by_another(spank_t sp, int ac, char **av, bool failed, int64_t until)
{
	cleanup(request_free) struct request request = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	if (engage(&process, "finish", until) < 0)
		return -1;
	if (cgroup_move(process.pid, step.shared->cgroups) < 0 || !step.shared->ready) {
		/* They go with the last process of a step that never began, and Slurm ends what is in them no more. */
		failed = true;
		if (until == FOREVER)
			process.until = in_milliseconds(KILLED_WAIT);
	}
	if (begin_finish(&request, sp, ac, av, failed) < 0)
		return -1;
	return consult(&process, "end of the step", &request);
}

/* The end of the step, in slurmstepd as root: what was started is finished as the user. A save at a normal end lasts as
 * long as it lasts, or until Slurm ends the step; after a kill there is no time for anything. */
int finish(spank_t sp, int ac, char **av)
{
	cleanup(request_free) struct request request = { 0 };

	if (step.finished || !step.shared->started)
		return 0;
	step.finished = true;
	int64_t until = in_milliseconds(step.killed ? KILLED_WAIT : END_WAIT);
	bool failed = atomic_load(&step.shared->entered) < step.local_tasks;
	bool saves = step.shared->saves && !failed && !step.killed;
	if (begin_finish(&request, sp, ac, av, failed) < 0)
		return -1;
	int rc = finish_by_helper(&request, saves ? FOREVER : until);
	if (rc != SILENT)
		return rc;
	if (errno != ESRCH && saves) {
		(void)fail("the container is not saved: what saved it was killed");
		failed = step.killed = true;
		until = in_milliseconds(KILLED_WAIT);
	}
	/* Where there is no time left, the rest is the epilog's. */
	if (step.killed && in_milliseconds(0) >= until)
		return 0;
	return finish_by_another(sp, ac, av, failed, step.killed ? until : FOREVER);
}
