/* Refuse a batch script whose #SBATCH lines ask for a container, if its job has none: Slurm has not read these lines. sbatch reads
 * these lines in a script file, but not in --wrap: sbatch.c calls process_options_second_pass with size 0. slurmrestd and programs
 * with libslurm never read them. So a task reads them, as the user. */
#include "plugin.h"

/* Return the word of a #SBATCH line that asks for a container, or NULL. A word that begins with # begins a comment. */
static char *find_option(char *line)
{
	for (char *word; (word = strsep(&line, " \t\n")) && *word != '#';) {
		word += strspn(word, "\"'");
		if (variable_of(word))
			return word;
	}
	return NULL;
}

/* Return the first word of the #SBATCH lines that asks for a container, or NULL. Stop before the first command, as sbatch does:
 * _opt_batch_script of its opt.c. The word is part of `line`. */
static char *read_options(FILE *script, char **line)
{
	char *option = NULL;
	size_t size = 0;

	while (!option && getline(line, &size, script) > 0) {
		const char *first = *line + strspn(*line, " \t\r\n");
		if (has_prefix(*line, "#SBATCH"))
			option = find_option(*line + strlen("#SBATCH"));
		else if (*first && *first != '#')
			break;
	}
	return option;
}

/* Refuse the script if it asks for a container. A task of a step without a container calls this. */
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
	if (!script) /* it cannot be executed either */
		return 0;
	(void)release_fd(&fd); /* fclose() closes it */
	char *line = NULL;
	const char *option = read_options(script, &line);
	(void)fclose(script);
	int rc = 0;
	if (option)
		rc = fail(
			step,
			"#SBATCH %s: Slurm has not read this line of the script, which would run outside of a container: sbatch ignores "
			"#SBATCH lines of --wrap, and slurmrestd ignores all #SBATCH lines; give the option to sbatch itself, or set "
			"%s in the environment of the job",
			option, variable_of(option));
	free(line);
	return rc;
}
