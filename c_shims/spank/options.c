/* The options of a step, and how they come from srun and sbatch to the nodes. */
#define OPTION_TABLES
#include "plugin.h"

/* Slurm's own variable for an option of sbatch, before its name; its value is the option's, or of a flag nothing that
 * means something. sbatch sets it after it has emptied its environment for --export-file, and every --export lets it
 * through (_set_spank_env of sbatch.c): so it reaches the script where what Slurm hands to plugins does not. */
#define OF_SBATCH "SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_"

/* Before the names of our variables: for a step, as every --export of srun lets SLURM_* through, and for a job, whose
 * variables sbatch gives such names itself, after --export-file too. */
#define OF_STEP "SLURM_"
#define OF_JOB "SLURM_SPANK_"

/* Slurm makes variables of options for the spank epilog, the script and more, under names of up to 100 bytes. One that
 * is longer than the kernel's MAX_ARG_STRLEN lets none of these be executed (E2BIG), which drains the node; the second
 * limit leaves room for some copies of all of them in the 2 MiB that arguments and environment have: execve(2). */
enum { NAME_LIMIT = 100, VALUE_LIMIT = 128 * 1024 - 256, VALUES_LIMIT = 256 * 1024 };

/* Slurm tells of an option without saying to whom. */
static struct step *registered;

/* scrontab takes the options of plugins, and hands none of them on: _entry_to_job of its scrontab.c. */
static int refuse_crontab(struct step *step, int option)
{
	const char *name = option_table[option].name;

	return fail(step,
		    "--%s: scrontab hands no options of plugins on, and the job would run outside of a container: give it to the "
		    "srun or sbatch of the line, as in: @hourly srun --%s...",
		    name, name);
}

/* The name of Slurm's variable for an option of sbatch. */
static void name_of_sbatch(char variable[NAME_LIMIT], int option)
{
	(void)snprintf(variable, NAME_LIMIT, OF_SBATCH "%s", option_table[option].name);
	for (char *at = variable; (at = strchr(at, '-'));)
		*at = '_';
}

/* What Slurm tells srun and sbatch of such a variable comes before what their command lines say: _opt_env() of opt.c. */
static bool is_inherited(int option, const char *value)
{
	char variable[NAME_LIMIT];

	name_of_sbatch(variable, option);
	const char *of_job = spank_context() == S_CTX_REMOTE ? NULL : getenv(variable);
	return of_job && strcmp(of_job, value) == 0;
}

static int keep(struct step *step, int option, const char *value)
{
	bool inherited = is_inherited(option, value);

	for (size_t i = 0; i < step->option_count; i++) {
		if (step->options[i].option == option && strcmp(step->options[i].value, value) == 0)
			return 0;
		if (step->options[i].option == option && step->options[i].inherited) {
			char *copy = strdup(value);
			if (!copy)
				return fail(step, "out of memory");
			free(step->options[i].value);
			step->options[i].value = copy;
			step->options[i].inherited = false;
			return 0;
		}
	}
	struct given_option *more = realloc(step->options, (step->option_count + 1) * sizeof(*more));
	if (!more)
		return fail(step, "out of memory");
	step->options = more;
	step->options[step->option_count] = (struct given_option){ .option = option, .value = strdup(value), .inherited = inherited };
	if (!step->options[step->option_count].value)
		return fail(step, "out of memory");
	step->option_count++;
	return 0;
}

