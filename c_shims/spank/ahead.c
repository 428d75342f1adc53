/* Start the helper before the first task, which uses the helper if it is what a child of the task would be: slurmstepd may
 * have joined namespaces since, and PAM may have changed its keyring, audit session or context. See README.md. */
#include "plugin.h"

#include "linux.h"

#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define SESSION_KEYRING (-3) /* KEY_SPEC_SESSION_KEYRING of keyctl(2) */
#define KEYCTL_GET_KEYRING_ID 0

/* Milliseconds: a killed process has to end, and one that root has started becomes the user. */
enum { LAST_WAIT = 1000, MOMENT = 10 };

/* What a child has of this process, beyond the user, his groups and the cgroups. */
static void describe(char text[INHERITED_SIZE])
{
	static const char *const files[] = { "attr/current", "loginuid", "sessionid" };
	static const char *const links[] = { "mnt", "user", "pid_for_children", "net", "ipc", "uts", "cgroup", "time_for_children" };
	char path[64], found[256];
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
		if (read_file(path, found, sizeof(found)) < 0)
			found[0] = '\0';
		length += (size_t)snprintf(text + length, INHERITED_SIZE - length, "%s ", found);
	}
}

/* In slurmstepd, as root. Where it cannot be started the first task says why. */
void start_ahead(struct step *step)
{
	struct ahead *ahead = &step->ahead;

	if (step->job.uid == 0 || coprocess_start(&ahead->process, AHEAD, step->control[1], &step->job, false) < 0)
		return;
	close_fd(&ahead->process.socket); /* what asks comes by the control socket */
	if (identify(ahead->process.pid, &ahead->who) < 0)
		(void)end_ahead(step);
	describe(ahead->inherited);
}

/* In slurmstepd, as root, when a task is in its cgroups and before it goes on. The process is our child, so its number is
 * that of no other one, and nobody but root moves it again. */
void place_ahead(struct step *step, pid_t task)
{
	struct shared *shared = step->shared;
	pid_t pid = step->ahead.who.pid;
	char now[CGROUPS_SIZE];

	if (step->ahead.process.end < 0)
		return;
	if (cgroup_read(task, shared->cgroups, sizeof(shared->cgroups)) < 0 || cgroup_move(pid, shared->cgroups) < 0 ||
	    cgroup_read(pid, now, sizeof(now)) < 0 || strcmp(now, shared->cgroups) != 0)
		(void)end_ahead(step);
	else
		shared->placed = true;
}

/* Kill it, and wait until it takes no message any more: whether it is gone. It may have yet to become the user. */
bool end_ahead(struct step *step)
{
	struct coprocess *process = &step->ahead.process;
	struct pollfd end = { .fd = process->end, .events = POLLIN };
	int64_t until = in_milliseconds(LAST_WAIT);
	bool gone = process->end < 0;

	while (!gone && in_milliseconds(0) < until)
		gone = poll(&end, 1, linux_pidfd_send_signal(process->end, SIGKILL) < 0 ? MOMENT : LAST_WAIT) > 0;
	if (process->pid > 0)
		(void)waitpid(process->pid, NULL, WNOHANG);
	coprocess_free(process);
	return gone;
}

/* Whether two tasks of a step are in the same groups, but for their own ones. */
static bool are_neighbours(const char *one, const char *other)
{
	static const char of_task[] = "/task_";

	while (*one && *one == *other) {
		bool own = strncmp(one, of_task, sizeof(of_task) - 1) == 0 && strncmp(other, of_task, sizeof(of_task) - 1) == 0;
		one += own ? sizeof(of_task) - 1 : 1;
		other += own ? sizeof(of_task) - 1 : 1;
		if (own) {
			one += strspn(one, "0123456789");
			other += strspn(other, "0123456789");
		}
	}
	return *one == *other;
}

/* Whether what has started in slurmstepd is what a child of this task would be. */
static bool fits(struct step *step)
{
	char inherited[INHERITED_SIZE], cgroups[CGROUPS_SIZE];

	describe(inherited);
	return step->shared->placed && strcmp(inherited, step->ahead.inherited) == 0 &&
	       cgroup_read(getpid(), cgroups, sizeof(cgroups)) == 0 && are_neighbours(cgroups, step->shared->cgroups);
}

/* In the task that starts the container, as the user: connect to it. Returns 0; SILENT where the task is to start one, as
 * it is gone or does not fit; -1 where it cannot be ended, and would hear what is for the other one. */
int take_ahead(struct step *step, struct coprocess *process)
{
	struct ahead *ahead = &step->ahead;
	bool first = !atomic_exchange(&step->shared->taken, true);

	if (first && ahead->process.end >= 0 && fits(step) &&
	    coprocess_connect(process, step->control[0], &ahead->who, FOREVER, false) == 0) {
		process->log = keep_fd(&ahead->process.log);
		return 0;
	}
	coprocess_free(process);
	return end_ahead(step) ? SILENT :
				 fail(step, "the helper process that slurmstepd has started cannot be ended: submit the job again");
}
