/* penroot-init: process 1 of a container that a Python program has started with enroot_py. It reaps orphans. The pipe at stdin
 * closes when the launcher of that program (enroot_py/api/launcher.py) ends. Process 1 then ends too, and the kernel kills all other
 * processes of the container: pid_namespaces(7).
 *
 * A fork of the Python process could do the same, but would take a megabyte of private memory.
 */
#include <err.h>
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(void)
{
	char byte;
	ssize_t got;

	if (prctl(PR_SET_NAME, "penroot-init") < 0) /* fexecve(3) has set the name to the number of a descriptor */
		err(1, "PR_SET_NAME");
	if (signal(SIGCHLD, SIG_IGN) == SIG_ERR) /* the kernel reaps: waitpid(2) */
		err(1, "SIGCHLD");
	do
		got = read(STDIN_FILENO, &byte, 1);
	while (got > 0 || (got < 0 && errno == EINTR));
	return 0;
}
