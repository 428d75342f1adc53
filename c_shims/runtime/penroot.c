/* The plugin runtime/penroot for Slurm 26.11: `srun --runtime=penroot --container=IMAGE`. docs/explanation/runtime-plugin.md
 * describes this first version. The files of the SPANK plugin do the work. They call functions of spank(8), which this file
 * defines: the data come from Slurm's record of the step. */
#define _GNU_SOURCE
#include "config.h"

#include "src/common/env.h"
#include "src/common/job_options.h"
#include "src/interfaces/runtime.h"

#include "plugin.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#define IMAGE "PYXIS_CONTAINER_IMAGE"
#define SAVE "PYXIS_CONTAINER_SAVE"

#pragma GCC visibility push(default)
const char plugin_name[] = "penroot runtime plugin";
const char plugin_type[] = "runtime/penroot";
const uint32_t plugin_version = SLURM_VERSION_NUMBER;
#pragma GCC visibility pop

static struct step step = NO_STEP;

static stepd_step_rec_t *record; /* Slurm's record of the step, and of this task */
static stepd_step_task_info_t *task;
static char *command;            /* as the user wrote it */
static const char *failure;      /* found by root, printed by the tasks */

/* Memory shared by the processes that wait for tasks. */
static struct ends {
	atomic_uint ended;
	atomic_bool finished;
} *ends;

/* The functions of spank(8). The linker binds the files of the SPANK plugin to these functions, not to Slurm's. */

spank_context_t spank_context(void)
{
	return S_CTX_REMOTE;
}

/* Return a copy of the job's environment with the image added. Do not add the image to the environment itself: the SPANK plugin, if
 * Slurm loads it too, would read it there. */
static char **job_environment(void)
{
	static char **variables;

	env_array_free(variables);
	variables = env_array_copy((const char **)record->env);
	(void)env_array_overwrite(&variables, IMAGE, record->container->bundle);
	return variables;
}

#define ITEM(name, type, value) \
	case name: \
		*(type *)to = value; \
		break

spank_err_t spank_get_item(spank_t sp, spank_item_t item, ...)
{
	spank_err_t rc = ESPANK_SUCCESS;
	va_list arguments;

	va_start(arguments, item);
	void *to = va_arg(arguments, void *);
	switch (item) {
		ITEM(S_JOB_UID, uid_t, record->uid);
		ITEM(S_JOB_GID, gid_t, record->gid);
		ITEM(S_JOB_ID, uint32_t, record->step_id.job_id);
		ITEM(S_JOB_STEPID, uint32_t, record->step_id.step_id);
		ITEM(S_JOB_LOCAL_TASK_COUNT, uint32_t, record->node_tasks);
		ITEM(S_JOB_TOTAL_TASK_COUNT, uint32_t, record->ntasks);
		ITEM(S_TASK_ID, int, task->id);
		ITEM(S_TASK_GLOBAL_ID, uint32_t, task->gtid);
		ITEM(S_JOB_ENV, char **, job_environment());
		ITEM(S_SLURM_VERSION_MAJOR, const char *, SLURM_MAJOR);
		ITEM(S_SLURM_VERSION_MINOR, const char *, SLURM_MINOR);
		ITEM(S_SLURM_VERSION_MICRO, const char *, SLURM_MICRO);
	case S_JOB_ARGV:
		*(int *)to = (int)task->argc, *va_arg(arguments, char ***) = task->argv;
		break;
	case S_JOB_SUPPLEMENTARY_GIDS:
		*(gid_t **)to = record->gids, *va_arg(arguments, int *) = record->ngids;
		break;
	default:
		rc = ESPANK_BAD_ARG;
	}
	va_end(arguments);
	return rc;
}

spank_err_t spank_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	if (!overwrite && getenvp(record->env, name))
		return ESPANK_ENV_EXISTS;
	return setenvf(&record->env, name, "%s", value) ? ESPANK_ERROR : ESPANK_SUCCESS;
}

spank_err_t spank_unsetenv(spank_t sp, const char *name)
{
	unsetenvp(record->env, name);
	return ESPANK_SUCCESS;
}

