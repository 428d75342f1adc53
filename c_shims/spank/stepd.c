/* In slurmstepd, as root: before the first task of a step, and after the last one. */
#include "plugin.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

/* How long root waits for what the user's processes do, in milliseconds: after a step was killed, less than Slurm's
 * patience; at a normal end without anything to save, before another process does it. */
enum { KILLED_WAIT = 3000, END_WAIT = 10000 };

/* Memory for all tasks, and a file whose lock goes with a task that is killed while it has it. */
static int make_shared(struct step *step)
{
	step->lock = make_memory("penroot-step", sizeof(*step->shared));
	if (step->lock < 0)
		return -1;
	void *memory = mmap(NULL, sizeof(*step->shared), PROT_READ | PROT_WRITE, MAP_SHARED, step->lock, 0);
	if (memory == MAP_FAILED)
		return -1;
	step->shared = memory;
	/* Our end lives as long as slurmstepd and its children before exec: by its end the helper sees theirs. */
	return socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, step->control);
}

static int get_job(struct step *step)
{
	gid_t *groups = NULL;
	spank_err_t rc;

	if ((rc = get_item(step, S_JOB_UID, &step->job.uid)) != ESPANK_SUCCESS ||
	    (rc = get_item(step, S_JOB_GID, &step->job.gid)) != ESPANK_SUCCESS ||
	    (rc = get_item(step, S_JOB_SUPPLEMENTARY_GIDS, &groups, &step->job.group_count)) != ESPANK_SUCCESS ||
	    (rc = get_item(step, S_JOB_ID, &step->job_id)) != ESPANK_SUCCESS ||
	    (rc = get_item(step, S_JOB_STEPID, &step->step_id)) != ESPANK_SUCCESS ||
	    (rc = get_item(step, S_JOB_LOCAL_TASK_COUNT, &step->local_tasks)) != ESPANK_SUCCESS ||
	    (rc = get_item(step, S_JOB_TOTAL_TASK_COUNT, &step->total_tasks)) != ESPANK_SUCCESS)
		return postpone(step, "cannot learn about the job: %s", spank_strerror(rc));
	step->job.groups = calloc((size_t)step->job.group_count + 1, sizeof(gid_t));
	if (!step->job.groups)
		return postpone(step, "out of memory");
	for (int i = 0; i < step->job.group_count; i++)
		step->job.groups[i] = groups[i];
	return 0;
}

/* Whether the step asks for a container; -1 where that cannot be known. */
static int read_wishes(struct step *step)
{
	uint32_t step_id = 0;
	char **variables;

	if (get_item(step, S_JOB_ENV, &variables) != ESPANK_SUCCESS || get_item(step, S_JOB_STEPID, &step_id) != ESPANK_SUCCESS)
		return postpone(step, "cannot learn about the step");
	if ((step_id == SLURM_BATCH_SCRIPT && take_options_of_sbatch(step) < 0) || take_variables(step) < 0 || take_swarm(step) < 0 ||
	    step->option_lost)
		return postpone(step, "cannot keep the container options: out of memory?");
	return container_asked_for(step);
}

/* What fails waits for the tasks, each of which ends with it: an error here would make slurmd drain the node, or srun exit
 * with 0, and where plugstack.conf says "optional" the tasks would run outside of their container. */
void prepare_step(struct step *step)
{
	step->active = read_wishes(step) != 0;
	if (!step->active || *step->failure || get_job(step) < 0)
		return;
	if (make_shared(step) < 0)
		(void)postpone(step, "cannot prepare the step: %s", strerror(errno));
	else if (make_user_directory(step) < 0)
		(void)postpone(step, "cannot make the directory %s/%u: %s; it is to be the user's own, in a runtime_path of root's",
			       runtime_path(step), (unsigned int)step->job.uid, strerror(errno));
	else
		start_ahead(step);
}

/* Let the helper finish. SILENT if it does not: with ESRCH if it was dead before. */
static int finish_by_helper(struct step *step, struct request *request, int64_t until)
{
	const struct identity *helper = &step->shared->helper;
	cleanup(answer_free) struct answer answer = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	errno = ESRCH;
	if (!helper->pid || coprocess_connect(&process, step->control[0], helper, until, true) < 0)
		return SILENT;
	/* The helper has named its own process, and may have lied. A process in the step's cgroups ends with the step. */
	if (!cgroup_holds(helper->pid, step->shared->cgroups, step->job.uid)) {
		errno = ESRCH;
		return SILENT;
	}
	int rc = converse(step, &process, request, &answer);
	int why = errno;
	/* Where slurmstepd still finds a process of the step, it sleeps for a second. */
	process.until = in_milliseconds(rc == SILENT ? 0 : KILLED_WAIT);
	if (coprocess_wait(&process) < 0)
		slurm_info("pyxis: %s: the helper process has not ended, and was killed", node);
	if (helper->pid == step->ahead.process.pid) /* our child */
		(void)waitpid(helper->pid, NULL, WNOHANG);
	errno = why;
	return rc;
}

/* What the end of the step is to be told; `failed`: there is nothing to save. */
static int begin_finish(struct step *step, struct request *request, bool failed)
{
	if (begin_step_request(step, request, "finish") < 0)
		return -1;
	request_add(request, "failed", "%d", failed);
	request_add(request, "killed", "%d", step->killed);
	return 0;
}

/* Where the helper does not, another process finishes, in the same cgroups: so it ends when Slurm ends the step. */
static int finish_by_another(struct step *step, bool failed, int64_t until)
{
	cleanup(request_free) struct request request = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	if (start_as_user(step, &process, "finish", until) < 0)
		return -1;
	if (cgroup_move(process.pid, step->shared->cgroups) < 0 || !step->shared->ready) {
		/* They go with the last process of a step that never began, and Slurm ends what is in them no more. */
		failed = true;
		if (until == FOREVER)
			process.until = in_milliseconds(KILLED_WAIT);
	}
	return begin_finish(step, &request, failed) < 0 ? -1 : consult(step, &process, "end of the step", &request);
}

/* The end of the step: what was started is finished as the user. A save at a normal end lasts as long as it lasts, or
 * until Slurm ends the step; after a kill there is no time for anything. */
int finish_step(struct step *step)
{
	cleanup(request_free) struct request request = { 0 };

	if (step->finished || !step->shared->started)
		return 0;
	step->finished = true;
	int64_t until = in_milliseconds(step->killed ? KILLED_WAIT : END_WAIT);
	bool failed = atomic_load(&step->shared->entered) < step->local_tasks;
	bool saves = step->shared->saves && !failed && !step->killed;
	if (begin_finish(step, &request, failed) < 0)
		return -1;
	int rc = finish_by_helper(step, &request, saves ? FOREVER : until);
	if (rc != SILENT)
		return rc;
	if (errno != ESRCH && saves) {
		(void)fail(step, "the container is not saved: what saved it was killed");
		failed = step->killed = true;
		until = in_milliseconds(KILLED_WAIT);
	}
	/* Where there is no time left, the rest is the epilog's. */
	if (step->killed && in_milliseconds(0) >= until)
		return 0;
	return finish_by_another(step, failed, step->killed ? until : FOREVER);
}
