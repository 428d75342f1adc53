/* Store the options of a step, and carry them from srun and sbatch to the nodes. */
#define OPTION_TABLES
#include "plugin.h"

/* Slurm's prefix of the variable that holds an option of sbatch. If the option is a flag, ignore the variable's value. sbatch sets
 * the variable after --export-file has emptied the environment, and every --export lets it through (_set_spank_env of sbatch.c). So
 * the variable reaches the script even if Slurm loses the option on the way to the plugin. */
#define SBATCH_OPTION "SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_"

/* Prefixes of our variables. Every --export of srun lets SLURM_* into a step. sbatch gives the second prefix to the
 * variables of a job, also after --export-file. */
#define STEP_PREFIX "SLURM_"
#define JOB_PREFIX "SLURM_SPANK_"

/* Slurm turns options into variables for the spank epilog, the script and other programs. The names have up to 100 bytes. If a
 * variable is longer than the kernel's MAX_ARG_STRLEN, none of these programs can be executed (E2BIG), which drains the node. The
 * limit of all values leaves room for some copies of the values in the 2 MiB of arguments and environment: execve(2). */
enum { MAX_NAME_BYTES = 100, MAX_VALUE_BYTES = 128 * 1024 - 256, MAX_VALUES_BYTES = 256 * 1024 };

/* The step for option_given(): Slurm calls this function without it. */
static struct step *registered;

/* scrontab accepts the options of plugins, and drops them: _entry_to_job of its scrontab.c. */
static int refuse_scrontab(struct step *step, int option)
{
	const char *name = option_table[option].name;

	return fail(step,
		    "--%s: scrontab drops the options of plugins, and the job would run outside of a container: give the option to "
		    "srun or sbatch in the command of the line, as in: @hourly srun --%s...",
		    name, name);
}

/* Write the name of Slurm's variable for an option of sbatch. */
static void name_of_sbatch(char variable[MAX_NAME_BYTES], int option)
{
	(void)snprintf(variable, MAX_NAME_BYTES, SBATCH_OPTION "%s", option_table[option].name);
	for (char *at = variable; (at = strchr(at, '-'));)
		*at = '_';
}

/* Check whether an option comes from a variable of the outer sbatch. Slurm reports such an option before the options of the command
 * line: _opt_env() of opt.c. */
static bool is_inherited(int option, const char *value)
{
	char variable[MAX_NAME_BYTES];

	name_of_sbatch(variable, option);
	const char *from_job = spank_context() == S_CTX_REMOTE ? NULL : getenv(variable);
	return from_job && strcmp(from_job, value) == 0;
}

/* Store an option. It replaces an inherited value of the same option. */
static int store(struct step *step, int option, const char *value)
{
	size_t at = 0;

	for (; at < step->option_count; at++) {
		if (step->options[at].option == option && strcmp(step->options[at].value, value) == 0)
			return 0;
		if (step->options[at].option == option && step->options[at].inherited)
			break;
	}
	bool is_new = at == step->option_count;
	struct stored_option *options = is_new ? realloc(step->options, (at + 1) * sizeof(*options)) : step->options;
	if (options)
		step->options = options;
	char *copy = options ? strdup(value) : NULL;
	if (!copy)
		return fail(step, "out of memory");
	if (!is_new)
		free(options[at].value);
	options[at] = (struct stored_option){ option, copy, is_new && is_inherited(option, value) };
	step->option_count += is_new;
	return 0;
}

static int option_given(int val, const char *optarg, int remote)
{
	struct step *step = registered;

	(void)remote;
	if (spank_context() == S_CTX_ALLOCATOR && strcmp(program_invocation_short_name, "scrontab") == 0)
		return refuse_scrontab(step, val);
	if (store(step, val, optarg ? optarg : "") == 0)
		return 0;
	/* On a node Slurm logs the failure, and continues. */
	step->option_lost = true;
	return -1;
}

int register_options(struct step *step)
{
	registered = step;
	for (struct spank_option *o = option_table; o->name; o++) {
		spank_err_t rc = spank_option_register(step->spank, o);
		if (rc != ESPANK_SUCCESS)
			return fail(step, "cannot register --%s: %s", o->name, spank_strerror(rc));
	}
	return 0;
}

void add_options(struct step *step, struct request *request)
{
	request_add(request, "protocol", "%d", PROTOCOL);
	for (size_t i = 0; i < step->option_count; i++)
		request_add(request, "option", "%s=%s", option_table[step->options[i].option].name, step->options[i].value);
}

