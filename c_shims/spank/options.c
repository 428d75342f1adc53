/* The options, and how they come from srun and sbatch to the nodes. */
#define _GNU_SOURCE
#include "plugin.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int option_given(int val, const char *optarg, int remote);

#include "options.h"

/* An option of sbatch, before its name. Slurm's own variables for it are lost with --export=NONE before 23.11. */
#define FORWARDED "SLURM_PYXIS_OPTION_"

/* The variables of srun and sbatch, before their names: every --export lets SLURM_* through. */
#define KEPT "SLURM_"

/* Slurm makes variables of options for the spank epilog, the script and more, under names of up to 100 bytes. One that
 * is longer than the kernel's MAX_ARG_STRLEN lets none of these be executed (E2BIG), which drains the node; the second
 * limit leaves room for some copies of all of them in the 2 MiB that arguments and environment have: execve(2). */
enum { NAME_LIMIT = 100, VALUE_LIMIT = 128 * 1024 - 256, VALUES_LIMIT = 256 * 1024 };

static struct given_option {
	int option;
	char *value;
} *options;
static size_t option_count;

static int option_given(int val, const char *optarg, int remote)
{
	const char *value = optarg ? optarg : "";

	(void)remote;
	for (size_t i = 0; i < option_count; i++) {
		if (options[i].option == val && strcmp(options[i].value, value) == 0)
			return 0;
	}
	struct given_option *more = realloc(options, (option_count + 1) * sizeof(*more));
	if (!more)
		return fail("out of memory");
	options = more;
	options[option_count] = (struct given_option){ .option = val, .value = strdup(value) };
	if (!options[option_count].value)
		return fail("out of memory");
	option_count++;
	return 0;
}

int register_options(void)
{
	for (struct spank_option *o = option_table; o->name; o++) {
		spank_err_t rc = spank_option_register(step.spank, o);
		if (rc != ESPANK_SUCCESS)
			return fail("cannot register --%s: %s", o->name, spank_strerror(rc));
	}
	return 0;
}

void add_options(struct request *request)
{
	for (size_t i = 0; i < option_count; i++)
		request_add(request, "option", "%s=%s", option_table[options[i].option].name, options[i].value);
}

void free_options(void)
{
	for (size_t i = 0; i < option_count; i++)
		free(options[i].value);
	free(options);
	options = NULL;
	option_count = 0;
}

/* The value of `runtime_path=` in plugstack.conf; the last one counts. */
const char *runtime_path(void)
{
	static const char name[] = "runtime_path=";
	const char *path = DEFAULT_RUNTIME_PATH;

	for (int i = 0; i < step.argument_count; i++) {
		if (strncmp(step.arguments[i], name, sizeof(name) - 1) == 0)
			path = step.arguments[i] + sizeof(name) - 1;
	}
	return path;
}

/* srun, salloc, sbatch */

/* A variable that is none of ours may be a slip in one that is: the check tells. */
bool anything_said(void)
{
	static const char prefix[] = "PYXIS_CONTAINER_";

	for (char **variable = environ; variable && *variable; variable++) {
		if (strncmp(*variable, prefix, sizeof(prefix) - 1) == 0)
			return true;
	}
	return option_count > 0;
}

/* Add the size of a value to that of all. */
static int measure(const char *dashes, const char *name, const char *value, size_t *all)
{
	size_t size = value ? strlen(value) : 0;

	*all += size;
	if (size > VALUE_LIMIT)
		return fail("%s%s has %zu bytes, and at most %d fit into the environment of a job: give less of it, such as a mount of "
			    "the directory above many", dashes, name, size, VALUE_LIMIT);
	return 0;
}

/* What would run, and then drain its nodes. */
int check_sizes(void)
{
	size_t all = 0;

	for (size_t i = 0; i < option_count; i++) {
		if (measure("--", option_table[options[i].option].name, options[i].value, &all) < 0)
			return -1;
	}
	for (int i = 0; i < OPTION_COUNT; i++) {
		const char *variable = option_variables[i];
		if (variable && measure("", variable, getenv(variable), &all) < 0)
			return -1;
	}
	if (all > VALUES_LIMIT)
		return fail("the container options and PYXIS_CONTAINER_* variables have %zu bytes together, and at most %d fit into "
			    "the environment of a job: give less of them", all, VALUES_LIMIT);
	return 0;
}

/* Set PREFIX_NAME for the job, or with no value take away what a job around this one has set. */
static int forward(const char *prefix, const char *name, const char *value)
{
	char variable[NAME_LIMIT];

	(void)snprintf(variable, sizeof(variable), "%s%s", prefix, name);
	if (value ? setenv(variable, value, 1) < 0 : unsetenv(variable) < 0)
		return fail("cannot set %s: %s", variable, strerror(errno));
	return 0;
}

/* srun, sbatch: the variables that say which container go along where --export leaves them out, too. */
int forward_variables(void)
{
	for (int i = 0; i < OPTION_COUNT; i++) {
		const char *variable = option_variables[i];
		if (variable && forward(KEPT, variable, getenv(variable)) < 0)
			return -1;
	}
	return 0;
}

/* sbatch: its options go to the batch script as variables that every --export lets through. */
int forward_options(void)
{
	for (size_t i = 0; i < option_count; i++) {
		if (forward(FORWARDED, option_table[options[i].option].name, options[i].value) < 0)
			return -1;
	}
	return 0;
}

/* slurmstepd */

/* The value of a variable of the job, or NULL; PREFIX_NAME is left in `variable`. */
static const char *job_variable(char variable[NAME_LIMIT], const char *prefix, const char *name)
{
	char **variables = NULL;
	int length = snprintf(variable, NAME_LIMIT, "%s%s", prefix, name);

	for (get_item(S_JOB_ENV, &variables); variables && *variables; variables++) {
		if (strncmp(*variables, variable, (size_t)length) == 0 && (*variables)[length] == '=')
			return *variables + length + 1;
	}
	return NULL;
}

bool container_asked_for(void)
{
	char variable[NAME_LIMIT];

	for (size_t i = 0; i < option_count; i++) {
		if (option_selects[options[i].option])
			return true;
	}
	for (int i = 0; i < OPTION_COUNT; i++) {
		if (option_selects[i] && option_variables[i] && job_variable(variable, "", option_variables[i]))
			return true;
	}
	return false;
}

/* The variables as they were where srun or sbatch was called; one that --export has set is left as it is. */
int take_variables(void)
{
	for (int i = 0; i < OPTION_COUNT; i++) {
		char variable[NAME_LIMIT];
		const char *value = option_variables[i] ? job_variable(variable, KEPT, option_variables[i]) : NULL;
		if (!value)
			continue;
		spank_err_t rc = spank_setenv(step.spank, option_variables[i], value, 0);
		if (rc != ESPANK_SUCCESS && rc != ESPANK_ENV_EXISTS)
			return fail("cannot set %s: %s", option_variables[i], spank_strerror(rc));
		(void)spank_unsetenv(step.spank, variable);
	}
	return 0;
}

/* What sbatch has forwarded, taken where Slurm has lost the options. Nobody else is to see it: a job that the
 * script submits has options of its own. */
int take_forwarded(void)
{
	bool lost = option_count == 0;

	for (int i = 0; i < OPTION_COUNT; i++) {
		char variable[NAME_LIMIT];
		const char *value = job_variable(variable, FORWARDED, option_table[i].name);
		if (lost && value && option_given(i, value, 1) < 0)
			return -1;
		(void)spank_unsetenv(step.spank, variable);
	}
	return 0;
}
