/* A batch script whose #SBATCH lines ask for a container, of a job without one: nobody has read them. sbatch reads those
 * of a script in a file, not of --wrap (size 0 for process_options_second_pass of its sbatch.c), and slurmrestd and
 * programs with libslurm read none. Here a task does that, as the user. */
#include "plugin.h"

/* The word of a #SBATCH line that asks for a container, or NULL. The rest after a # is a comment. */
static char *find_option(char *line)
{
	for (char *word; (word = strsep(&line, " \t\n")) && *word != '#';) {
		word += strspn(word, "\"'");
		if (variable_of(word))
			return word;
	}
	return NULL;
}

/* That of the lines before the first command, as sbatch reads them: _opt_batch_script of its opt.c. In `line`. */
static char *read_options(FILE *script, char **line)
{
	static const char magic[] = "#SBATCH";
	char *option = NULL;
	size_t size = 0;

	while (!option && getline(line, &size, script) > 0) {
		const char *first = *line + strspn(*line, " \t\r\n");
		if (strncmp(*line, magic, sizeof(magic) - 1) == 0)
			option = find_option(*line + sizeof(magic) - 1);
		else if (*first && *first != '#')
			break;
	}
	return option;
}

/* In a task of a step without a container. */
int check_script(struct step *step)
{
	uint32_t step_id = 0;
	int argc = 0;
	char **argv = NULL;
	struct stat info;

	if (get_item(step, S_JOB_STEPID, &step_id) != ESPANK_SUCCESS || step_id != SLURM_BATCH_SCRIPT ||
	    get_item(step, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS || argc < 1)
		return 0;
	step->is_task = true;
	cleanup(close_fd) int fd = open(argv[0], O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
	FILE *script = fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) ? fdopen(fd, "re") : NULL;
	if (!script) /* then nothing can execute it */
		return 0;
	(void)keep_fd(&fd); /* it is the stream's now */
	char *line = NULL;
	const char *option = read_options(script, &line);
	(void)fclose(script);
	int rc = !option ? 0 :
			   fail(step,
				"#SBATCH %s: nobody has read this line of the script, which would run outside of a container: "
				"sbatch reads none of --wrap, and slurmrestd none at all; give the option to sbatch itself, or "
				"set %s in the environment of the job",
				option, variable_of(option));
	free(line);
	return rc;
}
