/* What the Python process is asked, and how its answer is heard. */
#include "plugin.h"

void add_environ(struct request *request, const char *key, char *const *variables, bool ours_only)
{
	static const char *const ours[] = { "PYXIS_", "ENROOT_", RESOLVED "=" };

	for (; variables && *variables; variables++) {
		bool wanted = !ours_only;
		for (size_t i = 0; i < LENGTH(ours); i++)
			wanted = wanted || strncmp(*variables, ours[i], strlen(ours[i])) == 0;
		if (wanted)
			request_add(request, key, "%s", *variables);
	}
}

/* What all requests have in common. */
void begin_request(struct step *step, struct request *request, const char *verb, const char *context, const char *cwd)
{
	request_add(request, "verb", "%s", verb);
	request_add(request, "context", "%s", context);
	for (int i = 0; i < step->argument_count; i++)
		request_add(request, "arg", "%s", step->arguments[i]);
	add_options(step, request);
	request_add(request, "cwd", "%s", cwd);
	request_add(request, "node", "%s", hostname);
}

/* What step, join and finish have in common. */
int begin_step_request(struct step *step, struct request *request, const char *verb)
{
	char **variables = NULL;
	spank_err_t rc = get_item(step, S_JOB_ENV, &variables);

	if (rc != ESPANK_SUCCESS)
		return fail(step, "cannot get the environment of the job: %s", spank_strerror(rc));
	begin_request(step, request, verb, "stepd", step->shared->cwd);
	add_environ(request, "environ", variables, false);
	request_add(request, "jobid", "%u", step->job_id);
	request_add(request, "stepid", "%u", step->step_id);
	request_add(request, "uid", "%u", (unsigned int)step->job.uid);
	request_add(request, "gid", "%u", (unsigned int)step->job.gid);
	request_add(request, "localtasks", "%u", step->local_tasks);
	request_add(request, "totaltasks", "%u", step->total_tasks);
	if (*step->swarm)
		request_add(request, "swarm", "%s", step->swarm);
	return 0;
}

/* Wait for an answer; what comes before it is printed at once, and so are the reasons of a refusal.
 * SILENT, with errno, if the process goes without an answer. */
int listen_to(struct step *step, const struct coprocess *process, struct answer *answer)
{
	for (;;) {
		const char *kind, *text, *key, *value;
		size_t at = 0;

		answer_free(answer);
		if (answer_receive(answer, process) < 0)
			return SILENT;
		(void)answer_next(answer, &at, &kind, &text);
		if (strcmp(kind, "ok") == 0)
			return ANSWERED;
		if (strcmp(kind, "log") == 0) {
			print_log(step, answer_next(answer, &at, &key, &value) ? value : "info", text);
			continue;
		}
		for (at = 0; answer_next(answer, &at, &key, &value);) {
			if (*value) /* else it has been said */
				print_error(step, value);
		}
		return REFUSED;
	}
}

/* Send a request and wait for the answer. */
int converse(struct step *step, const struct coprocess *process, struct request *request, struct answer *answer)
{
	if (request_finish(request) < 0)
		return SILENT;
	/* The process may answer before it has read everything, so a failed send shows in the answer. */
	int sent = request_send(request, process);
	int why = errno;
	int rc = listen_to(step, process, answer);

	if (rc == SILENT && sent < 0)
		errno = why;
	return rc;
}

/* Say why there is no answer: returns -1. */
int explain_silence(struct step *step, const struct coprocess *process)
{
	int why = errno;
	if (why == ETIMEDOUT && process->until == FOREVER)
		return fail(step, "the helper process of the container is stopped: let it go on with kill -CONT, or end the step");
	bool said = coprocess_each_log_line(process, step, print_error);
	if (why != ECONNRESET && why != EPIPE)
		return fail(step, "no answer from the helper process of the container: %s", strerror(why));
	return fail(step, "the helper process of the container ended without an answer: %s",
		    said ? "pyxis-py check tells more there" : "killed? see --mem and dmesg");
}

/* Converse where silence is a failure too: returns 0, or -1 with the reason printed. */
int ask(struct step *step, const struct coprocess *process, struct request *request, struct answer *answer)
{
	int rc = converse(step, process, request, answer);

	return rc == SILENT ? explain_silence(step, process) : rc;
}

/* Start a process of the user's as root; it does nothing before it is asked. */
int start_as_user(struct step *step, struct coprocess *process, const char *verb, int64_t until)
{
	if (coprocess_start(process, verb, -1, &step->job, false) < 0)
		return fail(step, "cannot start %s: %s", interpreter(), strerror(errno));
	process->until = until;
	return 0;
}

/* Ask such a process, and wait for its end. */
int consult(struct step *step, struct coprocess *process, const char *purpose, struct request *request)
{
	cleanup(answer_free) struct answer answer = { 0 };

	int rc = ask(step, process, request, &answer);
	close_fd(&process->socket);
	if (coprocess_wait(process) < 0)
		return fail(step, "a process for the %s has not ended in time, and was killed", purpose);
	return rc;
}
