/* What Slurm calls. Nothing is decided here: options are stored and passed on to Python, and a
 * task joins the container that it is told. Without a container option nothing happens at all. */
#include "plugin.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#pragma GCC visibility push(default)
SPANK_PLUGIN(pyxis, 1)
#pragma GCC visibility pop

/* For `pyxis-py check`, which cannot load what needs functions of Slurm's programs. */
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
	coprocess_free(&step->ahead.process);
	if (step->shared)
		(void)munmap(step->shared, sizeof(*step->shared));
	*step = (struct step)NO_STEP;
}

/* Slurm's entry points: spank(8). */

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	struct step *step = called_with(sp, ac, av);
	set_node(spank_context() == S_CTX_REMOTE);
	switch (spank_context()) {
	case S_CTX_SLURMD:
		/* A step makes it too, and says why it cannot. A slurmd that ends takes its node from all jobs. */
		if (make_directories(runtime_path(step)) < 0)
			(void)fail(step, "cannot make the runtime_path %s: %s", runtime_path(step), strerror(errno));
		return 0;
	case S_CTX_LOCAL:
	case S_CTX_ALLOCATOR:
	case S_CTX_REMOTE:
		return register_options(step);
	default:
		return 0;
	}
}

static int submit(struct step *step, const char *context)
{
	bool is_batch = strcmp(context, "sbatch") == 0;

	/* A new job reads its environment file anew, and pins its own images. */
	if (strcmp(context, "srun") != 0) {
		(void)unsetenv(CARRIED);
		if (!step->submission.begun) /* a later component keeps the pins that the first one found */
			(void)unsetenv(PINNED);
	}
	/* The command of salloc has its environment, and each srun in that forwards what it has. */
	if (give_back_variables(step) < 0 || check_sizes(step) < 0 || (is_batch && check_component(step) < 0) ||
	    (strcmp(context, "salloc") != 0 && forward_variables(step, is_batch) < 0))
		return -1;
	step->submission.begun = true;
	return anything_said(step) ? check(step, context) : 0;
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	struct step *step = called_with(sp, ac, av);
	switch (spank_context()) {
	case S_CTX_LOCAL:
		return submit(step, "srun");
	case S_CTX_ALLOCATOR:
		return submit(step, strcmp(program_invocation_short_name, "salloc") == 0 ? "salloc" : "sbatch");
	case S_CTX_REMOTE:
		prepare_step(step);
		return 0;
	default:
		return 0;
	}
}

int slurm_spank_local_user_init(spank_t sp, int ac, char **av)
{
	struct step *step = called_with(sp, ac, av);
	return take_resolved(step);
}

int slurm_spank_task_post_fork(spank_t sp, int ac, char **av)
{
	int task = -1;
	pid_t pid = -1;

	struct step *step = called_with(sp, ac, av);
	if (step->active && get_item(step, S_TASK_ID, &task) == ESPANK_SUCCESS && task == 0 &&
	    get_item(step, S_TASK_PID, &pid) == ESPANK_SUCCESS)
		place_ahead(step, pid);
	return 0;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	struct step *step = called_with(sp, ac, av);
	/* Not `return -1`: where plugstack.conf says "optional", Slurm would then run the task outside of its
	 * container, and where it says "required" add two lines for each task to the one that says why. */
	if ((step->active ? init_task(step) : check_script(step)) < 0)
		_exit(EXIT_FAILURE);
	return 0;
}

int slurm_spank_task_exit(spank_t sp, int ac, char **av)
{
	int status = 0;

	struct step *step = called_with(sp, ac, av);
	/* Where Slurm ends a step, it kills all that is left of it: so the last one tells. */
	if (step->shared && get_item(step, S_TASK_EXIT_STATUS, &status) == ESPANK_SUCCESS)
		step->killed = WIFSIGNALED(status) && (WTERMSIG(status) == SIGKILL || WTERMSIG(status) == SIGTERM);
	/* What is still being set up must be dead first: slurm_spank_exit comes after that. */
	if (!step->shared || ++step->exited < step->local_tasks || !step->shared->ready)
		return 0;
	/* It has said what failed. Slurm would add two lines to that, and change no exit status. */
	(void)finish_step(step);
	return 0;
}

static void clean_up(struct step *step)
{
	if (clean_up_job(step) < 0)
		slurm_info("pyxis: %s: job %u may have left containers behind", node, step->job_id);
}

/* Whether this is the extern step, after which with PrologFlags=RunInJob nothing of ours is called: slurmstepd runs the
 * epilog then, where spank_has_epilog() is false: prep_script_slurmd.c, slurmd_script(). What is done twice elsewhere
 * finds nothing the second time. */
static bool ends_job(struct step *step)
{
	uint32_t id = 0;

	return EXTERN_ENDS_LAST && spank_context() == S_CTX_REMOTE && !step->is_task &&
	       get_item(step, S_JOB_STEPID, &id) == ESPANK_SUCCESS && id == SLURM_EXTERN_CONT;
}

int slurm_spank_exit(spank_t sp, int ac, char **av)
{
	int rc = 0;

	struct step *step = called_with(sp, ac, av);
	/* Only if no container was ready when the last task ended, or a task could not even be launched. */
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
