/* penroot-launch MODE SCRIPT ARGV0 [ARGUMENT...]: start a TaskProlog in a container, where slurmstepd cannot run.
 *
 * Slurm 24.11.0 to 24.11.6, 25.05.0 and 25.05.1 call slurmstepd with these arguments: run_command_launcher() in
 * run_command.c.
 */
#include "../linux.h"

#include <err.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc < 4)
		errx(64, "only Slurm calls this program");
	(void)linux_close_range(3, ~0U, 0);
	(void)setpgid(0, 0);
	execv(argv[2], argv + 3);
	warn("%s", argv[2]);
	return 127;
}
