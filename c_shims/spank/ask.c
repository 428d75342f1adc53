/* What the Python process is asked, and how its answer is heard. */
#define _GNU_SOURCE
#include "plugin.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void add_environ(struct request *request, char *const *variables, bool ours_only)
{
	static const char *const ours[] = { "PYXIS_", "ENROOT_", RESOLVED "=" };

	for (; variables && *variables; variables++) {
		bool wanted = !ours_only;
		for (size_t i = 0; i < sizeof(ours) / sizeof(ours[0]); i++)
			wanted = wanted || strncmp(*variables, ours[i], strlen(ours[i])) == 0;
		if (wanted)
			request_add(request, "environ", *variables);
	}
}

int begin(struct request *request, const char *verb, const char *context, int ac, char **av, const char *cwd)
{
	if (request_begin(request) < 0)
		return -1;
	request_add(request, "verb", verb);
	request_add(request, "context", context);
	for (int i = 0; i < ac; i++)
		request_add(request, "arg", av[i]);
	if (add_options(request) < 0)
		return -1;
	request_add(request, "cwd", cwd);
	request_add(request, "node", hostname);
	return 0;
}

/* What step, join and finish have in common. */
int begin_step(struct request *request, spank_t sp, const char *verb, int ac, char **av, const char *cwd)
{
	char **variables = NULL;
	spank_err_t rc = spank_get_item(sp, S_JOB_ENV, &variables);

	if (rc != ESPANK_SUCCESS)
		return fail("cannot get the environment of the job: %s", spank_strerror(rc));
	if (begin(request, verb, "stepd", ac, av, cwd) < 0)
		return fail("out of memory");
	add_environ(request, variables, false);
	request_add_number(request, "jobid", step.job_id);
	request_add_number(request, "stepid", step.step_id);
	request_add_number(request, "uid", step.job.uid);
	request_add_number(request, "gid", step.job.gid);
	request_add_number(request, "localtasks", step.local_tasks);
	request_add_number(request, "totaltasks", step.total_tasks);
	return 0;
}

const char *answer_get(const struct answer *answer, const char *wanted)
{
	const char *key, *value;

	for (size_t at = 0; answer_next(answer, &at, &key, &value);) {
		if (strcmp(key, wanted) == 0)
			return value;
	}
	return NULL;
}

/* Wait for an answer; what comes before it is printed at once, and so are the reasons of a refusal.
 * SILENT, with errno, if the process goes without an answer. */
int listen_to(const struct coprocess *process, struct answer *answer)
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
			const char *level = answer_next(answer, &at, &key, &value) ? value : "info";
			print_log(level, text);
			continue;
		}
		for (at = 0; answer_next(answer, &at, &key, &value);) {
			if (*value) /* else it has been said */
				print_error(value);
		}
		return REFUSED;
	}
}

/* Send a request and wait for the answer. */
int converse(const struct coprocess *process, const struct request *request, struct answer *answer)
{
	/* The process may answer before it has read everything, so a failed send shows in the answer. */
	int sent = request_send(request, process);
	int why = errno;
	int rc = listen_to(process, answer);

	if (rc == SILENT && sent < 0)
		errno = why;
	return rc;
}

/* The same where silence is a failure too: returns 0, or -1 with the reason printed. */
int ask(const struct coprocess *process, const struct request *request, struct answer *answer)
{
	int rc = converse(process, request, answer);

	if (rc != SILENT)
		return rc;
	int why = errno;
	bool said = coprocess_each_log_line(process, print_error);
	if (why != ECONNRESET && why != EPIPE)
		return fail("no answer from the helper process of the container: %s", strerror(why));
	return said ? fail("the helper process of the container ended without an answer: pyxis-py check tells more there") :
		      fail("the helper process of the container ended without an answer: killed? see --mem and dmesg");
}

/* Ask a process of the user's that root has started, and wait for its end. */
int consult(struct coprocess *process, const char *verb, const struct request *request)
{
	cleanup(answer_free) struct answer answer = { 0 };

	int rc = ask(process, request, &answer);
	close_fd(&process->socket);
	if (coprocess_wait(process) < 0)
		return fail("a process for the %s has not ended in time, and was killed", verb);
	return rc;
}

/* Start one; it does nothing before it is asked. */
int engage(struct coprocess *process, const char *verb, int64_t until)
{
	if (coprocess_start(process, verb, -1, &step.job, false) < 0)
		return fail("cannot start " PENROOT_PYTHON ": %s", strerror(errno));
	process->until = until;
	return 0;
}