void free_options(struct step *step)
{
	for (size_t i = 0; i < step->option_count; i++)
		free(step->options[i].value);
	free(step->options);
	step->options = NULL;
	step->option_count = 0;
}

/* Return the last `runtime_path=` in plugstack.conf, or the default. */
const char *runtime_path(struct step *step)
{
	static const char name[] = "runtime_path=";
	const char *path = DEFAULT_RUNTIME_PATH;

	for (int i = 0; i < step->argument_count; i++) {
		if (has_prefix(step->arguments[i], name))
			path = step->arguments[i] + sizeof(name) - 1;
	}
	return path;
}

/* srun, salloc, sbatch */

/* Any PYXIS_CONTAINER_* variable counts, so that the check reports a misspelled variable. */
bool anything_requested(struct step *step)
{
	for (char **variable = environ; variable && *variable; variable++) {
		if (has_prefix(*variable, "PYXIS_CONTAINER_"))
			return true;
	}
	return step->option_count > 0 || getenv(ENVIRONMENT_VARIABLE);
}

/* Get the container's name and image. Returns false if there are no options, other options, or two names or images. */
bool get_name_and_image(struct step *step, const char **name, const char **image)
{
	for (size_t i = 0; i < step->option_count; i++) {
		const char **value = step->options[i].option == NAME_OPTION  ? name :
				     step->options[i].option == IMAGE_OPTION ? image :
									       NULL;
		if (!value || *value)
			return false;
		*value = step->options[i].value;
	}
	return step->option_count > 0;
}

/* Check the size of a value, and add it to the size of all values. */
static int measure(struct step *step, const char *dashes, const char *name, const char *value, size_t *all)
{
	size_t size = value ? strlen(value) : 0;

	*all += size;
	if (size > MAX_VALUE_BYTES)
		return fail(step,
			    "%s%s has %zu bytes, and at most %d fit into the environment of a job: shorten it, for example by mounting "
			    "one parent directory instead of many directories",
			    dashes, name, size, MAX_VALUE_BYTES);
	return 0;
}

/* Check whether the command must read an environment file, which can use all variables of the submitter. */
bool environment_file_requested(struct step *step)
{
	for (size_t i = 0; i < step->option_count; i++) {
		if (option_describes[step->options[i].option])
			return true;
	}
	return getenv(ENVIRONMENT_VARIABLE);
}

/* Refuse options and variables that are so long that the job would drain its nodes. */
int check_sizes(struct step *step)
{
	size_t all = 0;

	for (size_t i = 0; i < step->option_count; i++) {
		if (measure(step, "--", option_table[step->options[i].option].name, step->options[i].value, &all) < 0)
			return -1;
	}
	for (int i = 0; i < OPTION_COUNT; i++) {
		const char *variable = option_variables[i];
		if (variable && measure(step, "", variable, getenv(variable), &all) < 0)
			return -1;
	}
	if (all > MAX_VALUES_BYTES)
		return fail(step,
			    "the container options and PYXIS_CONTAINER_* variables have %zu bytes together, and at most %d fit into "
			    "the environment of a job: shorten them",
			    all, MAX_VALUES_BYTES);
	return 0;
}

/* sbatch calls this for each component of a heterogeneous job. The script runs in the first component, with its options. */
int check_component(struct step *step)
{
	struct submission *submission = &step->submission;

	if (submission->begun && step->option_count > submission->first_component_options)
		return fail(step,
			    "--%s: the script of a heterogeneous job runs in its first component, so only container options of that "
			    "component count: give it before the first ':' or #SBATCH hetjob",
			    option_table[step->options[step->option_count - 1].option].name);
	submission->first_component_options = step->option_count;
	return 0;
}

/* Set a variable under its prefixed name for the step or the job. Without a value, remove the variable of an outer job. */
static int forward(struct step *step, const char *variable, const char *value, bool to_job)
{
	char forwarded[MAX_NAME_BYTES];

	(void)snprintf(forwarded, sizeof(forwarded), "%s%s", to_job ? JOB_PREFIX : STEP_PREFIX, variable);
	if (value && !to_job ? setenv(forwarded, value, 1) < 0 : unsetenv(forwarded) < 0)
		return fail(step, "cannot set %s: %s", forwarded, strerror(errno));
	spank_err_t rc = value && to_job ? spank_job_control_setenv(step->spank, variable, value, 1) : ESPANK_SUCCESS;
	return rc == ESPANK_SUCCESS ? 0 : fail(step, "cannot set %s for the job: %s", variable, spank_strerror(rc));
}

