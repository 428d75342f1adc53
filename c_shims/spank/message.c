/* Messages to and from the Python process: a little-endian uint32 with the length of the rest, then alternating KEY and
 * VALUE strings, each with its NUL. */
#include "plugin.h"

#include <endian.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/socket.h>

void request_free(struct request *request)
{
	if (request->stream)
		(void)fclose(request->stream);
	free(request->data);
	*request = (struct request){ 0 };
}

void answer_free(struct answer *answer)
{
	for (size_t i = 0; i < answer->fd_count; i++)
		close_fd(&answer->fds[i]);
	free(answer->data);
	*answer = (struct answer){ 0 };
}

/* A failed write (out of memory) sets the stream's error flag, which request_finish() checks. */
void request_add(struct request *request, const char *key, const char *format, ...)
{
	va_list arguments;

	if (!request->stream) {
		request->stream = open_memstream(&request->data, &request->length);
		if (!request->stream)
			return;
		/* Leave room for the length, which is known at the end. */
		(void)fwrite(&(uint32_t){ 0 }, sizeof(uint32_t), 1, request->stream);
	}
	(void)fprintf(request->stream, "%s%c", key, 0);
	va_start(arguments, format);
	(void)vfprintf(request->stream, format, arguments);
	va_end(arguments);
	(void)fputc('\0', request->stream);
}

int request_finish(struct request *request)
{
	bool failed = !request->stream || ferror(request->stream);

	if (request->stream && fclose(request->stream) != 0)
		failed = true;
	request->stream = NULL;
	if (failed || request->length > MAX_MESSAGE_BYTES)
		return set_errno(failed ? ENOMEM : EMSGSIZE);
	uint32_t length = htole32((uint32_t)(request->length - sizeof(length)));
	memcpy(request->data, &length, sizeof(length));
	return 0;
}

int request_send(const struct request *request, const struct helper *process)
{
	for (size_t sent = 0; sent < request->length;) {
		ssize_t n = send(process->socket, request->data + sent, request->length - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n >= 0)
			sent += (size_t)n;
		else if (errno == EAGAIN ? helper_await(process, process->socket, POLLOUT) < 0 : errno != EINTR)
			return -1;
	}
	return 0;
}

/* Store the descriptors of one control message. */
static int store_fds(struct answer *answer, struct msghdr *header)
{
	bool is_complete = !(header->msg_flags & MSG_CTRUNC);

	for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t at = CMSG_LEN(0); at < c->cmsg_len; at += sizeof(int)) {
			int fd;
			memcpy(&fd, (char *)c + at, sizeof(int));
			if (answer->fd_count < MAX_FDS) {
				answer->fds[answer->fd_count++] = fd;
			} else {
				(void)close(fd);
				is_complete = false;
			}
		}
	}
	return is_complete ? 0 : set_errno(EMSGSIZE);
}

static int receive_exactly(struct answer *answer, const struct helper *process, void *to, size_t length)
{
	while (length > 0) {
		union {
			char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))];
			struct cmsghdr align;
		} control;
		struct iovec iov = { .iov_base = to, .iov_len = length };
		struct msghdr header = {
			.msg_iov = &iov,
			.msg_iovlen = 1,
			.msg_control = process->is_untrusted ? NULL : control.bytes,
			.msg_controllen = process->is_untrusted ? 0 : sizeof(control.bytes),
		};
		if (helper_await(process, process->socket, POLLIN) < 0)
			return -1;
		ssize_t n = recvmsg(process->socket, &header, MSG_CMSG_CLOEXEC);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 || (!process->is_untrusted && store_fds(answer, &header) < 0))
			return -1;
		if (n == 0)
			return set_errno(ECONNRESET);
		to = (char *)to + n;
		length -= (size_t)n;
	}
	return 0;
}

static int answer_receive(struct answer *answer, const struct helper *process)
{
	size_t limit = process->is_untrusted ? MAX_UNTRUSTED_BYTES : MAX_MESSAGE_BYTES, strings = 0;
	uint32_t length;

	*answer = (struct answer){ 0 };
	if (receive_exactly(answer, process, &length, sizeof(length)) < 0)
		return -1;
	length = le32toh(length);
	errno = EBADMSG;
	if (length == 0 || length > limit || !(answer->data = malloc(length)) ||
	    receive_exactly(answer, process, answer->data, length) < 0)
		return -1;
	answer->length = length;
	/* Pairs contain an even number of NULs, and end with a NUL. */
	for (size_t i = 0; i < length; i++)
		strings += answer->data[i] == '\0';
	return answer->data[length - 1] == '\0' && strings % 2 == 0 ? 0 : set_errno(EBADMSG);
}

