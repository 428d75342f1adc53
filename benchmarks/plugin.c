/* Time the plugin in a step without a container: load it, and make Slurm's calls.
 *
 * plugin ROUNDS FILE.so: in each round, one new process acts as srun and one as slurmstepd. Each loads the plugin as Slurm does
 * and makes Slurm's calls. Each round prints a line with the nanoseconds of both, first those of srun.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <slurm/spank.h>

static enum spank_context context;
static struct spank_option options[64];
static int registered;

enum spank_context spank_context(void)
{
	return context;
}

spank_err_t spank_option_register(spank_t sp, struct spank_option *option)
{
	(void)sp;
	options[registered++ % 64] = *option; /* Slurm copies the option too */
	return ESPANK_SUCCESS;
}

spank_err_t spank_getenv(spank_t sp, const char *name, char *buffer, int length)
{
	(void)sp, (void)name, (void)buffer, (void)length;
	return ESPANK_ENV_NOEXIST;
}

spank_err_t spank_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)sp, (void)name, (void)value, (void)overwrite;
	return ESPANK_SUCCESS;
}

spank_err_t spank_unsetenv(spank_t sp, const char *name)
{
	(void)sp, (void)name;
	return ESPANK_SUCCESS;
}

/* Answer as slurmstepd does for a job's first step: the plugin reads these items before it ignores a step. */
spank_err_t spank_get_item(spank_t sp, spank_item_t item, ...)
{
	static char path[] = "PATH=/usr/bin", *environment[] = { path, NULL };
	spank_err_t rc = ESPANK_SUCCESS;
	va_list to;

	(void)sp;
	va_start(to, item);
	if (context == S_CTX_REMOTE && item == S_JOB_ENV)
		*va_arg(to, char ***) = environment;
	else if (context == S_CTX_REMOTE && item == S_JOB_STEPID)
		*va_arg(to, uint32_t *) = 0;
	else
		rc = ESPANK_NOT_AVAIL;
	va_end(to);
	return rc;
}

const char *spank_strerror(spank_err_t code)
{
	(void)code;
	return "";
}

void slurm_spank_log(const char *format, ...)
{
	(void)format;
}

void slurm_error(const char *format, ...)
{
	(void)format;
}

void slurm_info(const char *format, ...)
{
	(void)format;
}

static const char *const calls[2][6] = {
	{ "slurm_spank_init", "slurm_spank_init_post_opt", "slurm_spank_local_user_init", "slurm_spank_exit", NULL },
	{ "slurm_spank_init", "slurm_spank_init_post_opt", "slurm_spank_task_post_fork", "slurm_spank_task_init",
	  "slurm_spank_task_exit", "slurm_spank_exit" },
};

/* Load the plugin and make Slurm's calls. Return the nanoseconds, or -1. */
static int64_t once(const char *file, int remote)
{
	struct timespec begin, end;
	void *plugin;

	context = remote ? S_CTX_REMOTE : S_CTX_LOCAL;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	plugin = dlopen(file, RTLD_LAZY | RTLD_LOCAL);
	if (plugin == NULL) {
		fprintf(stderr, "%s\n", dlerror());
		return -1;
	}
	for (int i = 0; i < 6 && calls[remote][i]; i++) {
		int (*call)(spank_t, int, char **) = (int (*)(spank_t, int, char **))dlsym(plugin, calls[remote][i]);
		if (call && call(NULL, 0, NULL) != 0) {
			fprintf(stderr, "%s failed\n", calls[remote][i]);
			return -1;
		}
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	return (end.tv_sec - begin.tv_sec) * INT64_C(1000000000) + end.tv_nsec - begin.tv_nsec;
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 64;
	for (int round = 0; round < 2 * atoi(argv[1]); round++) {
		int status;
		pid_t child = fork();

		if (child == 0) {
			int64_t taken = once(argv[2], round % 2);
			printf("%lld%c", (long long)taken, round % 2 ? '\n' : ' ');
			fflush(stdout);
			_exit(taken < 0);
		}
		if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0)
			return 1;
	}
	return 0;
}
