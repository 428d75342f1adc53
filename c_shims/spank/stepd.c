/* Prepare and finish a step, in slurmstepd, as root: before its first task, and after its last task. */
#include "plugin.h"

#include <sys/mman.h>
#include <sys/socket.h>

/* How long root waits for processes of the user. After a kill, root waits KILLED_WAIT_MS, which is less than Slurm waits. At a
 * normal end with nothing to save, root waits END_WAIT_MS for the helper, and then lets another process finish the step. */
enum { KILLED_WAIT_MS = 3000, END_WAIT_MS = 10000 };

/* Create the memory that all tasks share, and the control sockets. The file of the memory is also a lock, which the kernel releases
 * if the task that holds it is killed. */
static int make_shared(struct step *step)
{
	step->lock = make_memory("penroot-step", sizeof(*step->shared));
	if (step->lock < 0)
		return -1;
	void *memory = mmap(NULL, sizeof(*step->shared), PROT_READ | PROT_WRITE, MAP_SHARED, step->lock, 0);
	if (memory == MAP_FAILED)
		return -1;
	step->shared = memory;
	/* Our end is open in slurmstepd, and in its children until they call exec. When no process has our end, the helper sees end of
	 * file. */
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
		return postpone(step, "cannot get the job from Slurm: %s", spank_strerror(rc));
	step->job.groups = calloc((size_t)step->job.group_count + 1, sizeof(gid_t));
	if (!step->job.groups)
		return postpone(step, "out of memory");
	for (int i = 0; i < step->job.group_count; i++)
		step->job.groups[i] = groups[i];
	return 0;
}

/* Check whether the step requests a container. Returns -1 if that is unknown. */
static int read_request(struct step *step)
{
	uint32_t step_id = 0;
	char **variables;

	if (get_item(step, S_JOB_ENV, &variables) != ESPANK_SUCCESS || get_item(step, S_JOB_STEPID, &step_id) != ESPANK_SUCCESS)
		return postpone(step, "cannot get the step from Slurm");
	if ((step_id == SLURM_BATCH_SCRIPT && take_options_of_sbatch(step) < 0) || take_variables(step) < 0 || take_swarm(step) < 0 ||
	    step->option_lost)
		return postpone(step, "cannot store the container options: out of memory?");
	return container_requested(step);
}

/* A failure is postponed: each task fails with it. An error here would make slurmd drain the node, or srun exit with 0. With
 * "optional" in plugstack.conf the tasks would run outside of their container. */
void prepare_step(struct step *step)
{
	step->active = read_request(step) != 0;
	if (!step->active || *step->failure || get_job(step) < 0)
		return;
	if (make_shared(step) < 0)
		(void)postpone(step, "cannot prepare the step: %s", strerror(errno));
	else if (make_user_directory(step) < 0)
		(void)postpone(step,
			       "cannot make the directory %s/%u: %s; it must belong to the user, and runtime_path must belong to root",
			       runtime_path(step), (unsigned int)step->job.uid, strerror(errno));
	else
		start_ahead(step);
}

/* Let the helper finish the step. Returns NO_ANSWER if the helper does not answer; errno is ESRCH if it was already dead. */
static int finish_by_helper(struct step *step, struct request *request, int64_t deadline)
{
	const struct identity *helper = &step->shared->helper;
	cleanup(answer_free) struct answer answer = { 0 };
	cleanup(helper_free) struct helper process = HELPER_NONE;

	errno = ESRCH;
	if (!helper->pid || helper_connect(&process, step->control[0], helper, deadline, true) < 0)
		return NO_ANSWER;
	/* The helper itself has sent this process id, and may have lied. Wait only for a process that ends with the step. */
	if (!cgroup_holds(helper->pid, step->shared->cgroups, step->job.uid)) {
		errno = ESRCH;
		return NO_ANSWER;
	}
	int rc = exchange(step, &process, request, &answer);
	int error = errno;
	/* Wait for the end of the helper: slurmstepd sleeps for a second if it still finds a process of the step. */
	process.deadline = deadline_in_ms(rc == NO_ANSWER ? 0 : KILLED_WAIT_MS);
	if (helper_wait(&process) < 0)
		slurm_info("pyxis: %s: the helper process did not end in time and was killed", node);
	if (helper->pid == step->ahead.process.pid) /* our child */
		(void)waitpid(helper->pid, NULL, WNOHANG);
	errno = error;
	return rc;
}

/* Begin the request for the end of the step. With `failed`, nothing is saved. */
static int begin_finish(struct step *step, struct request *request, bool failed)
{
	if (begin_step_request(step, request, "finish") < 0)
		return -1;
	request_add(request, "failed", "%d", failed);
	request_add(request, "killed", "%d", step->killed);
	return 0;
}

/* Let another process finish the step, in the cgroups of the helper: Slurm ends the processes in them with the step. */
static int finish_by_another(struct step *step, bool failed, int64_t deadline)
{
	cleanup(request_free) struct request request = { 0 };
	cleanup(helper_free) struct helper process = HELPER_NONE;

	if (start_as_user(step, &process, "finish", deadline) < 0)
		return -1;
	if (cgroup_move(process.pid, step->shared->cgroups) < 0 || !step->shared->ready) {
		/* If the container was never ready, the step's cgroups may have vanished with its last process. Then Slurm cannot
		 * end this process, so it needs a deadline. */
		failed = true;
		if (deadline == FOREVER)
			process.deadline = deadline_in_ms(KILLED_WAIT_MS);
	}
	return begin_finish(step, &request, failed) < 0 ? -1 : ask_and_wait(step, &process, "end of the step", &request);
}

/* Finish the step, by a process of the user. A save at a normal end may last until Slurm ends the step. After a kill there is no
 * time to save. */
int finish_step(struct step *step)
{
	cleanup(request_free) struct request request = { 0 };

	if (step->finished || !step->shared->started)
		return 0;
	step->finished = true;
	int64_t deadline = deadline_in_ms(step->killed ? KILLED_WAIT_MS : END_WAIT_MS);
	bool failed = atomic_load(&step->shared->entered) < step->local_tasks;
	bool saves = step->shared->saves && !failed && !step->killed;
	if (begin_finish(step, &request, failed) < 0)
		return -1;
	int rc = finish_by_helper(step, &request, saves ? FOREVER : deadline);
	if (rc != NO_ANSWER)
		return rc;
	if (errno != ESRCH && saves) {
		(void)fail(step, "the container is not saved: the process that saved it was killed");
		failed = step->killed = true;
		deadline = deadline_in_ms(KILLED_WAIT_MS);
	}
	/* If no time is left, the epilog does the rest. */
	if (step->killed && deadline_in_ms(0) >= deadline)
		return 0;
	return finish_by_another(step, failed, step->killed ? deadline : FOREVER);
}
