/* A stand-in for Slurm with one plugin. It has the symbols and the order of calls of spank(8), and no code under test.
 *
 * spank_driver CONTEXT TASKS UID [arg=plugstack argument | env=K=V | batch=SCRIPT | pty= | mute= | option name=value]...
 *
 * CONTEXT: srun, sbatch, stepd, or judge. With judge, the driver prints plain.c's result for an srun with these words.
 * Only root may use stepd. It runs TASKS tasks as UID, each of which prints its environment, namespaces and privileges.
 * pty=: only the stderr of the last task is shown, and the last task starts when the others have ended.
 * unshare=: a task is in another mount namespace than slurmstepd. hold=FILE: no task starts before FILE exists.
 * mute=: the driver withholds the user's groups. TASKS=0, a failed launch: the driver reports 1 task and starts none.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

enum { LIMIT = 64 };

#include "plugin.h"

static struct spank_option table[LIMIT];
static int table_length;
static enum spank_context context;
static char *job_env[LIMIT + 1];
static pid_t task_pid;
static int gate[2];
static uid_t uid;
static gid_t groups[] = { 2001, 44 };
static uint32_t tasks, step_id = 3;
static char *script[2];
static int task_id = -1, exit_status, pty, is_mute, unshares;
static const char *hold = "/";

enum spank_context spank_context(void)
{
	return context;
}

spank_err_t spank_option_register(spank_t sp, struct spank_option *option)
{
	(void)sp;
	table[table_length++] = *option;
	return ESPANK_SUCCESS;
}

const char *spank_strerror(spank_err_t rc)
{
	return rc == ESPANK_SUCCESS ? "Success" : "Error";
}

static char **find(const char *name)
{
	size_t length = strlen(name);
	char **at = job_env;

	while (*at && !(strncmp(*at, name, length) == 0 && (*at)[length] == '='))
		at++;
	return at;
}

spank_err_t spank_getenv(spank_t sp, const char *name, char *buffer, int length)
{
	char **at = find(name);

	(void)sp;
	if (!*at)
		return ESPANK_ENV_NOEXIST;
	return snprintf(buffer, (size_t)length, "%s", *at + strlen(name) + 1) >= length ? ESPANK_NOSPACE : ESPANK_SUCCESS;
}

spank_err_t spank_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	char **at = find(name);

	(void)sp;
	if (*at && !overwrite)
		return ESPANK_ENV_EXISTS;
	if (asprintf(at, "%s=%s", name, value) < 0)
		return ESPANK_ERROR;
	return ESPANK_SUCCESS;
}

/* sbatch passes variables that a plugin sets for the job to the script, under these names. */
spank_err_t spank_job_control_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	char variable[256];

	(void)sp;
	snprintf(variable, sizeof(variable), "SLURM_SPANK_%s", name);
	return setenv(variable, value, overwrite) ? ESPANK_ERROR : ESPANK_SUCCESS;
}

spank_err_t spank_unsetenv(spank_t sp, const char *name)
{
	(void)sp;
	for (char **at = find(name); *at; at++)
		*at = at[1];
	return ESPANK_SUCCESS;
}

#define ITEM(name, type, value) \
	case name: \
		*(type *)to = value; \
		break

