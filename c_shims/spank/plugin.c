/* What Slurm calls. Nothing is decided here: options are stored and passed on to Python, and a
 * task joins the container that it is told. Without a container option nothing happens at all. */
#define _GNU_SOURCE
#include "plugin.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <slurm/slurm.h>
#pragma GCC visibility push(default)
SPANK_PLUGIN(pyxis, 1)
#pragma GCC visibility pop

/* For `pyxis-py check`, which cannot load what needs functions of Slurm's programs. */
#define TEXT_OF(macro) #macro
#define TEXT(macro) TEXT_OF(macro)
static const char built_for[] __attribute__((used)) = "penroot plugin for Slurm " TEXT(SLURM_VERSION_NUMBER);
struct step step = { .control = { -1, -1 } };

static void free_step(void)
{
	free_options();
	free(step.failure);
	free(step.job.groups);
	close_fd(&step.control[0]);
	close_fd(&step.control[1]);
	if (step.shared)
		(void)munmap(step.shared, sizeof(*step.shared));
	step = (struct step){ .control = { -1, -1 } };
}

/* Slurm's entry points: spank(8). */

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	switch (spank_context()) {
	case S_CTX_SLURMD:
		set_node(false);
		if (make_directories(runtime_path(ac, av)) < 0)
			return fail("cannot make the runtime_path: %s", strerror(errno));
		return 0;
	case S_CTX_LOCAL:
	case S_CTX_ALLOCATOR:
		set_node(false);
		return register_options(sp);
	case S_CTX_REMOTE:
		set_node(true);
		return register_options(sp);
	default:
		return 0;
	}
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	switch (spank_context()) {
	case S_CTX_LOCAL:
		if (check_sizes() < 0 || forward_variables() < 0)
			return -1;
		return anything_said() ? check(ac, av, "srun") : 0;
	case S_CTX_ALLOCATOR:
		if (check_sizes() < 0)
			return -1;
		/* The command of salloc has its environment, and each srun in that forwards what it has. */
		if (strcmp(program_invocation_short_name, "salloc") == 0)
			return anything_said() ? check(ac, av, "salloc") : 0;
		if (forward_variables() < 0)
			return -1;
		if (!anything_said())
			return 0;
		return check(ac, av, "sbatch") < 0 ? -1 : forward_options();
	case S_CTX_REMOTE:
		return init_step(sp, ac, av);
	default:
		return 0;
	}
}

int slurm_spank_local_user_init(spank_t sp, int ac, char **av)
{
	(void)sp, (void)ac, (void)av;
	return take_resolved();
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	/* Not `return -1`: where plugstack.conf says "optional", Slurm would then run the task outside of its
	 * container, and where it says "required" add two lines for each task to the one that says why. */
	if (step.active && init_task(sp, ac, av) < 0)
		_exit(EXIT_FAILURE);
	return 0;
}

int slurm_spank_task_exit(spank_t sp, int ac, char **av)
{
	int status = 0;

	/* Where Slurm ends a step, it kills all that is left of it: so the last one tells. */
	if (step.active && spank_get_item(sp, S_TASK_EXIT_STATUS, &status) == ESPANK_SUCCESS)
		step.killed = WIFSIGNALED(status) && (WTERMSIG(status) == SIGKILL || WTERMSIG(status) == SIGTERM);
	/* What is still being set up must be dead first: slurm_spank_exit comes after that. */
	if (!step.active || ++step.exited < step.local_tasks || !step.shared->ready)
		return 0;
	/* It has said what failed. Slurm would add two lines to that, and change no exit status. */
	(void)finish(sp, ac, av);
	return 0;
}

int slurm_spank_exit(spank_t sp, int ac, char **av)
{
	int rc = 0;

	/* Only if no container was ready when the last task ended, or a task could not even be launched. */
	if (step.active && !step.is_task)
		rc = finish(sp, ac, av);
	free_step();
	return rc;
}

int slurm_spank_job_epilog(spank_t sp, int ac, char **av)
{
	set_node(true);
	if (clean_up_job(sp, ac, av) < 0)
		slurm_info("pyxis: %s: job %u may have left containers behind", node, step.job_id);
	free_step();
	return 0;
}
