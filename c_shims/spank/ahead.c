/* Start the helper before the first task. The task uses this helper only if the helper has the attributes that a child of the task
 * would inherit. After the start of the helper, slurmstepd may have joined namespaces, and PAM may have changed the keyring, audit
 * session or security context of slurmstepd. See README.md. */
#include "plugin.h"

#include "linux.h"

#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define SESSION_KEYRING (-3) /* KEY_SPEC_SESSION_KEYRING of keyctl(2) */
#define KEYCTL_GET_KEYRING_ID 0

/* How long to wait for the end of a killed process, and before the next try to kill a process that has not become the user yet. */
enum { KILLED_WAIT_MS = 1000, RETRY_MS = 10 };

/* Describe attributes that a child inherits from this process: namespaces, priority, session keyring, security context and audit
 * session. */
static void describe(char text[INHERITED_SIZE])
{
	static const char *const files[] = { "attr/current", "loginuid", "sessionid" };
	static const char *const links[] = { "mnt", "user", "pid_for_children", "net", "ipc", "uts", "cgroup", "time_for_children" };
	char path[64], value[256];
	size_t length = 0;

	for (size_t i = 0; i < LENGTH(links); i++) {
		struct stat info = { 0 };
		(void)snprintf(path, sizeof(path), "/proc/self/ns/%s", links[i]);
		(void)stat(path, &info);
		length += (size_t)snprintf(text + length, INHERITED_SIZE - length, "%lu ", (unsigned long)info.st_ino);
	}
	length += (size_t)snprintf(text + length, INHERITED_SIZE - length, "%d %ld ", getpriority(PRIO_PROCESS, 0),
				   syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, SESSION_KEYRING, 0));
	for (size_t i = 0; i < LENGTH(files); i++) {
		(void)snprintf(path, sizeof(path), "/proc/self/%s", files[i]);
		if (read_file(path, value, sizeof(value)) < 0)
			value[0] = '\0';
		length += (size_t)snprintf(text + length, INHERITED_SIZE - length, "%s ", value);
	}
}

/* In slurmstepd, as root: start the helper. If this fails, the first task starts a helper, and prints an error if it cannot. */
void start_ahead(struct step *step)
{
	struct ahead *ahead = &step->ahead;
	struct process_stat stat;

	if (step->job.uid == 0 || helper_start(&ahead->process, AHEAD, step->control[1], &step->job, false) < 0)
		return;
	close_fd(&ahead->process.socket); /* requests come by the control socket */
	if (!read_stat(ahead->process.pid, &stat))
		(void)end_ahead(step);
	ahead->who = (struct identity){ .pid = ahead->process.pid, .started = stat.started };
	describe(ahead->inherited);
}

/* In slurmstepd, as root: move the helper into the cgroups of the first task, which still waits for slurmstepd. The helper is our
 * child, so no other process can have its PID. Only root can move the helper again. */
void place_ahead(struct step *step, pid_t task)
{
	struct shared *shared = step->shared;
	pid_t pid = step->ahead.who.pid;
	char now[CGROUPS_SIZE];

	if (step->ahead.process.pidfd < 0)
		return;
	if (cgroup_read(task, shared->cgroups, sizeof(shared->cgroups)) < 0 || cgroup_move(pid, shared->cgroups) < 0 ||
	    cgroup_read(pid, now, sizeof(now)) < 0 || strcmp(now, shared->cgroups) != 0)
		(void)end_ahead(step);
	else
		shared->placed = true;
}

/* Kill the helper, and wait until it accepts no more messages. Returns whether it is gone. A task cannot kill the helper while the
 * helper is still root, so this function retries. */
bool end_ahead(struct step *step)
{
	struct helper *process = &step->ahead.process;
	struct pollfd end = { .fd = process->pidfd, .events = POLLIN };
	int64_t deadline = deadline_in_ms(KILLED_WAIT_MS);
	bool gone = process->pidfd < 0;

	while (!gone && deadline_in_ms(0) < deadline)
		gone = poll(&end, 1, linux_pidfd_send_signal(process->pidfd, SIGKILL) < 0 ? RETRY_MS : KILLED_WAIT_MS) > 0;
	if (process->pid > 0)
		(void)waitpid(process->pid, NULL, WNOHANG);
	helper_free(process);
	return gone;
}

/* Check whether two tasks of a step are in the same cgroups, apart from the number of the task. */
static bool are_same_cgroups(const char *one, const char *other)
{
	while (*one && *one == *other) {
		bool is_task = has_prefix(one, "/task_") && has_prefix(other, "/task_");
		size_t length = is_task ? strlen("/task_") : 1;
		one += length + (is_task ? strspn(one + length, "0123456789") : 0);
		other += length + (is_task ? strspn(other + length, "0123456789") : 0);
	}
	return *one == *other;
}

/* Check whether the helper that slurmstepd has started has the attributes that a child of this task would inherit. */
static bool fits(struct step *step)
{
	char inherited[INHERITED_SIZE], cgroups[CGROUPS_SIZE];

	describe(inherited);
	return step->shared->placed && strcmp(inherited, step->ahead.inherited) == 0 &&
	       cgroup_read(getpid(), cgroups, sizeof(cgroups)) == 0 && are_same_cgroups(cgroups, step->shared->cgroups);
}

/* In the task that starts the container, as the user: connect to the helper. Returns 0; NO_ANSWER if the helper is gone or does not
 * fit, so that the task must start another helper; -1 if the helper cannot be killed, and so could receive messages of the task. */
int take_ahead(struct step *step, struct helper *process)
{
	struct ahead *ahead = &step->ahead;
	bool first = !atomic_exchange(&step->shared->taken, true);

	if (first && ahead->process.pidfd >= 0 && fits(step) &&
	    helper_connect(process, step->control[0], &ahead->who, FOREVER, false) == 0) {
		process->log = release_fd(&ahead->process.log);
		return 0;
	}
	helper_free(process);
	return end_ahead(step) ? NO_ANSWER :
				 fail(step, "cannot kill the helper process that slurmstepd has started: submit the job again");
}