static int is_of_spank_plugin(void *option, void *key)
{
	const char *plugin = strrchr(((struct job_option_info *)option)->option, ':');

	return plugin && strcmp(plugin, ":pyxis") == 0;
}

/* Prepare the step. Returns the error for the tasks, or NULL. */
static const char *prepare(void)
{
	if (getenvp(record->env, IMAGE) || (record->options && list_find_first(record->options, is_of_spank_plugin, NULL)))
		return "--container excludes " IMAGE " and --container-* options: instead of options, set PYXIS_CONTAINER_* variables";
	ends = mmap(NULL, sizeof(*ends), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (ends == MAP_FAILED || make_directories(runtime_path(&step)) < 0)
		return "cannot prepare the container: out of memory, or no runtime_path";
	prepare_step(&step);
	return *step.failure ? step.failure : step.active ? NULL : "cannot prepare the container";
}

/* Wait for the task. The process that waits for the last task of the node saves the container, and fails if the save fails. */
static _Noreturn void await_task(pid_t pid)
{
	int status = 0, failed = 0;

	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	step.killed = was_killed(status);
	if (atomic_fetch_add(&ends->ended, 1) + 1 == record->node_tasks) {
		failed = finish_step(&step) < 0;
		atomic_store(&ends->finished, !failed);
	}
	if (WIFSIGNALED(status))
		end_like(status);
	_exit(WEXITSTATUS(status) ? WEXITSTATUS(status) : failed);
}

/* Slurm's entry points: src/interfaces/runtime.h. */
#pragma GCC visibility push(default)

int runtime_p_init(runtime_context_t context)
{
	set_node(true);
	return SLURM_SUCCESS;
}

int runtime_p_fini(void)
{
	return SLURM_SUCCESS;
}

/* Called in slurmstepd, as root. A failure here would end slurmstepd before srun could get the reason, so the tasks print it. */
int runtime_p_setup(slurmd_conf_t *conf, stepd_step_rec_t *rec, slurm_addr_t *client, slurm_msg_t *message)
{
	record = rec;
	if (rec->container)
		failure = prepare();
	return SLURM_SUCCESS;
}

/* Called in slurmstepd, as root, when all processes of the step, including the helper, are dead: remove what they have left. */
void runtime_p_cleanup(slurmd_conf_t *conf, stepd_step_rec_t *rec)
{
	record = rec;
	step.killed = true;
	if (step.shared && !atomic_load(&ends->finished))
		(void)finish_step(&step);
}

/* Called in a task, as the user. Keep the command as the user wrote it: after this call, Slurm replaces it by a path that it finds
 * on the node. */
void runtime_p_task_init(slurmd_conf_t *conf, stepd_step_rec_t *rec, stepd_step_task_info_t *info)
{
	if (info->argv[0] && info->argv[0][0] != '/')
		command = strdup(info->argv[0]);
}

/* The last call in a task, as the user. ESLURM_NOT_SUPPORTED makes Slurm run the task on the node, so return this only if no
 * container is requested. */
int runtime_p_run(slurmd_conf_t *conf, stepd_step_rec_t *rec, stepd_step_task_info_t *info)
{
	sigset_t all, before;

	if (!rec->container)
		return ESLURM_NOT_SUPPORTED;
	record = rec;
	task = info;
	if (command)
		task->argv[0] = command;
	if (failure)
		_exit(fail(&step, "%s", failure) < 0);
	if (getenvp(rec->env, SAVE)) {
		(void)sigfillset(&all);
		(void)sigprocmask(SIG_SETMASK, &all, &before);
		/* This process stays on the node: a program of the image must not trace it. */
		pid_t pid = prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0 ? -1 : fork();
		if (pid > 0)
			await_task(pid);
		(void)sigprocmask(SIG_SETMASK, &before, NULL);
		if (pid < 0)
			return errno;
	}
	if (init_task(&step) < 0)
		_exit(EXIT_FAILURE);
	if (!step.shared->helper.pid)
		_exit(fail(&step, "there is no container for --container=%s", record->container->bundle) < 0);
	environ = record->env;
	(void)execvp(task->argv[0], task->argv);
	return errno;
}
