/* The Python process that decides: it is started, found again, waited for, and ended where it takes too long. */
#include "plugin.h"

#include "linux.h"

#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83 /* Linux 6.16 */
#endif

/* Which descriptors the process has: the first three, then its end of the socket and of the control socket; srun's has
 * the stderr of that instead. */
enum { SOCKET_FD = 3, CONTROL_FD = 4, FIRST_FREE_FD = 5, CPU_LIMIT = 8192 };
enum { LOG_SIZE = 64 << 10, LAST_WAIT = 1000 };

void coprocess_free(struct coprocess *process)
{
	close_fd(&process->socket);
	close_fd(&process->log);
	close_fd(&process->end);
}

int64_t in_milliseconds(int64_t milliseconds)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000 + milliseconds;
}

/* Whether a signal or a debugger has stopped a process: proc_pid_stat(5). */
bool is_stopped(pid_t pid)
{
	struct process_stat stat;

	return read_stat(pid, &stat) && (stat.state == 'T' || stat.state == 't');
}

/* The same of a coprocess: proc_pid_fdinfo(5). */
static bool is_coprocess_stopped(const struct coprocess *process)
{
	char path[64], text[1024];
	const char *at;

	(void)snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", process->end);
	if (process->end < 0 || read_file(path, text, sizeof(text)) < 0 || !(at = strstr(text, "\nPid:")))
		return false;
	return is_stopped(atoi(at + strlen("\nPid:")));
}

/* How long poll(2) waits at most. */
static int patience(int64_t until)
{
	if (until == FOREVER)
		return LOOK_MS;
	int64_t left = until - in_milliseconds(0);
	return left <= 0 ? 0 : left > INT_MAX ? INT_MAX : (int)left;
}

/* If the process is not our child, our socket may still be on its way to it, and nobody else would close that. */
int coprocess_await(const struct coprocess *process, int fd, short events)
{
	struct pollfd either[] = { { .fd = fd, .events = events }, { .fd = process->end, .events = POLLIN } };
	int ready, stopped = 0;

	do {
		/* Also of one that always has something to say. */
		int left = patience(process->until);
		ready = left ? poll(either, 2, left) : 0;
		if (ready == 0)
			stopped = is_coprocess_stopped(process) ? stopped + 1 : 0;
	} while ((ready < 0 && errno == EINTR) || (ready == 0 && process->until == FOREVER && stopped < LOOKS));
	/* What it has said before its end is here; nobody to whom it has left its socket says more. */
	if (ready > 0 && either[1].revents)
		(void)shutdown(process->socket, SHUT_RD);
	if (ready > 0 && either[0].revents)
		return 0;
	if (ready >= 0)
		errno = ready ? ECONNRESET : ETIMEDOUT;
	return -1;
}

/* Set another real group, which Python sets right later. Only root may look at memory or descriptors of a process that
 * executes a program so (ptrace(2); begin_new_exec() in the kernel's fs/exec.c): no other process of the user can control
 * this one, which may be in no job's cgroup. The user namespace of a job (Slurm 25.11) may lack nobody's number: another
 * group of the user is enough there, if the user has one. */
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

static int become(const struct credentials *as)
{
	if (set_groups(as) < 0 || setresuid(as->uid, as->uid, as->uid) < 0)
		return -1;
	/* No way back, whatever the kernel thinks of securebits and capabilities. */
	if (as->uid != 0 && (setuid(0) == 0 || seteuid(0) == 0)) {
		errno = EPERM;
		return -1;
	}
	return 0;
}

/* A process that tidies up ignores what Slurm sends to all processes of a step that it ends; SIGKILL follows. */
static void reset_signals(bool tidies_up)
{
	sigset_t none;

	/* Fails for SIGKILL, SIGSTOP and those of the C library, which need no reset. */
	for (int number = 1; number < NSIG; number++)
		(void)signal(number, tidies_up && number != SIGCHLD ? SIG_IGN : SIG_DFL);
	(void)sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
}

/* Undo slurmstepd's protection from the OOM killer and the binding of task 0 to CPUs, if possible. The cpuset stays. */
static void reset_scheduling(void)
{
	static unsigned long all[CPU_LIMIT / (8 * sizeof(unsigned long))];
	cleanup(close_fd) int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	if (fd >= 0)
		(void)!write(fd, "0", 1);
	memset(all, 0xff, sizeof(all));
	(void)sched_setaffinity(0, sizeof(all), (cpu_set_t *)all);
}

