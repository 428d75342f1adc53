/* Start the helper, pyxis_py/helper.py, or connect to a running one; wait for it, and kill it after a deadline. */
#include "plugin.h"

#include "linux.h"

#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83 /* Linux 6.16 */
#endif

/* Descriptors of the process: 0 to 2, its end of the socket, its end of the control socket. The process `check` has no control
 * socket: this descriptor is the stderr of the command. */
enum { SOCKET_FD = 3, CONTROL_FD = 4, FIRST_FREE_FD = 5 };
enum { MAX_CPUS = 8192, LOG_BYTES = 64 << 10, KILLED_WAIT_MS = 1000 };

void helper_free(struct helper *process)
{
	close_fd(&process->socket);
	close_fd(&process->log);
	close_fd(&process->pidfd);
}

int64_t deadline_in_ms(int64_t milliseconds)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000 + milliseconds;
}

bool is_stopped(pid_t pid)
{
	struct process_stat stat;

	return read_stat(pid, &stat) && (stat.state == 'T' || stat.state == 't');
}

/* Check whether a helper is stopped, by its pidfd. proc_pid_fdinfo(5) gives the process id. */
static bool is_helper_stopped(const struct helper *process)
{
	char path[64], text[1024];
	const char *at;

	(void)snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", process->pidfd);
	if (process->pidfd < 0 || read_file(path, text, sizeof(text)) < 0 || !(at = strstr(text, "\nPid:")))
		return false;
	return is_stopped(atoi(at + strlen("\nPid:")));
}

/* Return the timeout for poll(2). */
static int poll_timeout_ms(int64_t deadline)
{
	if (deadline == FOREVER)
		return POLL_INTERVAL_MS;
	int64_t left = deadline - deadline_in_ms(0);
	return left <= 0 ? 0 : left > INT_MAX ? INT_MAX : (int)left;
}

/* Watch the pidfd too: a process may end before it has received our socket, and then nothing closes that socket. */
int helper_await(const struct helper *process, int fd, short events)
{
	struct pollfd either[] = { { .fd = fd, .events = events }, { .fd = process->pidfd, .events = POLLIN } };
	int ready, stopped = 0;

	do {
		/* The deadline also holds for a process that never stops writing. */
		int left = poll_timeout_ms(process->deadline);
		ready = left ? poll(either, 2, left) : 0;
		if (ready == 0)
			stopped = is_helper_stopped(process) ? stopped + 1 : 0;
	} while ((ready < 0 && errno == EINTR) || (ready == 0 && process->deadline == FOREVER && stopped < MAX_STOPPED_POLLS));
	/* The process has ended, so all its output has arrived. Accept nothing from other holders of its socket. */
	if (ready > 0 && either[1].revents)
		(void)shutdown(process->socket, SHUT_RD);
	if (ready > 0 && either[0].revents)
		return 0;
	return ready < 0 ? -1 : set_errno(ready ? ECONNRESET : ETIMEDOUT);
}

/* Set a real group that differs from the effective group. Python corrects the real group later. When a process with such groups
 * executes a program, only root may look at the memory or descriptors of the process (ptrace(2); begin_new_exec() in the kernel's
 * fs/exec.c). The process may be outside of every job's cgroup: no other process of the user may control it. The user namespace of a
 * job (Slurm 25.11) may lack group 65534. Then another group of the user is enough, if there is one. */
static int set_groups(const struct credentials *as)
{
	gid_t nobody = as->gid == 65534 ? 65533 : 65534;

	if (setgroups((size_t)as->group_count, as->groups) < 0)
		return -1;
	if (setresgid(nobody, as->gid, as->gid) == 0)
		return 0;
	if (errno != EINVAL)
		return -1;
	for (int i = 0; i < as->group_count; i++) {
		if (as->groups[i] != as->gid && setresgid(as->groups[i], as->gid, as->gid) == 0)
			return 0;
	}
	return setresgid(as->gid, as->gid, as->gid);
}

static int become_user(const struct credentials *as)
{
	if (set_groups(as) < 0 || setresuid(as->uid, as->uid, as->uid) < 0)
		return -1;
	/* Make sure that the process cannot become root again, whatever its securebits and capabilities are. */
	return as->uid != 0 && (setuid(0) == 0 || seteuid(0) == 0) ? set_errno(EPERM) : 0;
}

