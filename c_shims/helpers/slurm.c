/* penroot-slurm: starts a program of the node in a container, by the node's loader and with the node's libraries.
 *
 * SLURM_HERE/bin has a link to it for each program. What to execute before the program is in SLURM_HERE/arguments, a word
 * a line. In the environment nothing is left that leads the loader, or Slurm, to files of the image; names with SLURM_KEPT
 * before them keep it for the job that the program submits. A variable that was not set is kept as an empty one.
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

enum { WORDS = 16, SIZE = 64 << 10 };

static void keep(const char *name, const char *instead)
{
	char kept[64];
	const char *value = getenv(name);

	(void)snprintf(kept, sizeof(kept), "%s%s", SLURM_KEPT, name);
	if ((value || instead) && setenv(kept, value ? value : "", 1) < 0)
		err(127, "%s", name);
	if (instead ? setenv(name, instead, 1) < 0 : unsetenv(name) < 0)
		err(127, "%s", name);
}

int main(int argc, char **argv)
{
	static char text[SIZE], program[PATH_MAX];
	const char *name = (const char *)getauxval(AT_EXECFN), *slash = name ? strrchr(name, '/') : NULL;
	char **words = calloc((size_t)argc + WORDS + 2, sizeof(*words));
	char *rest = text;
	size_t count = 0;

	int fd = open(SLURM_HERE "/arguments", O_RDONLY | O_CLOEXEC);
	ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	if (length < 0 || !words || !slash)
		err(127, SLURM_HERE "/arguments");
	(void)close(fd);
	for (char *word; count < WORDS && (word = strsep(&rest, "\n")) && *word;)
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