static int option_given(int val, const char *optarg, int remote)
{
	struct step *step = registered;

	(void)remote;
	if (spank_context() == S_CTX_ALLOCATOR && strcmp(program_invocation_short_name, "scrontab") == 0)
		return refuse_crontab(step, val);
	if (keep(step, val, optarg ? optarg : "") == 0)
		return 0;
	/* On a node Slurm writes that into its log, and goes on. */
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

/* The value of `runtime_path=` in plugstack.conf; the last one counts. */
const char *runtime_path(struct step *step)
{
	static const char name[] = "runtime_path=";
	const char *path = DEFAULT_RUNTIME_PATH;

	for (int i = 0; i < step->argument_count; i++) {
		if (strncmp(step->arguments[i], name, sizeof(name) - 1) == 0)
			path = step->arguments[i] + sizeof(name) - 1;
	}
	return path;
}

/* srun, salloc, sbatch */

/* A variable that is none of ours may be a slip in one that is: the check tells. */
bool anything_said(struct step *step)
{
	static const char prefix[] = "PYXIS_CONTAINER_";

	for (char **variable = environ; variable && *variable; variable++) {
		if (strncmp(*variable, prefix, sizeof(prefix) - 1) == 0)
			return true;
	}
	return step->option_count > 0 || getenv(ENVIRONMENT_VARIABLE);
}

/* The container's name and image; false where other options are given, or one of these twice. */
bool get_only(struct step *step, const char **name, const char **image)
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

/* Add the size of a value to that of all. */
static int measure(struct step *step, const char *dashes, const char *name, const char *value, size_t *all)
{
	size_t size = value ? strlen(value) : 0;

	*all += size;
	if (size > VALUE_LIMIT)
		return fail(step,
			    "%s%s has %zu bytes, and at most %d fit into the environment of a job: give less of it, such as a mount of "
			    "the directory above many",
			    dashes, name, size, VALUE_LIMIT);
	return 0;
}

/* Whether a file is to be read, in which the submitter's variables count. */
bool environment_asked_for(struct step *step)
{
	for (size_t i = 0; i < step->option_count; i++) {
		if (step->options[i].option == ENVIRONMENT_OPTION)
			return true;
	}
	return getenv(ENVIRONMENT_VARIABLE);
}

/* What would run, and then drain its nodes. */
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
	if (all > VALUES_LIMIT)
		return fail(step,
			    "the container options and PYXIS_CONTAINER_* variables have %zu bytes together, and at most %d fit into "
			    "the environment of a job: give less of them",
			    all, VALUES_LIMIT);
	return 0;
}

/* sbatch comes here for each component of a heterogeneous job, whose script runs in the first, with the options of that. */
int check_component(struct step *step)
{
	struct submission *submission = &step->submission;

	if (submission->begun && step->option_count > submission->options_of_first)
		return fail(
			step,
			"--%s: the script of a heterogeneous job runs in its first component, and only the container options of that "
			"count: give it before the first ':' or #SBATCH hetjob",
			option_table[step->options[step->option_count - 1].option].name);
	submission->options_of_first = step->option_count;
	return 0;
}

/* Put a variable into the environment of the step, or of the job, under the other name; without a value, what a job
 * around this one has left there is taken away. */
static int forward(struct step *step, const char *variable, const char *value, bool of_job)
{
	char forwarded[NAME_LIMIT];

	(void)snprintf(forwarded, sizeof(forwarded), "%s%s", of_job ? OF_JOB : OF_STEP, variable);
	if (value && !of_job ? setenv(forwarded, value, 1) < 0 : unsetenv(forwarded) < 0)
		return fail(step, "cannot set %s: %s", forwarded, strerror(errno));
	spank_err_t rc = value && of_job ? spank_job_control_setenv(step->spank, variable, value, 1) : ESPANK_SUCCESS;
	return rc == ESPANK_SUCCESS ? 0 : fail(step, "cannot set %s for the job: %s", variable, spank_strerror(rc));
}

/* The variables that say which container go along where --export leaves them out, too. */
int forward_variables(struct step *step, bool of_job)
{
	for (int i = 0; i < OPTION_COUNT; i++) {
		const char *variable = option_variables[i];
		if (variable && forward(step, variable, getenv(variable), of_job) < 0)
			return -1;
	}
	return forward(step, CARRIED, NULL, of_job) < 0 || forward(step, PINNED, of_job ? NULL : getenv(PINNED), of_job) < 0 ? -1 : 0;
}