spank_err_t spank_get_item(spank_t sp, spank_item_t item, ...)
{
	va_list arguments;
	spank_err_t rc = ESPANK_SUCCESS;

	(void)sp;
	va_start(arguments, item);
	void *to = va_arg(arguments, void *);
	switch (item) {
		ITEM(S_JOB_UID, uid_t, uid);
		ITEM(S_JOB_GID, gid_t, uid);
		ITEM(S_JOB_ID, uint32_t, 7);
		ITEM(S_JOB_STEPID, uint32_t, step_id);
		ITEM(S_JOB_LOCAL_TASK_COUNT, uint32_t, tasks ? tasks : 1);
		ITEM(S_JOB_TOTAL_TASK_COUNT, uint32_t, tasks);
		ITEM(S_TASK_EXIT_STATUS, int, exit_status);
		ITEM(S_TASK_PID, pid_t, task_pid);
		ITEM(S_TASK_ID, int, task_id);
		ITEM(S_TASK_GLOBAL_ID, uint32_t, 100 + (uint32_t)task_id);
		ITEM(S_JOB_ENV, char **, job_env);
	case S_JOB_ARGV:
		*(int *)to = 1, *va_arg(arguments, char ***) = script;
		break;
	case S_JOB_SUPPLEMENTARY_GIDS:
		if (is_mute)
			rc = ESPANK_ERROR;
		else
			*(gid_t **)to = groups, *va_arg(arguments, int *) = sizeof(groups) / sizeof(groups[0]);
		break;
	default:
		rc = ESPANK_BAD_ARG;
	}
	va_end(arguments);
	return task_id < 0 && (item == S_TASK_ID || item == S_TASK_GLOBAL_ID) ? ESPANK_NOT_TASK : rc;
}

#define PRINTER(name, prefix) \
	void name(const char *format, ...) \
	{ \
		va_list arguments; \
		char line[8192]; \
		va_start(arguments, format); \
		vsnprintf(line, sizeof(line), format, arguments); \
		va_end(arguments); \
		dprintf(2, prefix "%s\n", line); \
	}

PRINTER(slurm_error, "error: ")
PRINTER(slurm_info, "info: ")
PRINTER(slurm_debug, "debug: ")
PRINTER(slurm_spank_log, "user: ")

static void show(const char *path)
{
	char line[256];
	FILE *f = fopen(path, "r");

	while (f && fgets(line, sizeof(line), f)) {
		if (strncmp(line, "NoNewPrivs", 10) == 0 || strncmp(line, "Seccomp:", 8) == 0 || strncmp(line, "CapEff", 6) == 0)
			printf("%d %s", task_id, line);
	}
	if (f)
		fclose(f);
}

static int task(int ac, char **av)
{
	char cwd[4096], link[256], go;

	/* In Slurm a task waits until its parent has moved it into its cgroup. */
	if (read(gate[0], &go, 1) != 1)
		return 97;
	if (pty && task_id + 1 < (int)tasks && dup2(open("/dev/null", O_WRONLY), 2) < 0)
		return 98;
	if ((unshares && unshare(CLONE_NEWNS)) || setgroups(2, groups) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid))
		return 99;
	/* Descriptors that another plugin has left open. */
	int directory = open("/", O_RDONLY), file = open("/dev/null", O_RDONLY);
	int rc = slurm_spank_task_init(NULL, ac, av);
	if (rc != 0) {
		/* Slurm's child calls this too. In a task, the plugin's function must not finish the step. */
		slurm_spank_exit(NULL, ac, av);
		return 1;
	}
	for (char **at = job_env; *at; at++)
		printf("%d env %s\n", task_id, *at);
	printf("%d cwd %s\n", task_id, getcwd(cwd, sizeof(cwd)) ? cwd : "?");
	static const char *const kinds[] = { "user", "mnt", "cgroup", "uts" };
	for (size_t i = 0; i < 4; i++) {
		char path[64];
		snprintf(path, sizeof(path), "/proc/self/ns/%s", kinds[i]);
		ssize_t n = readlink(path, link, sizeof(link) - 1);
		printf("%d ns %.*s\n", task_id, n < 0 ? 0 : (int)n, link);
	}
	show("/proc/self/status");
	printf("%d setuid(0) %d\n", task_id, setuid(0));
	printf("%d close-on-exec %d %d\n", task_id, fcntl(directory, F_GETFD), fcntl(file, F_GETFD));
	fflush(stdout);
	if (*find("KILLED"))
		kill(getpid(), SIGKILL);
	return 0;
}

