/* penroot-slurm: start a Slurm program of the node in a container, with the node's loader and libraries.
 *
 * SLURM_HERE/bin has a link to this file for each program. The words in SLURM_HERE/arguments, one per line, precede the program
 * on the command line. Variables that would lead the loader, or Slurm, to files of the image get the prefix SLURM_KEPT. The plugin
 * restores their names for the job that the program submits. If a replaced variable was unset, the variable with the prefix is
 * empty.
 */
#include "../brought.h"

#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

enum { MAX_WORDS = 16, MAX_ARGUMENTS_BYTES = 64 << 10 };

/* Rename a variable. Set the original name to the replacement, if any. */
static void keep(const char *name, const char *replacement)
{
	char kept[64];
	const char *value = getenv(name);

	(void)snprintf(kept, sizeof(kept), "%s%s", SLURM_KEPT, name);
	if ((value || replacement) && setenv(kept, value ? value : "", 1) < 0)
		err(127, "%s", name);
	if (replacement ? setenv(name, replacement, 1) < 0 : unsetenv(name) < 0)
		err(127, "%s", name);
}

int main(int argc, char **argv)
{
	static char text[MAX_ARGUMENTS_BYTES], program[PATH_MAX];
	const char *name = (const char *)getauxval(AT_EXECFN), *slash = name ? strrchr(name, '/') : NULL;
	char **words = calloc((size_t)argc + MAX_WORDS + 2, sizeof(*words));
	char *rest = text;
	size_t count = 0;

	int fd = open(SLURM_HERE "/arguments", O_RDONLY | O_CLOEXEC);
	ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	if (length < 0 || !words || !slash)
		err(127, SLURM_HERE "/arguments");
	(void)close(fd);
	for (char *word; count < MAX_WORDS && (word = strsep(&rest, "\n")) && *word;)
		words[count++] = word;
	(void)snprintf(program, sizeof(program), SLURM_HERE "/node/bin/%s", slash + 1);
	words[count++] = program;
	for (int i = 1; i < argc; i++)
		words[count++] = argv[i];
	keep("LD_PRELOAD", NULL);
	keep("LD_AUDIT", NULL);
	keep("SLURM_CONF", SLURM_HERE "/etc/slurm.conf");
	if (access(SLURM_HERE "/auth/sack.socket", F_OK) == 0)
		keep("SLURM_SACK_SOCKET", SLURM_HERE "/auth/sack.socket");
	execv(words[0], words);
	err(errno == ENOENT ? 127 : 126, "%s", words[0]);
}