/* What the environment file says goes along too, and what tags are. */
int carry(struct step *step, const char *variable, const char *value, bool of_job)
{
	(void)unsetenv(variable); /* of a job around this one */
	return forward(step, variable, value, of_job);
}

/* slurmstepd */

/* The value of a variable of the job, or NULL; PREFIX_NAME is left in `variable`. */
static const char *job_variable(struct step *step, char variable[NAME_LIMIT], const char *prefix, const char *name)
{
	char **variables = NULL;
	int length = snprintf(variable, NAME_LIMIT, "%s%s", prefix, name);

	for (get_item(step, S_JOB_ENV, &variables); variables && *variables; variables++) {
		if (strncmp(*variables, variable, (size_t)length) == 0 && (*variables)[length] == '=')
			return *variables + length + 1;
	}
	return NULL;
}

/* The variable of an option that asks for a container, or NULL where `word` is none: --NAME or --NAME=VALUE, or as much of
 * NAME as no other option has. */
const char *variable_of(const char *word)
{
	static const char common[] = "--container-";
	size_t length = strcspn(word, "=");

	for (int i = 0; i < OPTION_COUNT; i++) {
		size_t least = i == ENVIRONMENT_OPTION ? sizeof("--env") - 1 : sizeof(common);
		if (option_selects[i] && length >= least && strncmp(word, "--", 2) == 0 &&
		    strncmp(word + 2, option_table[i].name, length - 2) == 0)
			return option_variables[i];
	}
	return NULL;
}

bool container_asked_for(struct step *step)
{
	char variable[NAME_LIMIT];

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

/* The variables as they were where srun or sbatch was called; one that --export has set is left as it is. */
static int take_variable(struct step *step, const char *prefix, const char *name)
{
	char variable[NAME_LIMIT];
	const char *value = job_variable(step, variable, prefix, name);

	if (!value)
		return 0;
	spank_err_t rc = spank_setenv(step->spank, name, value, 0);
	(void)spank_unsetenv(step->spank, variable);
	return rc == ESPANK_SUCCESS || rc == ESPANK_ENV_EXISTS ? 0 : -1;
}

int take_variables(struct step *step)
{
	for (int i = 0; i < OPTION_COUNT; i++) {
		const char *name = option_variables[i];
		if (name && (take_variable(step, OF_STEP, name) < 0 || take_variable(step, OF_JOB, name) < 0))
			return -1;
	}
	static const char *const carried[] = { CARRIED, PINNED };
	for (size_t i = 0; i < LENGTH(carried); i++) {
		if (take_variable(step, OF_STEP, carried[i]) < 0 || take_variable(step, OF_JOB, carried[i]) < 0)
			return -1;
	}
	return 0;
}

/* The job's environment goes to tasks and to what Slurm runs around them: the key of a swarm is taken out before. */
int take_swarm(struct step *step)
{
	char variable[NAME_LIMIT];
	const char *value = job_variable(step, variable, SWARM, "");

	if (!value)
		return 0;
	(void)snprintf(step->swarm, sizeof(step->swarm), "%s", value);
	return spank_unsetenv(step->spank, SWARM) == ESPANK_SUCCESS ? 0 : -1;
}

/* The options of a batch script, where Slurm has lost them on the way to us: with --export-file, and before 23.11 with
 * --export=NONE. */
int take_options_of_sbatch(struct step *step)
{
	bool given = step->option_count > 0;

	for (int i = 0; i < OPTION_COUNT && !given; i++) {
		char name[NAME_LIMIT], variable[NAME_LIMIT];
		name_of_sbatch(name, i);
		const char *value = job_variable(step, variable, "", name);
		if (value && keep(step, i, option_table[i].has_arg ? value : "") < 0)
			return -1;
	}
	return 0;
}