int main(int argc, char **argv)
{
	char *av[LIMIT];
	int ac = 0, status, worst = 0;

	if (argc < 4)
		return 64;
	int is_judge = strcmp(argv[1], "judge") == 0;
	context = is_judge || strcmp(argv[1], "srun") == 0 ? S_CTX_LOCAL :
		  strcmp(argv[1], "stepd") == 0            ? S_CTX_REMOTE :
							     S_CTX_ALLOCATOR;
	tasks = (uint32_t)atoi(argv[2]);
	uid = (uid_t)atoi(argv[3]);
	for (int i = 4; i < argc; i++) {
		if (strncmp(argv[i], "arg=", 4) == 0)
			av[ac++] = argv[i] + 4;
		else if (strncmp(argv[i], "batch=", 6) == 0) {
			step_id = SLURM_BATCH_SCRIPT;
			script[0] = argv[i] + 6;
		} else if (strcmp(argv[i], "mute=") == 0)
			is_mute = 1;
		else if (strcmp(argv[i], "unshare=") == 0)
			unshares = 1;
		else if (strncmp(argv[i], "hold=", 5) == 0)
			hold = argv[i] + 5;
		else if (strcmp(argv[i], "pty=") == 0)
			pty = 1;
		else if (strncmp(argv[i], "env=", 4) == 0)
			*find("") = argv[i] + 4;
	}
	struct step step = NO_STEP;
	if (is_judge ? register_options(&step) : slurm_spank_init(NULL, ac, av))
		return 2;
	for (int i = 4; i < argc; i++) {
		char *value = strchr(argv[i], '=');
		for (int o = 0; value && o < table_length; o++) {
			if (strncmp(argv[i], table[o].name, (size_t)(value - argv[i])) != 0 || table[o].name[value - argv[i]])
				continue;
			/* In some contexts Slurm calls the callback twice. */
			for (int twice = 0; twice < 2; twice++) {
				if (table[o].cb(table[o].val, table[o].has_arg ? value + 1 : NULL, context == S_CTX_REMOTE))
					return 3;
			}
		}
	}
	if (is_judge) {
		optind = argc;
		int rc = printf("%d\n", classify_request(&step, "srun")) < 0;
		free_options(&step);
		return rc;
	}
	if (slurm_spank_init_post_opt(NULL, ac, av)) {
		slurm_spank_exit(NULL, ac, av);
		return 4;
	}
	if (context == S_CTX_LOCAL) {
		if (slurm_spank_local_user_init(NULL, ac, av))
			return 7;
		printf("resolved %s\n", getenv("SLURM_PYXIS_RESOLVED") ? getenv("SLURM_PYXIS_RESOLVED") : "nothing");
		printf("children %s\n", waitpid(-1, &status, WNOHANG) < 0 ? "none" : "left");
	}
	if (context == S_CTX_REMOTE) {
		pid_t pids[LIMIT];
		if (pipe2(gate, O_CLOEXEC))
			return 9;
		while (access(hold, F_OK) < 0)
			usleep(10000);
		for (task_id = 0; task_id < (int)tasks; task_id++) {
			pids[task_id] = fork();
			if (pids[task_id] == 0)
				_exit(task(ac, av));
			task_pid = pids[task_id];
			if (slurm_spank_task_post_fork(NULL, ac, av) || write(gate[1], "", 1) != 1)
				return 8;
			siginfo_t info;
			if (pty)
				(void)waitid(P_PID, (id_t)pids[task_id], &info, WEXITED | WNOWAIT);
		}
		task_id = -1;
		for (uint32_t i = 0; i < tasks; i++) {
			if (waitpid(pids[i], &status, 0) < 0 || status != 0)
				worst = 5;
			exit_status = status;
			if (slurm_spank_task_exit(NULL, ac, av))
				worst = 6;
		}
	}
	slurm_spank_exit(NULL, ac, av);
	return worst;
}