/* Forward the variables that replace options: --export may leave them out. */
int forward_variables(struct step *step, bool to_job)
{
	for (int i = 0; i < OPTION_COUNT; i++) {
		const char *variable = option_variables[i];
		if (variable && forward(step, variable, getenv(variable), to_job) < 0)
			return -1;
	}
	return forward(step, CARRIED, NULL, to_job) < 0 || forward(step, PINNED, to_job ? NULL : getenv(PINNED), to_job) < 0 ? -1 : 0;
}

/* Forward the content of the environment file, or the pins. They replace the content or the pins of an outer job. */
int forward_content(struct step *step, const char *variable, const char *value, bool to_job)
{
	(void)unsetenv(variable);
	return forward(step, variable, value, to_job);
}

/* slurmstepd */

/* Join `prefix` and `name` to the name of a variable of the job, and write it to `variable`. Returns the value of this variable, or
 * NULL. */
static const char *job_variable(struct step *step, char variable[MAX_NAME_BYTES], const char *prefix, const char *name)
{
	char **variables = NULL;
	int length = snprintf(variable, MAX_NAME_BYTES, "%s%s", prefix, name);

	for (get_item(step, S_JOB_ENV, &variables); variables && *variables; variables++) {
		if (has_prefix(*variables, variable) && (*variables)[length] == '=')
			return *variables + length + 1;
	}
	return NULL;
}

/* Return the variable of an option that requests a container, or NULL if `word` is no such option: --NAME or --NAME=VALUE,
 * where NAME may be abbreviated as long as it is unique. */
const char *variable_of(const char *word)
{
	size_t length = strcspn(word, "=");

	for (int i = 0; i < OPTION_COUNT; i++) {
		size_t least = option_describes[i] ? strlen("--edf") : strlen("--container-x");
		if (option_selects[i] && length >= least && has_prefix(word, "--") &&
		    strncmp(word + 2, option_table[i].name, length - 2) == 0)
			return option_variables[i];
	}
	return NULL;
}

bool container_requested(struct step *step)
{
	char variable[MAX_NAME_BYTES];

	for (size_t i = 0; i < step->option_count; i++) {
		if (option_selects[step->options[i].option])
			return true;
	}
	for (int i = 0; i < OPTION_COUNT; i++) {
		if (option_selects[i] && option_variables[i] && job_variable(step, variable, "", option_variables[i]))
			return true;
	}
	return false;
}

/* Restore a variable that srun or sbatch has forwarded, unless --export has set it. */
static int take_variable(struct step *step, const char *prefix, const char *name)
{
	char variable[MAX_NAME_BYTES];
	const char *value = job_variable(step, variable, prefix, name);

	if (!value)
		return 0;
	spank_err_t rc = spank_setenv(step->spank, name, value, 0);
	(void)spank_unsetenv(step->spank, variable);
	return rc == ESPANK_SUCCESS || rc == ESPANK_ENV_EXISTS ? 0 : -1;
}

int take_variables(struct step *step)
{
	static const char *const contents[] = { CARRIED, PINNED };

	for (size_t i = 0; i < OPTION_COUNT + LENGTH(contents); i++) {
		const char *name = i < OPTION_COUNT ? option_variables[i] : contents[i - OPTION_COUNT];
		if (name && (take_variable(step, STEP_PREFIX, name) < 0 || take_variable(step, JOB_PREFIX, name) < 0))
			return -1;
	}
	return 0;
}

/* Take the key of the swarm (the nodes that send an image to each other) out of the job's environment, because tasks and other
 * programs of the step get this environment. */
int take_swarm(struct step *step)
{
	char variable[MAX_NAME_BYTES];
	const char *value = job_variable(step, variable, SWARM, "");

	if (!value)
		return 0;
	(void)snprintf(step->swarm, sizeof(step->swarm), "%s", value);
	return spank_unsetenv(step->spank, SWARM) == ESPANK_SUCCESS ? 0 : -1;
}

/* Take the options of a batch script from its environment if Slurm has lost them: with --export-file, and before 23.11 with
 * --export=NONE. */
int take_options_of_sbatch(struct step *step)
{
	bool has_options = step->option_count > 0;

	for (int i = 0; i < OPTION_COUNT && !has_options; i++) {
		char name[MAX_NAME_BYTES], variable[MAX_NAME_BYTES];
		name_of_sbatch(name, i);
		const char *value = job_variable(step, variable, "", name);
		if (value && store(step, i, option_table[i].has_arg ? value : "") < 0)
			return -1;
	}
	return 0;
}
