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
enum { VALUE_LIMIT = 128 * 1024 - 256, VALUES_LIMIT = 256 * 1024 };

struct given_option {
	int option;
	char *value;
};

static struct given_option *options;
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

int register_options(spank_t sp)
{
	for (struct spank_option *o = option_table; o->name; o++) {
		spank_err_t rc = spank_option_register(sp, o);
		if (rc != ESPANK_SUCCESS)
			return fail("cannot register --%s: %s", o->name, spank_strerror(rc));
	}
	return 0;
}

bool container_asked_for(spank_t sp)
{
	char none[1];

	for (size_t i = 0; i < option_count; i++) {
		if (option_selects[options[i].option])
			return true;
	}
	for (int i = 0; i < OPTION_COUNT; i++) {
		if (!option_selects[i] || !option_variables[i])
			continue;
		/* The value is longer than the buffer: it is set. */
		spank_err_t rc = spank_getenv(sp, option_variables[i], none, sizeof(none));
		if (rc == ESPANK_SUCCESS || rc == ESPANK_NOSPACE)
			return true;
	}
	return false;
}

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
static int measure(const char *origin, const char *value, size_t *all)
{
	size_t size = value ? strlen(value) : 0;

	*all += size;
	if (size > VALUE_LIMIT)
		return fail("%s has %zu bytes, and at most %d fit into the environment of a job: give less of it, such as a mount of "
			    "the directory above many", origin, size, VALUE_LIMIT);
	return 0;
}

/* What would run, and then drain its nodes. */
int check_sizes(void)
{
	size_t all = 0;

	for (size_t i = 0; i < option_count; i++) {
		char origin[64];
		(void)snprintf(origin, sizeof(origin), "--%s", option_table[options[i].option].name);
		if (measure(origin, options[i].value, &all) < 0)
			return -1;
	}
	for (int i = 0; i < OPTION_COUNT; i++) {
		if (option_variables[i] && measure(option_variables[i], getenv(option_variables[i]), &all) < 0)
			return -1;
	}
	if (all > VALUES_LIMIT)
		return fail("the container options and PYXIS_CONTAINER_* variables have %zu bytes together, and at most %d fit into "
			    "the environment of a job: give less of them", all, VALUES_LIMIT);
	return 0;
}

/* srun, sbatch: the variables that say which container go along where --export leaves them out, too. */
int forward_variables(void)
{
	for (int i = 0; i < OPTION_COUNT; i++) {
		char name[64];
		const char *variable = option_variables[i];
		if (!variable)
			continue;
		(void)snprintf(name, sizeof(name), KEPT "%s", variable);
		const char *value = getenv(variable);
		/* What is there already is of a job around this one. */
		if (value ? setenv(name, value, 1) < 0 : unsetenv(name) < 0)
			return fail("cannot set %s: %s", name, strerror(errno));
	}
	return 0;
}

/* sbatch: its options go to the batch script as variables that every --export lets through. */
int forward_options(void)
{
	for (size_t i = 0; i < option_count; i++) {
		char name[64];
		(void)snprintf(name, sizeof(name), FORWARDED "%s", option_table[options[i].option].name);
		if (setenv(name, options[i].value, 1) < 0)
			return fail("cannot set %s: %s", name, strerror(errno));
	}
	return 0;
}

/* The variables as they were where srun or sbatch was called; one that --export has set is left as it is. */
int take_variables(spank_t sp)
{
	for (int i = 0; i < OPTION_COUNT; i++) {
		char **variables = NULL;
		char name[64];

		if (!option_variables[i])
			continue;
		if (spank_get_item(sp, S_JOB_ENV, &variables) != ESPANK_SUCCESS)
			return fail("cannot get the environment of the job");
		int length = snprintf(name, sizeof(name), KEPT "%s=", option_variables[i]);
		while (variables && *variables && strncmp(*variables, name, (size_t)length) != 0)
			variables++;
		if (!variables || !*variables)
			continue;
		spank_err_t rc = spank_setenv(sp, option_variables[i], *variables + length, 0);
		if (rc != ESPANK_SUCCESS && rc != ESPANK_ENV_EXISTS)
			return fail("cannot set %s: %s", option_variables[i], spank_strerror(rc));
		name[length - 1] = '\0';
		(void)spank_unsetenv(sp, name);
	}
	return 0;
}

/* What sbatch has forwarded, taken where Slurm has lost the options. Nobody else is to see it: a job that the
 * script submits has options of its own. */
int take_forwarded(spank_t sp)
{
	bool lost = option_count == 0;
	char **variables = NULL;
	char name[64];

	if (spank_get_item(sp, S_JOB_ENV, &variables) != ESPANK_SUCCESS)
		return fail("cannot get the environment of the job");
	for (char **v = variables; lost && v && *v; v++) {
		for (int i = 0; i < OPTION_COUNT; i++) {
			int length = snprintf(name, sizeof(name), FORWARDED "%s=", option_table[i].name);
			if (strncmp(*v, name, (size_t)length) == 0 && option_given(i, *v + length, 1) < 0)
				return -1;
		}
	}
	for (int i = 0; i < OPTION_COUNT; i++) {
		(void)snprintf(name, sizeof(name), FORWARDED "%s", option_table[i].name);
		(void)spank_unsetenv(sp, name);
	}
	return 0;
}

/* The value of `runtime_path=` in plugstack.conf; the last one counts. */
const char *runtime_path(int ac, char **av)
{
	static const char name[] = "runtime_path=";
	const char *path = DEFAULT_RUNTIME_PATH;

	for (int i = 0; i < ac; i++) {
		if (strncmp(av[i], name, sizeof(name) - 1) == 0)
			path = av[i] + sizeof(name) - 1;
	}
	return path;
}

int add_options(struct request *request)
{
	for (size_t i = 0; i < option_count; i++) {
		char *text;
		if (asprintf(&text, "%s=%s", option_table[options[i].option].name, options[i].value) < 0)
			return -1;
		request_add(request, "option", text);
		free(text);
	}
	return 0;
}

void free_options(void)
{
	for (size_t i = 0; i < option_count; i++)
		free(options[i].value);
	free(options);
	options = NULL;
	option_count = 0;
}
