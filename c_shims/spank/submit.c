/* In srun, salloc and sbatch: a mistake ends the command before anything is queued. For srun the process then resolves a
 * tag while srun waits for nodes. Of several components of a heterogeneous job only one would get the digest, so there srun
 * waits for it. */
#include "plugin.h"

#include "brought.h"

static void free_text(char **text)
{
	free(*text);
}

/* What srun knows: a port of its own is to be one of SrunPortRange, and with --quiet it shows no progress. */
extern slurm_conf_t slurm_conf __attribute__((weak));
extern int get_log_level(void) __attribute__((weak));

static int set_variable(struct step *step, const char *name, const char *value)
{
	if (value && setenv(name, value, 1) < 0)
		return fail(step, "cannot set %s: %s", name, strerror(errno));
	return 0;
}

/* What all nodes of the step are to know goes to them with the environment of its tasks. */
int take_resolved(struct step *step)
{
	uint32_t nodes, job, id;
	cleanup(request_free) struct request request = { 0 };
	cleanup(answer_free) struct answer answer = { 0 };
	struct submission *submission = &step->submission;
	cleanup(coprocess_free) struct coprocess process = submission->resolving;

	submission->resolving = COPROCESS_NONE;
	if (process.socket < 0)
		return 0;
	if (submission->unheard) {
		submission->unheard = false;
		/* What is wrong all the same ends the step on the nodes: here Slurm would keep the allocation. */
		int rc = listen_to(step, &process, &answer);
		if (rc == SILENT)
			(void)explain_silence(step, &process);
		if (rc != ANSWERED || !answer_get(&answer, "later")) {
			close_fd(&process.socket);
			(void)coprocess_wait(&process);
			return 0;
		}
		answer_free(&answer);
	}
	request_add(&request, "verb", "offer");
	if (get_item(step, S_JOB_NNODES, &nodes) == ESPANK_SUCCESS && get_item(step, S_JOB_ID, &job) == ESPANK_SUCCESS &&
	    get_item(step, S_JOB_STEPID, &id) == ESPANK_SUCCESS) {
		request_add(&request, "nodes", "%u", nodes);
		request_add(&request, "jobid", "%u", job);
		request_add(&request, "stepid", "%u", id);
		const char *list = getenv("SLURM_NODELIST"), *count = getenv("SLURM_NNODES");
		if (list && count && (uint32_t)atol(count) == nodes) /* else they are those of the job */
			request_add(&request, "nodelist", "%s", list);
		if (get_log_level)
			request_add(&request, "loglevel", "%d", get_log_level());
		if (&slurm_conf && slurm_conf.srun_port_range) {
			request_add(&request, "firstport", "%u", slurm_conf.srun_port_range[0]);
			request_add(&request, "lastport", "%u", slurm_conf.srun_port_range[1]);
		}
	}
	/* Without an answer each node resolves the tag, and says so. */
	bool answered = converse(step, &process, &request, &answer) == ANSWERED;
	const char *swarm = answered ? answer_get(&answer, "swarm") : NULL;
	if (swarm) { /* it is the nodes' tracker, as long as it can hear that srun is there */
		(void)keep_fd(&process.socket);
	} else {
		close_fd(&process.socket);
		(void)coprocess_wait(&process);
	}
	if (set_variable(step, RESOLVED, answered ? answer_get(&answer, "resolved") : NULL) < 0)
		return -1;
	return set_variable(step, SWARM, swarm);
}

/* The launcher of a program in a container has taken variables out of its way, c_shims/helpers/slurm.c: the job has
 * them as they were. */
int give_back_variables(struct step *step)
{
	static const char kept[] = SLURM_KEPT;

	for (char **at = environ; is_brought() && at && *at;) {
		const char *equals = strchr(*at, '=');
		if (!equals || strncmp(*at, kept, sizeof(kept) - 1) != 0) {
			at++;
			continue;
		}
		cleanup(free_text) char *variable = strndup(*at, (size_t)(equals - *at)), *value = strdup(equals + 1);
		if (!variable || !value)
			return fail(step, "out of memory");
		const char *name = variable + sizeof(kept) - 1;
		if (unsetenv(variable) < 0 || (*value ? setenv(name, value, 1) : unsetenv(name)) < 0)
			return fail(step, "cannot set %s: %s", name, strerror(errno));
		at = environ;
	}
	return 0;
}

/* What tags are for all of a job. The command of salloc has it of the environment of salloc; so have the other components
 * of a heterogeneous job, for which sbatch comes here again. */
static int pin(struct step *step, const char *pins, const char *context)
{
	if (pins && strcmp(context, "sbatch") == 0 && carry(step, PINNED, pins, true) < 0)
		return -1;
	return set_variable(step, PINNED, pins);
}

int check(struct step *step, const char *context)
{
	struct submission *submission = &step->submission;
	char cwd[PATH_MAX], helper[PATH_MAX];
	cleanup(request_free) struct request request = { 0 };
	cleanup(answer_free) struct answer answer = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	/* An srun in a container may have the plugin and no more of us. The nodes check it all again. */
	(void)snprintf(helper, sizeof(helper), "%s/pyxis_py/__init__.py", library());
	if (access(interpreter(), X_OK) < 0 || access(helper, R_OK) < 0) {
		slurm_debug("pyxis: nothing is checked here: %s or %s: %s", interpreter(), helper, strerror(errno));
		return 0;
	}
	begin_request(step, &request, "check", context, getcwd(cwd, sizeof(cwd)) ? cwd : "");
	/* It is of a step around this one; but Slurm comes here once for each component, and what the first has found
	 * holds for all. */
	if (!submission->checked) {
		(void)unsetenv(RESOLVED);
		(void)unsetenv(SWARM);
		(void)unsetenv(VERBOSE);
	}
	submission->checked = true;
	add_environ(&request, "environ", environ, true);
	if (environment_asked_for(step))
		add_environ(&request, "caller", environ, false);
	enum plainness plainness = judge(step, context);
	if (plainness == PLAIN)
		return 0;
	request_add(&request, "optind", "%d", optind);
	int terminal = fcntl(STDERR_FILENO, F_GETFD) < 0 ? -1 : STDERR_FILENO;
	if (coprocess_start(&process, "check", terminal, NULL, false) < 0)
		return fail(step, "cannot start %s: %s", interpreter(), strerror(errno));
	if (plainness == PLAIN_TAG) {
		if (request_finish(&request) < 0)
			return fail(step, "out of memory");
		(void)request_send(&request, &process); /* where that fails there is no answer */
		submission->resolving = process;
		process = COPROCESS_NONE;
		submission->unheard = true;
		return 0;
	}
	int rc = ask(step, &process, &request, &answer);
	const char *environment = rc == ANSWERED ? answer_get(&answer, "environment") : NULL;
	if (environment && strcmp(context, "salloc") != 0 && carry(step, CARRIED, environment, strcmp(context, "sbatch") == 0) < 0)
		return -1;
	if (rc == ANSWERED && pin(step, answer_get(&answer, "pinned"), context) < 0)
		return -1;
	if (rc == ANSWERED && answer_get(&answer, "verbose") && setenv(VERBOSE, "1", 1) < 0)
		return fail(step, "cannot set " VERBOSE ": %s", strerror(errno));
	const char *later = rc == ANSWERED ? answer_get(&answer, "later") : NULL;
	if (later) {
		submission->resolving = process;
		process = COPROCESS_NONE;
		return *later ? take_resolved(step) : 0;
	}
	close_fd(&process.socket);
	(void)coprocess_wait(&process);
	return rc;
}