/* Reset the actions of signals. A process that cleans up ignores all signals except SIGCHLD: Slurm sends signals to all processes of a
 * step before SIGKILL. */
static void reset_signals(bool cleans_up)
{
	sigset_t none;

	/* This fails for SIGKILL, SIGSTOP and signals of the C library, which need no reset. */
	for (int number = 1; number < NSIG; number++)
		(void)signal(number, cleans_up && number != SIGCHLD ? SIG_IGN : SIG_DFL);
	(void)sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
}

/* Undo what this process inherits, if possible: slurmstepd's protection from the OOM killer, and task 0's binding to CPUs. The
 * cpuset stays. */
static void reset_scheduling(void)
{
	static unsigned long all[MAX_CPUS / (8 * sizeof(unsigned long))];
	cleanup(close_fd) int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	if (fd >= 0)
		(void)!write(fd, "0", 1);
	memset(all, 0xff, sizeof(all));
	(void)sched_setaffinity(0, sizeof(all), (cpu_set_t *)all);
}

/* Give the descriptors their numbers: README.md, The process. */
static int place_fds(int socket, int control, int log)
{
	/* Move all descriptors to free numbers first: one of them may have the final number of another. */
	int null = open("/dev/null", O_RDWR);
	int from[FIRST_FREE_FD] = { null, null, log, [SOCKET_FD] = socket, [CONTROL_FD] = control >= 0 ? control : null };

	for (int i = 0; i < FIRST_FREE_FD; i++) {
		from[i] = fcntl(from[i], F_DUPFD, FIRST_FREE_FD);
		if (from[i] < 0)
			return -1;
	}
	for (int i = 0; i < FIRST_FREE_FD; i++) {
		if (dup2(from[i], i) < 0)
			return -1;
	}
	return linux_close_range(FIRST_FREE_FD, ~0U, 0);
}

/* Print the reason and exit if a call has failed. */
static void exit_on_error(int log, int rc, const char *action)
{
	if (rc >= 0)
		return;
	(void)dprintf(log, "cannot %s: %s\n", action, strerror(errno));
	_exit(127);
}

/* Execute Python with new descriptors, signal actions, CPUs, umask, cwd and environment. With `as`, become this user. */
static void execute(const char *verb, int socket, int control, int log, const struct credentials *as)
{
	/* For an incomplete installation, print one line. Only a bug prints a traceback. */
	static const char start[] = "import gc, sys\n"
				    "gc.disable()\n" /* imports make no garbage; a pull, and the wait for requests, enable gc again */
				    "sys.path.insert(0, sys.argv[2])\n"
				    "try:\n"
				    "    import pyxis_py\n"
				    "    from enroot_py.base import pack\n"
				    "    pack.load(sys.argv[1])\n"
				    "    from pyxis_py.helper import main\n"
				    "except (ImportError, OSError) as e:\n"
				    "    sys.exit(f'{sys.executable} cannot load penroot from {sys.path[0]}: {e}')\n"
				    "main()\n";
	char *const argv[] = { (char *)interpreter(), "-IS", "-c", (char *)start, (char *)verb, (char *)library(), NULL };
	/* Hooks and importers search slurmd's PATH for programs. `check` uses a default PATH. The job's PATH is never used to find
	 * programs. */
	const char *path = strcmp(verb, "check") ? getenv("PATH") : NULL;
	char search[PATH_MAX];
	char *const authorities = is_in_container() ? "SSL_CERT_FILE=" SLURM_HERE "/etc/authorities.pem" : NULL;
	char *const environment[] = { search, "LC_ALL=C.UTF-8", authorities, NULL };

	if (!path || !*path || snprintf(search, sizeof(search), "PATH=%s", path) >= (int)sizeof(search))
		(void)snprintf(search, sizeof(search), "PATH=" DEFAULT_PATH);
	bool ahead = strcmp(verb, AHEAD) == 0;

	reset_scheduling();
	exit_on_error(log, ahead ? setsid() : 0, "setsid");
	exit_on_error(log, place_fds(socket, control, log), "place file descriptors");
	reset_signals(as && !ahead);
	(void)umask(022);
	exit_on_error(STDERR_FILENO, as ? become_user(as) : 0, "become the user");
	exit_on_error(STDERR_FILENO, chdir("/"), "chdir to /");
	(void)execve(argv[0], argv, environment);
	(void)dprintf(STDERR_FILENO, "cannot execute %s: %s\n", argv[0], strerror(errno));
	_exit(127);
}

