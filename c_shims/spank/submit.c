/* Check the options in srun, salloc and sbatch: an error ends the command before anything is queued. For srun, the Python process
 * that checks the options then resolves a tag while srun waits for nodes. In a heterogeneous job, only one component would get the
 * digest that way, so srun waits for the digest before it asks for nodes. */
#include "plugin.h"

#include "brought.h"

static void free_text(char **text)
{
	free(*text);
}

/* Symbols of srun, for the tracker (take_resolved()): it uses a port of SrunPortRange, and shows no progress with --quiet. */
extern slurm_conf_t slurm_conf __attribute__((weak));
extern int get_log_level(void) __attribute__((weak));

static int set_variable(struct step *step, const char *name, const char *value)
{
	if (value && setenv(name, value, 1) < 0)
		return fail(step, "cannot set %s: %s", name, strerror(errno));
	return 0;
}

/* Put two values into the environment of the step, for all nodes: the digest, and the address of the tracker, the process that
 * coordinates how the nodes send the image to each other. */
int take_resolved(struct step *step)
{
	uint32_t nodes, job, id;
	cleanup(request_free) struct request request = { 0 };
	cleanup(answer_free) struct answer answer = { 0 };
	struct submission *submission = &step->submission;
	cleanup(helper_free) struct helper process = submission->resolving;

	submission->resolving = HELPER_NONE;
	if (process.socket < 0)
		return 0;
	if (submission->is_unanswered) {
		submission->is_unanswered = false;
		/* After an error, the nodes end the step. If srun ended here, Slurm would keep the allocation. */
		int rc = read_answer(step, &process, &answer);
		if (rc == NO_ANSWER)
			(void)explain_no_answer(step, &process);
		if (rc != ANSWERED || !answer_get(&answer, "later")) {
			close_fd(&process.socket);
			(void)helper_wait(&process);
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
		if (list && count && (uint32_t)atol(count) == nodes) /* if the counts differ, this is the job's list */
			request_add(&request, "nodelist", "%s", list);
		if (get_log_level)
			request_add(&request, "loglevel", "%d", get_log_level());
		if (&slurm_conf && slurm_conf.srun_port_range) {
			request_add(&request, "firstport", "%u", slurm_conf.srun_port_range[0]);
			request_add(&request, "lastport", "%u", slurm_conf.srun_port_range[1]);
		}
	}
	/* Without an answer, each node resolves the tag itself, and the first node warns that the images may differ. */
	bool answered = exchange(step, &process, &request, &answer) == ANSWERED;
	const char *swarm = answered ? answer_get(&answer, "swarm") : NULL;
	if (swarm) { /* the process stays as the nodes' tracker until srun's end closes the socket */
		(void)release_fd(&process.socket);
	} else {
		close_fd(&process.socket);
		(void)helper_wait(&process);
	}
	if (set_variable(step, RESOLVED, answered ? answer_get(&answer, "resolved") : NULL) < 0)
		return -1;
	return set_variable(step, SWARM, swarm);
}

/* Restore the variables that the launcher of Slurm's programs in a container has renamed: c_shims/programs/slurm.c. */
int restore_variables(struct step *step)
{
	for (char **at = environ; is_in_container() && at && *at;) {
		const char *equals = strchr(*at, '=');
		if (!equals || !has_prefix(*at, SLURM_KEPT)) {
			at++;
			continue;
		}
		cleanup(free_text) char *variable = strndup(*at, (size_t)(equals - *at)), *value = strdup(equals + 1);
		if (!variable || !value)
			return fail(step, "out of memory");
		const char *name = variable + strlen(SLURM_KEPT);
		if (unsetenv(variable) < 0 || (*value ? setenv(name, value, 1) : unsetenv(name)) < 0)
			return fail(step, "cannot set %s: %s", name, strerror(errno));
		at = environ;
	}
	return 0;
}

static int use_answer(struct step *step, const struct answer *answer, const char *context)
{
	bool is_sbatch = strcmp(context, "sbatch") == 0;
	const char *environment = answer_get(answer, "environment"), *pins = answer_get(answer, "pinned");

	if (environment && strcmp(context, "salloc") != 0 && forward_content(step, CARRIED, environment, is_sbatch) < 0)
		return -1;
	/* Besides, put pins (digests of tags) into the own environment of salloc or sbatch. The command of salloc inherits them.
	 * sbatch calls the plugin again for the other components of a heterogeneous job. */
	if ((pins && is_sbatch && forward_content(step, PINNED, pins, true) < 0) || set_variable(step, PINNED, pins) < 0)
		return -1;
	return set_variable(step, VERBOSE, answer_get(answer, "verbose") ? "1" : NULL);
}

int check(struct step *step, const char *context)
{
	struct submission *submission = &step->submission;
	char cwd[PATH_MAX], helper[PATH_MAX];
	cleanup(request_free) struct request request = { 0 };
	cleanup(answer_free) struct answer answer = { 0 };
	cleanup(helper_free) struct helper process = HELPER_NONE;

	/* An srun in a container may have the plugin without the Python packages. The nodes check the request in any case. */
	(void)snprintf(helper, sizeof(helper), "%s/pyxis_py/__init__.py", library());
	if (access(interpreter(), X_OK) < 0 || access(helper, R_OK) < 0) {
		slurm_debug("pyxis: the options are not checked here: cannot use %s or %s: %s", interpreter(), helper, strerror(errno));
		return 0;
	}
	begin_request(step, &request, "check", context, getcwd(cwd, sizeof(cwd)) ? cwd : "");
	/* Remove variables of an outer step, but not variables of the first component: Slurm calls this once for each component, and
	 * the result of the first component holds for all. */
	if (!submission->checked) {
		(void)unsetenv(RESOLVED);
		(void)unsetenv(SWARM);
		(void)unsetenv(VERBOSE);
	}
	submission->checked = true;
	add_environ(&request, "environ", environ, true);
	if (environment_file_requested(step))
		add_environ(&request, "caller", environ, false);
	enum plainness plainness = classify_request(step, context);
	if (plainness == PLAIN)
		return 0;
	request_add(&request, "optind", "%d", optind);
	int terminal = fcntl(STDERR_FILENO, F_GETFD) < 0 ? -1 : STDERR_FILENO;
	if (helper_start(&process, "check", terminal, NULL, false) < 0)
		return fail(step, "cannot start %s: %s", interpreter(), strerror(errno));
	if (plainness == PLAIN_TAG) {
		if (request_finish(&request) < 0)
			return fail(step, "out of memory");
		(void)request_send(&request, &process); /* if this fails, no answer will come */
		submission->resolving = process;
		process = HELPER_NONE;
		submission->is_unanswered = true;
		return 0;
	}
	int rc = ask(step, &process, &request, &answer);
	if (rc == ANSWERED && use_answer(step, &answer, context) < 0)
		return -1;
	const char *later = rc == ANSWERED ? answer_get(&answer, "later") : NULL;
	if (later) {
		submission->resolving = process;
		process = HELPER_NONE;
		return *later ? take_resolved(step) : 0;
	}
	close_fd(&process.socket);
	(void)helper_wait(&process);
	return rc;
}
