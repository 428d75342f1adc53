#define _GNU_SOURCE
#include "coprocess.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#ifndef PENROOT_PYTHON
#error "PENROOT_PYTHON: absolute path of the interpreter"
#endif
#ifndef PENROOT_LIB
#error "PENROOT_LIB: directory that holds pyxis_py and enroot_py"
#endif

enum { SOCKET_FD = 3, LIFELINE_FD = 4, FIRST_FREE_FD = 5, CPU_LIMIT = 8192 };

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

void coprocess_free(struct coprocess *process)
{
	close_fd(&process->socket);
	close_fd(&process->log);
}

int request_begin(struct request *request)
{
	*request = (struct request){ 0 };
	request->stream = open_memstream(&request->data, &request->length);
	if (!request->stream)
		return -1;
	/* Room for the length, known at the end. */
	(void)fwrite(&(uint32_t){ 0 }, sizeof(uint32_t), 1, request->stream);
	return 0;
}

/* A failed write (no memory) sticks to the stream: request_finish looks at it. */
void request_add(struct request *request, const char *key, const char *value)
{
	(void)fwrite(key, strlen(key) + 1, 1, request->stream);
	(void)fwrite(value, strlen(value) + 1, 1, request->stream);
}

void request_add_number(struct request *request, const char *key, unsigned long value)
{
	(void)fprintf(request->stream, "%s%c%lu%c", key, 0, value, 0);
}

int request_finish(struct request *request)
{
	bool failed = ferror(request->stream);

	if (fclose(request->stream) != 0)
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

int request_send(const struct request *request, int socket)
{
	for (size_t sent = 0; sent < request->length;) {
		ssize_t n = send(socket, request->data + sent, request->length - sent, MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -1;
		sent += (size_t)n;
	}
	return 0;
}

/* Keep the descriptors of one control message. */
static int keep_fds(struct answer *answer, struct msghdr *header)
{
	for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < count; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
			if (answer->fd_count == FDS_LIMIT) {
				(void)close(fd);
				errno = EMSGSIZE;
				return -1;
			}
			answer->fds[answer->fd_count++] = fd;
		}
	}
	if (header->msg_flags & MSG_CTRUNC) {
		errno = EMSGSIZE;
		return -1;
	}
	return 0;
}

static int receive_exactly(struct answer *answer, int socket, void *to, size_t length)
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
			.msg_control = control.bytes,
			.msg_controllen = sizeof(control.bytes),
		};
		ssize_t n = recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -1;
		if (keep_fds(answer, &header) < 0)
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

