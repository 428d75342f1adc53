/* Messages between us and the Python process: a little-endian uint32 with the length of what follows, then KEY and
 * VALUE strings in turn, each with its NUL. */
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

/* A failed write (no memory) sticks to the stream: request_finish looks at it. */
void request_add(struct request *request, const char *key, const char *format, ...)
{
	va_list arguments;

	if (!request->stream) {
		request->stream = open_memstream(&request->data, &request->length);
		if (!request->stream)
			return;
		/* Room for the length, known at the end. */
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
	if (failed || request->length > MESSAGE_LIMIT) {
		errno = failed ? ENOMEM : EMSGSIZE;
		return -1;
	}
	uint32_t length = htole32((uint32_t)(request->length - sizeof(length)));
	memcpy(request->data, &length, sizeof(length));
	return 0;
}

int request_send(const struct request *request, const struct coprocess *process)
{
	for (size_t sent = 0; sent < request->length;) {
		ssize_t n = send(process->socket, request->data + sent, request->length - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n >= 0)
			sent += (size_t)n;
		else if (errno == EAGAIN ? coprocess_await(process, process->socket, POLLOUT) < 0 : errno != EINTR)
			return -1;
	}
	return 0;
}

/* Keep the descriptors of one control message. */
static int keep_fds(struct answer *answer, struct msghdr *header)
{
	bool all = !(header->msg_flags & MSG_CTRUNC);

	for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t at = CMSG_LEN(0); at < c->cmsg_len; at += sizeof(int)) {
			int fd;
			memcpy(&fd, (char *)c + at, sizeof(int));
			if (answer->fd_count < FDS_LIMIT) {
				answer->fds[answer->fd_count++] = fd;
			} else {
				(void)close(fd);
				all = false;
			}
		}
	}
	errno = EMSGSIZE;
	return all ? 0 : -1;
}

static int receive_exactly(struct answer *answer, const struct coprocess *process, void *to, size_t length)
{
	while (length > 0) {
		union {
			char bytes[CMSG_SPACE(FDS_LIMIT * sizeof(int))];
			struct cmsghdr align;
		} control;
		struct iovec iov = { .iov_base = to, .iov_len = length };
		struct msghdr header = {
			.msg_iov = &iov,
			.msg_iovlen = 1,
			.msg_control = process->wary ? NULL : control.bytes,
			.msg_controllen = process->wary ? 0 : sizeof(control.bytes),
		};
		if (coprocess_await(process, process->socket, POLLIN) < 0)
			return -1;
		ssize_t n = recvmsg(process->socket, &header, MSG_CMSG_CLOEXEC);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 || (!process->wary && keep_fds(answer, &header) < 0))
			return -1;
		if (n == 0) {
			errno = ECONNRESET;
			return -1;
		}
		to = (char *)to + n;
		length -= (size_t)n;
	}
	return 0;
}

int answer_receive(struct answer *answer, const struct coprocess *process)
{
	size_t limit = process->wary ? WARY_LIMIT : MESSAGE_LIMIT, strings = 0;
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
	/* Pairs: an even number of NULs, the last of them at the end. */
	for (size_t i = 0; i < length; i++)
		strings += answer->data[i] == '\0';
	errno = EBADMSG;
	return answer->data[length - 1] == '\0' && strings % 2 == 0 ? 0 : -1;
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