bool answer_next(const struct answer *answer, size_t *at, const char **key, const char **value)
{
	if (*at >= answer->length)
		return false;
	*key = answer->data + *at;
	*at += strlen(*key) + 1;
	*value = answer->data + *at;
	*at += strlen(*value) + 1;
	return true;
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

void add_environ(struct request *request, const char *key, char *const *variables, bool ours_only)
{
	static const char *const prefixes[] = { "PYXIS_", "ENROOT_", RESOLVED "=" };

	for (; variables && *variables; variables++) {
		bool wanted = !ours_only;
		for (size_t i = 0; i < LENGTH(prefixes); i++)
			wanted = wanted || has_prefix(*variables, prefixes[i]);
		if (wanted)
			request_add(request, key, "%s", *variables);
	}
}

/* Add the keys that all requests but `offer` have. */
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

/* Add the keys of step, join, save and finish. */
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

/* Wait for an answer. Print the log lines before the answer, and the reasons of a refusal, at once. Returns NO_ANSWER, with errno,
 * if the process ends without an answer. */
int read_answer(struct step *step, const struct helper *process, struct answer *answer)
{
	for (;;) {
		const char *kind, *text, *key, *value;
		size_t at = 0;

		answer_free(answer);
		if (answer_receive(answer, process) < 0 || !answer_next(answer, &at, &kind, &text))
			return NO_ANSWER;
		if (strcmp(kind, "ok") == 0)
			return ANSWERED;
		if (strcmp(kind, "log") == 0) {
			print_log(step, answer_next(answer, &at, &key, &value) ? value : "info", text);
			continue;
		}
		for (at = 0; answer_next(answer, &at, &key, &value);) {
			if (*value) /* an empty value: the error is printed already */
				print_error(step, value);
		}
		return REFUSED;
	}
}

/* Send a request and wait for the answer. */
int exchange(struct step *step, const struct helper *process, struct request *request, struct answer *answer)
{
	if (request_finish(request) < 0)
		return NO_ANSWER;
	/* The process may answer before it has read everything: read the answer even if sending fails. */
	int sent = request_send(request, process);
	int error = errno;
	int rc = read_answer(step, process, answer);

	if (rc == NO_ANSWER && sent < 0)
		errno = error;
	return rc;
}

/* Print the end of the process's stderr: the last line of a traceback has its message. Returns false if the stderr is empty. */
static bool print_stderr(struct step *step, const struct helper *process)
{
	char text[4096];
	char *rest = text;
	/* The processes share the offset of the file, so the offset is the number of bytes written. */
	off_t end = process->log < 0 ? 0 : lseek(process->log, 0, SEEK_CUR);
	off_t from = end > (off_t)sizeof(text) - 1 ? end - (off_t)sizeof(text) + 1 : 0;
	ssize_t n = end > 0 ? pread(process->log, text, sizeof(text) - 1, from) : 0;

	if (n <= 0)
		return false;
	text[n] = '\0';
	for (char *line; (line = strsep(&rest, "\n"));) {
		if (*line)
			print_error(step, line);
	}
	return true;
}

/* Print why there is no answer, and return -1. */
int explain_no_answer(struct step *step, const struct helper *process)
{
	int error = errno;
	if (error == ETIMEDOUT && process->deadline == FOREVER)
		return fail(step, "the helper process of the container is stopped: resume it with kill -CONT, or cancel the step");
	bool has_output = print_stderr(step, process);
	if (error != ECONNRESET && error != EPIPE)
		return fail(step, "no answer from the helper process of the container: %s", strerror(error));
	return fail(step, "the helper process of the container ended without an answer: %s%s",
		    has_output ? "run pyxis-py check on " : "killed? see --mem and dmesg", has_output ? hostname : "");
}

/* Send a request and wait for the answer. Without an answer, print the reason and return -1. */
int ask(struct step *step, const struct helper *process, struct request *request, struct answer *answer)
{
	int rc = exchange(step, process, request, answer);

	return rc == NO_ANSWER ? explain_no_answer(step, process) : rc;
}

/* As root, start a process that becomes the user and waits for a request. */
int start_as_user(struct step *step, struct helper *process, const char *verb, int64_t deadline)
{
	if (helper_start(process, verb, -1, &step->job, false) < 0)
		return fail(step, "cannot start %s: %s", interpreter(), strerror(errno));
	process->deadline = deadline;
	return 0;
}

/* Send a request to a process from start_as_user(), and wait for the end of the process. */
int ask_and_wait(struct step *step, struct helper *process, const char *purpose, struct request *request)
{
	cleanup(answer_free) struct answer answer = { 0 };

	int rc = ask(step, process, request, &answer);
	close_fd(&process->socket);
	if (helper_wait(process) < 0)
		return fail(step, "the process for the %s did not end in time and was killed", purpose);
	return rc;
}