int answer_receive(struct answer *answer, int socket)
{
	uint32_t length;

	*answer = (struct answer){ 0 };
	if (receive_exactly(answer, socket, &length, sizeof(length)) < 0)
		return -1;
	answer->length = le32toh(length);
	if (answer->length == 0 || answer->length > MESSAGE_LIMIT) {
		errno = EBADMSG;
		return -1;
	}
	answer->data = malloc(answer->length);
	if (!answer->data)
		return -1;
	if (receive_exactly(answer, socket, answer->data, answer->length) < 0)
		return -1;

	/* KEY, VALUE, KEY, VALUE: an even number of NULs, the last of them at the end. */
	size_t strings = 0;
	for (size_t i = 0; i < answer->length; i++)
		strings += answer->data[i] == '\0';
	if (answer->data[answer->length - 1] != '\0' || strings % 2 != 0) {
		errno = EBADMSG;
		return -1;
	}
	return 0;
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

static int close_from(unsigned int first)
{
#ifdef SYS_close_range
	if (syscall(SYS_close_range, first, ~0U, 0) == 0)
		return 0;
	if (errno != ENOSYS && errno != EPERM)
		return -1;
#endif
	struct rlimit limit; /* before Linux 5.9 */
	if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
		return -1;
	for (rlim_t fd = first; fd < limit.rlim_cur; fd++)
		(void)close((int)fd);
	return 0;
}

static int become(const struct credentials *as)
{
	if (setgroups((size_t)as->group_count, as->groups) < 0 || setresgid(as->gid, as->gid, as->gid) < 0 ||
	    setresuid(as->uid, as->uid, as->uid) < 0)
		return -1;
	/* No way back, whatever the kernel thinks of securebits and capabilities. */
	if (as->uid != 0 && (setuid(0) == 0 || seteuid(0) == 0)) {
		errno = EPERM;
		return -1;
	}
	return 0;
}

static void reset_signals(void)
{
	sigset_t none;

	/* Fails for SIGKILL, SIGSTOP and those of the C library, which need no reset. */
	for (int number = 1; number < NSIG; number++)
		(void)signal(number, SIG_DFL);
	(void)sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
}

/* slurmstepd is protected from the OOM killer and task 0 may be bound to one CPU: neither is for
 * the helper. Both are wishes: Slurm has mostly reset the first, the kernel keeps to the cpuset. */
static void reset_scheduling(void)
{
	static unsigned long all[CPU_LIMIT / (8 * sizeof(unsigned long))];
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	if (fd >= 0) {
		(void)!write(fd, "0", 1);
		(void)close(fd);
	}
	memset(all, 0xff, sizeof(all));
	(void)sched_setaffinity(0, sizeof(all), (cpu_set_t *)all);
}

/* Put the descriptors where the protocol wants them. */
static int place_fds(int socket, int lifeline, int log)
{
	/* First out of the way, as any of them may be where another one goes. */
	int null = open("/dev/null", O_RDWR);
	int from[] = { null, null, log, socket, lifeline >= 0 ? lifeline : null };

	if (null < 0)
		return -1;
	for (size_t i = 0; i < sizeof(from) / sizeof(from[0]); i++) {
		from[i] = fcntl(from[i], F_DUPFD, FIRST_FREE_FD);
		if (from[i] < 0)
			return -1;
	}
	for (int i = 0; i < FIRST_FREE_FD; i++) {
		if (dup2(from[i], i) < 0)
			return -1;
	}
	return close_from(FIRST_FREE_FD);
}

/* Nothing of the caller goes on but the cgroup, the limits and the user. */
static void execute(const char *verb, int socket, int lifeline, int log, const struct credentials *as)
{
	static const char start[] = "import sys; sys.path.insert(0, '" PENROOT_LIB "'); from pyxis_py.helper import main; main()";
	char *const argv[] = { PENROOT_PYTHON, "-IS", "-c", (char *)start, (char *)verb, NULL };
	char *const environ[] = { "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", NULL };
	const char *failed = "place file descriptors";

	reset_scheduling();
	if (place_fds(socket, lifeline, log) == 0) {
		reset_signals();
		(void)umask(022);
		failed = "become the user";
		if (!as || become(as) == 0) {
			failed = "chdir to /";
			if (chdir("/") == 0) {
				failed = "execute " PENROOT_PYTHON;
				(void)execve(PENROOT_PYTHON, argv, environ);
			}
		}
	}
	(void)dprintf(STDERR_FILENO, "cannot %s: %s\n", failed, strerror(errno));
	_exit(127);
}

static int wait_for(pid_t pid)
{
	while (waitpid(pid, NULL, 0) < 0) {
		if (errno == ECHILD) /* SIGCHLD is ignored, or somebody else waited */
			return 0;
		if (errno != EINTR)
			return -1;
	}
	return 0;
}

int coprocess_start(struct coprocess *process, const char *verb, int lifeline, const struct credentials *as, bool detached)
{
	int pair[2];

	*process = COPROCESS_NONE;
	process->log = (int)syscall(SYS_memfd_create, "penroot-log", 1U /* MFD_CLOEXEC */);
	if (process->log < 0)
		return -1;
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return -1;
	pid_t pid = fork();
	if (pid == 0) {
		/* Nobody's child: to the user's program it would be one that it never made. */
		if (detached && (setsid() < 0 || (pid = fork()) < 0))
			_exit(127);
		if (pid == 0)
			execute(verb, pair[1], lifeline, process->log, as);
		_exit(0);
	}
	(void)close(pair[1]);
	process->socket = pair[0];
	if (pid < 0)
		return -1;
	if (detached)
		return wait_for(pid);
	process->pid = pid;
	return 0;
}

int coprocess_wait(struct coprocess *process)
{
	pid_t pid = process->pid;

	process->pid = -1;
	return pid < 0 ? 0 : wait_for(pid);
}

int coprocess_watch(const struct coprocess *process)
{
	struct ucred peer;
	socklen_t size = sizeof(peer);

	if (getsockopt(process->socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0)
		return -1;
#ifdef SYS_pidfd_open
	return (int)syscall(SYS_pidfd_open, peer.pid, 0);
#else
	errno = ENOSYS;
	return -1;
#endif
}

int coprocess_wait_end(int pidfd)
{
	struct pollfd end = { .fd = pidfd, .events = POLLIN };

	while (poll(&end, 1, -1) < 0) {
		if (errno != EINTR)
			return -1;
	}
	return 0;
}

int coprocess_connect(const char *address, uid_t uid)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	size_t length = strlen(address);
	struct ucred peer;
	socklen_t peer_size = sizeof(peer);

	if (length == 0 || length >= sizeof(name.sun_path)) {
		errno = EADDRNOTAVAIL;
		return -1;
	}
	/* An abstract address begins with a NUL and has no final one: unix(7). */
	memcpy(name.sun_path + 1, address, length);
	cleanup(close_fd) int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -1;
	while (connect(fd, (struct sockaddr *)&name, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)) < 0) {
		if (errno != EINTR)
			return -1;
	}
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &peer_size) < 0)
		return -1;
	if (peer.uid != uid) {
		errno = EPERM;
		return -1;
	}
	int connected = fd;
	fd = -1;
	return connected;
}

bool coprocess_each_log_line(const struct coprocess *process, void (*print)(const char *line))
{
	char text[4096];
	char *rest = text;
	off_t end = process->log < 0 ? 0 : lseek(process->log, 0, SEEK_END);

	/* The end of it says why: a traceback has its message in the last line. */
	off_t from = end > (off_t)sizeof(text) - 1 ? end - (off_t)sizeof(text) + 1 : 0;
	ssize_t n = end > 0 ? pread(process->log, text, sizeof(text) - 1, from) : 0;
	if (n <= 0)
		return false;
	text[n] = '\0';
	for (char *line; (line = strsep(&rest, "\n"));) {
		if (*line)
			print(line);
	}
	return true;
}