/* Put the descriptors where the protocol wants them. */
static int place_fds(int socket, int control, int log)
{
	/* First out of the way, as any of them may be where another one goes. */
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

/* End here where a call has failed. */
static void must(int log, int rc, const char *what)
{
	if (rc >= 0)
		return;
	(void)dprintf(log, "cannot %s: %s\n", what, strerror(errno));
	_exit(127);
}

/* Nothing of the caller goes on but the cgroup, the limits and the user. */
static void execute(const char *verb, int socket, int control, int log, const struct credentials *as)
{
	/* One line for what an installation can lack; a traceback would be of a bug. */
	static const char start[] = "import gc, sys\n"
				    "gc.disable()\n" /* until a pull, or the wait for others: what is imported is no garbage */
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
	/* Hooks and importers find programs where slurmd does: never where the job says. */
	const char *path = strcmp(verb, "check") ? getenv("PATH") : NULL;
	char search[PATH_MAX];
	char *const authorities = is_brought() ? "SSL_CERT_FILE=" SLURM_HERE "/etc/authorities.pem" : NULL;
	char *const environment[] = { search, "LC_ALL=C.UTF-8", authorities, NULL };

	if (!path || !*path || snprintf(search, sizeof(search), "PATH=%s", path) >= (int)sizeof(search))
		(void)snprintf(search, sizeof(search), "PATH=" DEFAULT_PATH);
	bool ahead = strcmp(verb, AHEAD) == 0;

	reset_scheduling();
	must(log, ahead ? setsid() : 0, "setsid");
	must(log, place_fds(socket, control, log), "place file descriptors");
	reset_signals(as && !ahead);
	(void)umask(022);
	must(STDERR_FILENO, as ? become(as) : 0, "become the user");
	must(STDERR_FILENO, chdir("/"), "chdir to /");
	(void)execve(argv[0], argv, environment);
	(void)dprintf(STDERR_FILENO, "cannot execute %s: %s\n", argv[0], strerror(errno));
	_exit(127);
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

int make_memory(const char *name, off_t size)
{
	cleanup(close_fd) int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0 || ftruncate(fd, size) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
		return -1;
	return keep_fd(&fd);
}

int coprocess_start(struct coprocess *process, const char *verb, int control, const struct credentials *as, bool detached)
{
	int pair[2];

	*process = COPROCESS_NONE;
	process->wary = as;
	process->log = make_memory("penroot-log", LOG_SIZE);
	if (process->log < 0 || make_pair(pair, process->wary) < 0)
		return -1;
	pid_t pid = fork();
	if (pid == 0) {
		/* Nobody's child: to the user's program it would be one that it never made. */
		if (detached) {
			must(process->log, setsid(), "fork");
			must(process->log, pid = fork(), "fork");
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
		process->end = linux_pidfd_open(pid);
		process->pid = pid;
		if (process->end >= 0)
			return 0;
		(void)kill(pid, SIGKILL);
	}
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
	return detached ? 0 : -1;
}

int coprocess_wait(const struct coprocess *process)
{
	struct pollfd end = { .fd = process->end, .events = POLLIN };
	bool in_time = coprocess_await(process, process->end, POLLIN) == 0 || poll(&end, 1, 0) > 0;

	if (!in_time) {
		(void)linux_pidfd_send_signal(process->end, SIGKILL);
		(void)poll(&end, 1, LAST_WAIT);
	}
	/* One that still waits for a file system that does not answer ends with that. */
	if (process->pid > 0)
		(void)waitpid(process->pid, NULL, WNOHANG);
	errno = ETIMEDOUT;
	return in_time ? 0 : -1;
}

int identify(pid_t pid, struct identity *who)
{
	struct process_stat stat;
	bool found = read_stat(pid, &stat);

	*who = (struct identity){ .pid = pid, .started = stat.started };
	errno = ESRCH;
	return found ? 0 : -1;
}

static int open_process(const struct identity *who)
{
	cleanup(close_fd) int fd = linux_pidfd_open(who->pid);
	if (fd < 0)
		return -1;
	struct process_stat now;
	struct pollfd end = { .fd = fd, .events = POLLIN };
	if ((read_stat(who->pid, &now) && now.started != who->started) || poll(&end, 1, 0) > 0) {
		errno = ESRCH;
		return -1;
	}
	return keep_fd(&fd);
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

	*c = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int)) };
	memcpy(CMSG_DATA(c), &fd, sizeof(int));
	while (sendmsg(control, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
		if (errno == EAGAIN && coprocess_await(process, control, POLLOUT) == 0)
			continue;
		if (errno != EINTR)
			return -1;
	}
	return 0;
}

int coprocess_connect(struct coprocess *process, int control, const struct identity *who, int64_t until, bool wary)
{
	int pair[2];

	*process = (struct coprocess){ .socket = -1, .log = -1, .pid = -1, .until = until, .wary = wary };
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
