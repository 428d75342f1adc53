#define _GNU_SOURCE
#include "coprocess.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
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
#include <sys/wait.h>
#include <time.h>

#ifndef F_ADD_SEALS
#include <linux/fcntl.h>
#endif
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424 /* on every architecture, Linux 5.1 */
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* on every architecture, Linux 5.3 */
#endif
#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83 /* Linux 6.16 */
#endif
#ifndef PENROOT_PYTHON
#error "PENROOT_PYTHON: absolute path of the interpreter"
#endif
#ifndef PENROOT_LIB
#error "PENROOT_LIB: directory that holds pyxis_py and enroot_py"
#endif

enum { SOCKET_FD = 3, CONTROL_FD = 4, FIRST_FREE_FD = 5, CPU_LIMIT = 8192 };
enum { LOG_SIZE = 64 << 10, LAST_WAIT = 1000 };

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
	close_fd(&process->end);
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

int64_t in_milliseconds(int64_t milliseconds)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000 + milliseconds;
}

/* What poll(2) is to wait at most. */
static int patience(int64_t until)
{
	if (until == FOREVER)
		return -1;
	int64_t left = until - in_milliseconds(0);
	return left <= 0 ? 0 : left > INT_MAX ? INT_MAX : (int)left;
}

/* Wait until `fd` is ready for `events`. ECONNRESET where the process ends first: of one that is not our child the
 * socket may be on its way to it, and then nobody else closes that. */
static int await(const struct coprocess *process, int fd, short events)
{
	struct pollfd either[] = { { .fd = fd, .events = events }, { .fd = process->end, .events = POLLIN } };
	int ready;

	do {
		/* Also of one that always has something to say. */
		int left = patience(process->until);
		ready = left ? poll(either, 2, left) : 0;
	} while (ready < 0 && errno == EINTR);
	/* What it has said before its end is here; nobody to whom it has left its socket says more. */
	if (ready > 0 && either[1].revents)
		(void)shutdown(process->socket, SHUT_RD);
	if (ready > 0 && either[0].revents)
		return 0;
	if (ready >= 0)
		errno = ready ? ECONNRESET : ETIMEDOUT;
	return -1;
}