/* Create a pair of sockets. Let the kernel accept no descriptors from an untrusted process: this process would have to close them,
 * and to close a socket(7) with SO_LINGER takes as long as its owner likes. The option SO_PASSRIGHTS needs Linux 6.16. */
static int make_pair(int pair[2], bool is_untrusted)
{
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return -1;
	if (is_untrusted)
		(void)setsockopt(pair[0], SOL_SOCKET, SO_PASSRIGHTS, &(int){ 0 }, sizeof(int));
	return 0;
}

int make_memory(const char *name, off_t size)
{
	cleanup(close_fd) int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0 || ftruncate(fd, size) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
		return -1;
	return release_fd(&fd);
}

int helper_start(struct helper *process, const char *verb, int control, const struct credentials *as, bool detached)
{
	int pair[2];

	*process = HELPER_NONE;
	process->is_untrusted = as;
	process->log = make_memory("penroot-log", LOG_BYTES);
	if (process->log < 0 || make_pair(pair, process->is_untrusted) < 0)
		return -1;
	pid_t pid = fork();
	if (pid == 0) {
		/* The user's program must not find a child that it did not start. */
		if (detached) {
			exit_on_error(process->log, setsid(), "setsid");
			exit_on_error(process->log, pid = fork(), "fork");
		}
		if (pid == 0)
			execute(verb, pair[1], control, process->log, as);
		_exit(0);
	}
	(void)close(pair[1]);
	process->socket = pair[0];
	if (pid < 0)
		return -1;
	if (!detached) {
		process->pidfd = linux_pidfd_open(pid);
		process->pid = pid;
		if (process->pidfd >= 0)
			return 0;
		(void)kill(pid, SIGKILL);
	}
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
	return detached ? 0 : -1;
}

int helper_wait(const struct helper *process)
{
	struct pollfd end = { .fd = process->pidfd, .events = POLLIN };
	bool in_time = helper_await(process, process->pidfd, POLLIN) == 0 || poll(&end, 1, 0) > 0;

	if (!in_time) {
		(void)linux_pidfd_send_signal(process->pidfd, SIGKILL);
		(void)poll(&end, 1, KILLED_WAIT_MS);
	}
	/* Do not wait longer: a process blocked in a file system ends only when the file system answers. */
	if (process->pid > 0)
		(void)waitpid(process->pid, NULL, WNOHANG);
	return in_time ? 0 : set_errno(ETIMEDOUT);
}

static int open_process(const struct identity *who)
{
	cleanup(close_fd) int fd = linux_pidfd_open(who->pid);
	if (fd < 0)
		return -1;
	struct process_stat now;
	struct pollfd end = { .fd = fd, .events = POLLIN };
	bool is_gone = (read_stat(who->pid, &now) && now.started != who->started) || poll(&end, 1, 0) > 0;
	return is_gone ? set_errno(ESRCH) : release_fd(&fd);
}

/* Send one descriptor. Waits until there is room. Fails if the process is gone or the deadline is over. */
static int send_fd(const struct helper *process, int control, int fd)
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

	*c = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int)) };
	memcpy(CMSG_DATA(c), &fd, sizeof(int));
	while (sendmsg(control, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
		if (errno == EAGAIN && helper_await(process, control, POLLOUT) == 0)
			continue;
		if (errno != EINTR)
			return -1;
	}
	return 0;
}

int helper_connect(struct helper *process, int control, const struct identity *who, int64_t deadline, bool is_untrusted)
{
	int pair[2];

	*process = (struct helper){ .socket = -1, .log = -1, .pid = -1, .deadline = deadline, .is_untrusted = is_untrusted };
	process->pidfd = open_process(who);
	if (process->pidfd < 0 || make_pair(pair, is_untrusted) < 0)
		return -1;
	process->socket = pair[0];
	int rc = send_fd(process, control, pair[1]);
	int error = errno;
	(void)close(pair[1]);
	errno = error;
	return rc;
}
