/* penroot-init: a process that holds namespaces. It ends when the pipe at stdin closes.
 *
 *   penroot-init        Process 1 of a container that a Python program has started with enroot_py. It reaps orphans. The pipe closes
 *                       when the launcher of that program (enroot_py/api/launcher.py) ends. The kernel then kills all other
 *                       processes of the container: pid_namespaces(7).
 *   penroot-init root   Create a user namespace in which this user is root, and write a byte to stdout when it exists. penroot exec
 *                       --user root enters the namespace (enroot_py/runtime/joining.py). The exit status is an errno.
 *
 * A fork of the Python process could do the same, but would take a megabyte of private memory. With `root`, programs of the container
 * can trace this process: user_namespaces(7) gives them all capabilities in the namespace. A fork would contain the caller's secrets.
 */
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

static int write_to(const char *path, const char *text)
{
	size_t length = strlen(text);
	int fd = path ? open(path, O_WRONLY | O_CLOEXEC) : STDOUT_FILENO;

	return fd >= 0 && write(fd, text, length) == (ssize_t)length ? 0 : -1;
}

static int create_namespace(void)
{
	uid_t uid = geteuid();
	gid_t gid = getegid();
	char users[32], groups[32];

	(void)snprintf(users, sizeof(users), "0 %u 1", uid);
	(void)snprintf(groups, sizeof(groups), "0 %u 1", gid);
	if (unshare(CLONE_NEWUSER) < 0 || write_to("/proc/self/setgroups", "deny") < 0)
		return -1;
	return write_to("/proc/self/uid_map", users) < 0 || write_to("/proc/self/gid_map", groups) < 0 ? -1 : write_to(NULL, "+");
}

int main(int argc, char *argv[])
{
	char byte;
	ssize_t got;

	if (prctl(PR_SET_NAME, "penroot-init") < 0) /* fexecve(3) has set the name to the number of a descriptor */
		err(1, "PR_SET_NAME");
	if (argc == 2 && strcmp(argv[1], "root") == 0 && create_namespace() < 0)
		return errno;
	if (signal(SIGCHLD, SIG_IGN) == SIG_ERR) /* the kernel reaps: waitpid(2) */
		err(1, "SIGCHLD");
	do
		got = read(STDIN_FILENO, &byte, 1);
	while (got > 0 || (got < 0 && errno == EINTR));
	return 0;
}