int request_send(const struct request *request, const struct coprocess *process)
{
	for (size_t sent = 0; sent < request->length;) {
		ssize_t n = send(process->socket, request->data + sent, request->length - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n >= 0)
			sent += (size_t)n;
		else if (errno == EAGAIN ? await(process, process->socket, POLLOUT) < 0 : errno != EINTR)
			return -1;
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

static int receive_exactly(struct answer *answer, const struct coprocess *process, void *to, size_t length)
{
	while (length > 0) {
		if (await(process, process->socket, POLLIN) < 0)
			return -1;
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
		ssize_t n = recvmsg(process->socket, &header, MSG_CMSG_CLOEXEC);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -1;
		if (!process->wary && keep_fds(answer, &header) < 0)
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
	uint32_t length;

	*answer = (struct answer){ 0 };
	if (receive_exactly(answer, process, &length, sizeof(length)) < 0)
		return -1;
	answer->length = le32toh(length);
	if (answer->length == 0 || answer->length > (process->wary ? WARY_LIMIT : MESSAGE_LIMIT)) {
		errno = EBADMSG;
		return -1;
	}
	answer->data = malloc(answer->length);
	if (!answer->data)
		return -1;
	if (receive_exactly(answer, process, answer->data, answer->length) < 0)
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

/* Its real group is another one until it sets that right itself: of a process that executes a program as such nobody but
 * root looks at memory or descriptors (ptrace(2); begin_new_exec() in the kernel's fs/exec.c), so no other process of the
 * user can make this one, which may be in no job's cgroup, do what he wants. */
static int become(const struct credentials *as)
{
	gid_t nobody = as->gid == 65534 ? 65533 : 65534;

	if (setgroups((size_t)as->group_count, as->groups) < 0 || setresgid(nobody, as->gid, as->gid) < 0 ||
	    setresuid(as->uid, as->uid, as->uid) < 0)
		return -1;
	/* No way back, whatever the kernel thinks of securebits and capabilities. */
	if (as->uid != 0 && (setuid(0) == 0 || seteuid(0) == 0)) {
		errno = EPERM;
		return -1;
	}
	return 0;
}

/* What root has started to tidy up does that in its time: what Slurm sends to all processes of a step that it ends is for
 * programs, and SIGKILL follows. */
static void reset_signals(bool tidies_up)
{
	static const int ignored[] = { SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 };
	sigset_t none;

	/* Fails for SIGKILL, SIGSTOP and those of the C library, which need no reset. */
	for (int number = 1; number < NSIG; number++)
		(void)signal(number, SIG_DFL);
	for (size_t i = 0; tidies_up && i < sizeof(ignored) / sizeof(ignored[0]); i++)
		(void)signal(ignored[i], SIG_IGN);
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
static int place_fds(int socket, int control, int log)
{
	/* First out of the way, as any of them may be where another one goes. */
	int null = open("/dev/null", O_RDWR);
	int from[] = { null, null, log, socket, control >= 0 ? control : null };

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
static void execute(const char *verb, int socket, int control, int log, const struct credentials *as)
{
	/* One line for what an installation can lack; a traceback would be of a bug. */
	static const char start[] =
		"import sys\n"
		"sys.path.insert(0, '" PENROOT_LIB "')\n"
		"try:\n"
		"    from pyxis_py.helper import main\n"
		"except (ImportError, OSError) as e:\n"
		"    sys.exit(f'" PENROOT_PYTHON " cannot load penroot from " PENROOT_LIB ": {e}')\n"
		"main()\n";
	char *const argv[] = { PENROOT_PYTHON, "-IS", "-c", (char *)start, (char *)verb, NULL };
	/* Hooks and importers find programs where slurmd does: never where the job says. */
	const char *path = strcmp(verb, "check") ? getenv("PATH") : NULL;
	char search[PATH_MAX];
	char *const environ[] = { search, "LC_ALL=C.UTF-8", NULL };
	const char *failed = "place file descriptors";

	if (!path || !*path || snprintf(search, sizeof(search), "PATH=%s", path) >= (int)sizeof(search))
		(void)snprintf(search, sizeof(search), "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
	reset_scheduling();
	if (place_fds(socket, control, log) == 0) {
		log = STDERR_FILENO;
		reset_signals(as);
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
	(void)dprintf(log, "cannot %s: %s\n", failed, strerror(errno));
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

/* A pair of sockets. Where we are wary, the kernel takes no descriptors for us: one that is thrown away is closed by us,
 * and a socket(7) with SO_LINGER lasts as long as its owner likes. Before Linux 6.16 there is no such option. */
static int make_pair(int pair[2], bool wary)
{
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return -1;
	if (wary)
		(void)setsockopt(pair[0], SOL_SOCKET, SO_PASSRIGHTS, &(int){ 0 }, sizeof(int));
	return 0;
}

int coprocess_start(struct coprocess *process, const char *verb, int control, const struct credentials *as, bool detached)
{
	int pair[2];

	*process = COPROCESS_NONE;
	process->wary = as;
	/* Of this size for good: it is memory, and nobody's. */
	process->log = (int)syscall(SYS_memfd_create, "penroot-log", 3U /* MFD_CLOEXEC | MFD_ALLOW_SEALING */);
	if (process->log < 0 || ftruncate(process->log, LOG_SIZE) < 0 ||
	    fcntl(process->log, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
		return -1;
	if (make_pair(pair, process->wary) < 0)
		return -1;
	pid_t pid = fork();
	if (pid == 0) {
		/* Nobody's child: to the user's program it would be one that it never made. */
		if (detached && (setsid() < 0 || (pid = fork()) < 0)) {
			(void)dprintf(process->log, "cannot fork: %s\n", strerror(errno));
			_exit(127);
		}
		if (pid == 0)
			execute(verb, pair[1], control, process->log, as);
		_exit(0);
	}
	(void)close(pair[1]);
	process->socket = pair[0];
	if (pid < 0)
		return -1;
	if (detached)
		return wait_for(pid);
	process->pid = pid;
	process->end = (int)syscall(SYS_pidfd_open, pid, 0);
	return 0;
}

int coprocess_wait(struct coprocess *process)
{
	pid_t pid = process->pid;
	bool killed = false;

	process->pid = -1;
	if (pid < 0)
		return 0;
	if (process->until == FOREVER)
		return wait_for(pid);
	while (waitpid(pid, NULL, WNOHANG) == 0) {
		int left = patience(process->until);
		if (left == 0 && killed)
			break; /* it waits for a file system that does not answer, and ends with that */
		if (left == 0) {
			(void)kill(pid, SIGKILL);
			process->until = in_milliseconds(LAST_WAIT);
			killed = true;
			continue;
		}
		/* Without pidfd_open(2), a short sleep. */
		struct pollfd end = { .fd = process->end, .events = POLLIN };
		(void)poll(&end, 1, left < 20 ? left : 20);
	}
	errno = ETIMEDOUT;
	return killed ? -1 : 0;
}

/* When a process began; 0 where it is gone, or /proc hides it from us. */
static unsigned long long started(pid_t pid)
{
	unsigned long long ticks = 0;
	char path[32], line[1024];

	(void)snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	cleanup(close_fd) int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, line, sizeof(line) - 1);
	if (n <= 0)
		return 0;
	line[n] = '\0';
	/* The 22nd field; the name of the program, in parentheses, may hold anything. */
	const char *at = strrchr(line, ')');
	for (int field = 2; at && field < 22; field++)
		at = strchr(at + 1, ' ');
	if (at)
		ticks = strtoull(at, NULL, 10);
	return ticks;
}

static int open_process(const struct identity *who)
{
	cleanup(close_fd) int fd = (int)syscall(SYS_pidfd_open, who->pid, 0);
	if (fd < 0)
		return -1;
	unsigned long long began = started(who->pid);
	struct pollfd end = { .fd = fd, .events = POLLIN };
	if ((began && began != who->started) || poll(&end, 1, 0) > 0) {
		errno = ESRCH;
		return -1;
	}
	int process = fd;
	fd = -1;
	return process;
}

int coprocess_wait_end(const struct coprocess *process)
{
	struct pollfd end = { .fd = process->end, .events = POLLIN };

	if (await(process, process->end, POLLIN) == 0 || poll(&end, 1, 0) > 0)
		return 0;
	int why = errno;
	(void)syscall(SYS_pidfd_send_signal, process->end, SIGKILL, NULL, 0);
	(void)poll(&end, 1, LAST_WAIT);
	errno = why;
	return -1;
}

/* Send one descriptor; it waits until there is room, or the process is gone. */
static int send_fd(const struct coprocess *process, int control, int fd)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} rights = { 0 };
	struct iovec iov = { .iov_base = "", .iov_len = 1 };
	struct msghdr header = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = rights.bytes,
		.msg_controllen = sizeof(rights.bytes),
	};
	struct cmsghdr *c = CMSG_FIRSTHDR(&header);

	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(c), &fd, sizeof(int));
	while (sendmsg(control, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
		if (errno == EAGAIN && await(process, control, POLLOUT) == 0)
			continue;
		if (errno != EINTR)
			return -1;
	}
	return 0;
}

int coprocess_connect(struct coprocess *process, int control, const struct identity *who, int64_t until, bool wary)
{
	int pair[2];

	*process = COPROCESS_NONE;
	process->wary = wary;
	process->until = until;
	process->end = open_process(who);
	if (process->end < 0 || make_pair(pair, wary) < 0)
		return -1;
	process->socket = pair[0];
	int rc = send_fd(process, control, pair[1]);
	int why = errno;
	(void)close(pair[1]);
	errno = why;
	return rc;
}

bool coprocess_each_log_line(const struct coprocess *process, void (*print)(const char *line))
{
	char text[4096];
	char *rest = text;
	/* How far it has written: the offset is of the file that we share. */
	off_t end = process->log < 0 ? 0 : lseek(process->log, 0, SEEK_CUR);

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
