/* Messages for the user of srun, and for slurmd's log. */
#include "plugin.h"

#include <stdarg.h>
#include <sys/sysmacros.h>

/* Limits of what processes of the user may write to slurmd's log: one line, all lines of a task, and all lines that root logs for a
 * step. Slurm's prefix of each line counts too. */
enum { MAX_LINE_BYTES = 2048, MAX_TASK_BYTES = 48 << 10, MAX_ROOT_BYTES = 8 << 10, PREFIX_BYTES = 128 };

char hostname[HOST_NAME_MAX + 1];
const char *node;

void set_node(bool shown)
{
	if (gethostname(hostname, sizeof(hostname) - 1) < 0)
		hostname[0] = '\0';
	hostname[strcspn(hostname, ".")] = '\0';
	node = shown ? hostname : "";
}

/* Return the length of the first character, or 0 if a log or terminal should not get it. */
static size_t character_length(const unsigned char *text)
{
	size_t length = text[0] < 0x80 ? 1 : text[0] < 0xc2 ? 0 : text[0] < 0xe0 ? 2 : text[0] < 0xf0 ? 3 : text[0] < 0xf5 ? 4 : 0;

	for (size_t i = 1; i < length; i++) {
		if ((text[i] & 0xc0) != 0x80)
			return 0;
	}
	/* Refuse control characters, including those of Latin-1: text must not begin a new line or move the cursor. */
	return text[0] < 0x20 || text[0] == 0x7f || (text[0] == 0xc2 && text[1] < 0xa0) ? 0 : length;
}

/* Print one line with a function of Slurm. All jobs share the log of slurmd, so a step may write only a limited number of bytes.
 * Beyond this limit, a task prints lines for the user to stderr only. */
static void print_line(struct step *step, void (*print)(const char *format, ...), const char *who, const char *text)
{
	char line[MAX_LINE_BYTES];
	size_t length = 0, before = step->logged_bytes, limit = step->is_task ? MAX_TASK_BYTES : MAX_ROOT_BYTES;
	bool logged = spank_context() == S_CTX_REMOTE || spank_context() == S_CTX_JOB_SCRIPT;
	const char *colon = *who ? ": " : "";

	while (*text && length < sizeof(line) - 8) {
		size_t size = character_length((const unsigned char *)text);
		memcpy(line + length, size ? text : "?", size ? size : 1);
		length += size ? size : 1;
		text += size ? size : 1;
	}
	(void)strcpy(line + length, *text ? "..." : "");
	if (logged)
		step->logged_bytes += strlen(line) + PREFIX_BYTES;
	if (step->logged_bytes <= limit || !logged) {
		print("pyxis: %s%s%s", who, colon, line);
		return;
	}
	if (before <= limit)
		print("pyxis: %s%sfurther lines are not logged", who, colon);
	if (step->is_task && print != slurm_info)
		(void)dprintf(STDERR_FILENO, "pyxis: %s%s%s\n", who, colon, line);
}

/* Check whether anybody sees the stderr of this task: srun --pty gives /dev/null to all tasks but one. */
bool is_stderr_seen(void)
{
	struct stat info;

	return fstat(STDERR_FILENO, &info) < 0 || !S_ISCHR(info.st_mode) || info.st_rdev != makedev(1, 3);
}

/* An error of one task is usually an error of all tasks, so only one task prints it. Only the task that starts the container knows
 * why the start has failed. If nobody sees the stderr of that task, another task prints the error. */
void print_error(struct step *step, const char *text)
{
	if (!step->is_task || !step->shared) {
		/* If the container did not start, srun has already shown why, so errors at the end of the step go to the log only. */
		print_line(step, step->shared && step->shared->failed ? slurm_info : slurm_error, node, text);
	} else if (is_stderr_seen()) {
		if (!step->reports)
			step->reports = !atomic_exchange(&step->shared->reported, true);
		if (step->reports)
			print_line(step, slurm_error, node, text);
	} else if (step->starts) {
		char *errors = step->shared->unseen_errors;
		size_t used = strlen(errors);
		(void)snprintf(errors + used, sizeof(step->shared->unseen_errors) - used, "%s\n", text);
	}
}

int fail(struct step *step, const char *format, ...)
{
	char text[sizeof(step->failure)];
	va_list arguments;

	va_start(arguments, format);
	(void)vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	print_error(step, text);
	return -1;
}

void print_log(struct step *step, const char *level, const char *text)
{
	bool is_tell = strcmp(level, "tell") == 0;

	if (strcmp(level, "error") == 0)
		print_error(step, text);
	else
		print_line(step, is_tell || strcmp(level, "warn") == 0 ? slurm_spank_log : slurm_info, is_tell ? "" : node, text);
}
