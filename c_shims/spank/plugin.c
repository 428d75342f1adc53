/* Slurm's entry points: spank(8). They store the options and pass them to Python, which interprets them. A task joins the container
 * that Python has prepared. In a step without a container, a task only checks the #SBATCH lines of a batch script. */
#include "plugin.h"

#include <sys/mman.h>

#pragma GCC visibility push(default)
SPANK_PLUGIN(pyxis, 1)
#pragma GCC visibility pop

/* `pyxis-py check` finds this text in the plugin's file. Python cannot load the plugin, which needs functions of Slurm's programs. */
#define TEXT_OF(macro) #macro
#define TEXT(macro) TEXT_OF(macro)
static const char built_for[] __attribute__((used)) = "penroot plugin for Slurm " TEXT(SLURM_VERSION_NUMBER);

static struct step *called_with(spank_t sp, int ac, char **av)
{
	static struct step step = NO_STEP;

	step.spank = sp;
	step.argument_count = ac;
	step.arguments = av;
	return &step;
}

static void free_step(struct step *step)
{
	free_options(step);
	free(step->job.groups);
	close_fd(&step->lock);
	close_fd(&step->control[0]);
	close_fd(&step->control[1]);
	helper_free(&step->ahead.process);
	if (step->shared)
		(void)munmap(step->shared, sizeof(*step->shared));
	*step = (struct step)NO_STEP;
}

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	struct step *step = called_with(sp, ac, av);

	set_node(spank_context() == S_CTX_REMOTE);
	spank_context_t context = spank_context();
	/* In slurmd, return 0 in any case: with another value, no job could use the node. A step tries to create the directory too,
	 * and reports errors. */
	if (context == S_CTX_SLURMD && make_directories(runtime_path(step)) < 0)
		(void)fail(step, "cannot make the runtime_path %s: %s", runtime_path(step), strerror(errno));
	return context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR || context == S_CTX_REMOTE ? register_options(step) : 0;
}

static int check_submission(struct step *step, const char *context)
{
	bool is_batch = strcmp(context, "sbatch") == 0;

	/* Remove what an outer job has left: a new job reads its environment file again, and pins its own images. */
	if (strcmp(context, "srun") != 0) {
		(void)unsetenv(CARRIED);
		if (!step->submission.begun) /* later components keep the pins of the first one */
			(void)unsetenv(PINNED);
	}
	/* salloc forwards nothing: its command inherits the environment, and each srun of the command forwards the variables. */
	if (restore_variables(step) < 0 || check_sizes(step) < 0 || (is_batch && check_component(step) < 0) ||
	    (strcmp(context, "salloc") != 0 && forward_variables(step, is_batch) < 0))
		return -1;
	step->submission.begun = true;
	return anything_requested(step) ? check(step, context) : 0;
}

/* Not `return -1`: with "optional" in plugstack.conf Slurm would go on, and with "required" it would print two more lines.
 * Nothing has been queued yet. */
static void submit(struct step *step, const char *context)
{
	if (check_submission(step, context) < 0)
		exit(EXIT_FAILURE);
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	struct step *step = called_with(sp, ac, av);
	if (spank_context() == S_CTX_LOCAL)
		submit(step, "srun");
	if (spank_context() == S_CTX_ALLOCATOR)
		submit(step, strcmp(program_invocation_short_name, "salloc") == 0 ? "salloc" : "sbatch");
	if (spank_context() == S_CTX_REMOTE)
		prepare_step(step);
	return 0;
}

int slurm_spank_local_user_init(spank_t sp, int ac, char **av)
{
	return take_resolved(called_with(sp, ac, av));
}

int slurm_spank_task_post_fork(spank_t sp, int ac, char **av)
{
	struct step *step = called_with(sp, ac, av);
	int task = -1;
	pid_t pid = -1;

	if (step->active && get_item(step, S_TASK_ID, &task) == ESPANK_SUCCESS && task == 0 &&
	    get_item(step, S_TASK_PID, &pid) == ESPANK_SUCCESS)
		place_ahead(step, pid);
	return 0;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	struct step *step = called_with(sp, ac, av);
	/* Not `return -1`: with "optional" in plugstack.conf Slurm would run the task outside of its container, and with
	 * "required" it would print two more lines for each task. */
	if ((step->active ? init_task(step) : check_script(step)) < 0)
		_exit(EXIT_FAILURE);
	return 0;
}

int slurm_spank_task_exit(spank_t sp, int ac, char **av)
{
	struct step *step = called_with(sp, ac, av);
	int status = 0;

	/* If Slurm ends a step, Slurm kills all remaining tasks. So keep the status of the last task. */
	if (step->shared && get_item(step, S_TASK_EXIT_STATUS, &status) == ESPANK_SUCCESS)
		step->killed = was_killed(status);
	/* A container that is not ready is finished by slurm_spank_exit(), when its processes are dead. */
	if (!step->shared || ++step->exited < step->local_tasks || !step->shared->ready)
		return 0;
	/* The error is printed already. If this callback failed, Slurm would print two more lines, and change no exit status. */
	(void)finish_step(step);
	return 0;
}

static void clean_up(struct step *step)
{
	if (clean_up_job(step) < 0)
		slurm_info("pyxis: %s: job %u may have left containers behind", node, step->job_id);
}

/* Check whether this is the extern step. With PrologFlags=RunInJob, slurm_spank_exit() of the extern step is the last call of the
 * plugin: slurmstepd then runs the epilog without the plugin, because spank_has_epilog() is false there (prep_script_slurmd.c,
 * slurmd_script()). Without this flag, slurm_spank_job_epilog() follows, and finds nothing to remove. */
static bool ends_job(struct step *step)
{
	uint32_t id = 0;

	return EXTERN_ENDS_LAST && spank_context() == S_CTX_REMOTE && !step->is_task &&
	       get_item(step, S_JOB_STEPID, &id) == ESPANK_SUCCESS && id == SLURM_EXTERN_CONT;
}

int slurm_spank_exit(spank_t sp, int ac, char **av)
{
	struct step *step = called_with(sp, ac, av);
	int rc = 0;

	/* Finish the step here if no container was ready when the last task ended, or if a task could not be launched. Usually the
	 * step is finished already. */
	if (step->shared && !step->is_task) {
		if (!step->shared->ready)
			(void)end_ahead(step);
		rc = finish_step(step);
		(void)end_ahead(step);
	}
	if (ends_job(step))
		clean_up(step);
	free_step(step);
	return rc;
}

int slurm_spank_job_epilog(spank_t sp, int ac, char **av)
{
	struct step *step = called_with(sp, ac, av);
	set_node(true);
	clean_up(step);
	free_step(step);
	return 0;
}
