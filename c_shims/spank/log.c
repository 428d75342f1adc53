/* Lines for people in front of srun, and for slurmd's log. */
#include "plugin.h"

#include <stdarg.h>
#include <sys/sysmacros.h>

/* What the user's processes may put into slurmd's log: bytes of a line, bytes of a task's lines, of root's for a step.
 * What Slurm puts before a line counts too. */
enum { LINE_LIMIT = 2048, TASK_LIMIT = 48 << 10, ROOT_LIMIT = 8 << 10, SLURMS_PART = 128 };

char hostname[HOST_NAME_MAX + 1];
const char *node;

void set_node(bool shown)
{
	if (gethostname(hostname, sizeof(hostname) - 1) < 0)
		hostname[0] = '\0';
	hostname[strcspn(hostname, ".")] = '\0';
	node = shown ? hostname : "";
}

/* The length of the character that a text begins with; 0 where it is none that a log or terminal should get. */
static size_t plain(const unsigned char *text)
{
	size_t length = text[0] < 0x80 ? 1 : text[0] < 0xc2 ? 0 : text[0] < 0xe0 ? 2 : text[0] < 0xf0 ? 3 : text[0] < 0xf5 ? 4 : 0;

	for (size_t i = 1; i < length; i++) {
		if ((text[i] & 0xc0) != 0x80)
			return 0;
	}
	/* Control characters, those of Latin-1 too: a line is one, and moves no cursor. */
	return text[0] < 0x20 || text[0] == 0x7f || (text[0] == 0xc2 && text[1] < 0xa0) ? 0 : length;
}

/* Print one line by a function of Slurm's. In the log of slurmd, which is for all, as much as a step may need, and no
 * more: what the user is to see of a task goes on to him alone. */
static void say(struct step *step, void (*print)(const char *format, ...), const char *who, const char *text)
{
	char line[LINE_LIMIT];
	size_t length = 0, before = step->log_size, limit = step->is_task ? TASK_LIMIT : ROOT_LIMIT;
	bool logged = spank_context() == S_CTX_REMOTE || spank_context() == S_CTX_JOB_SCRIPT;
	const char *colon = *who ? ": " : "";

	while (*text && length < sizeof(line) - 8) {
		size_t size = plain((const unsigned char *)text);
		memcpy(line + length, size ? text : "?", size ? size : 1);
		length += size ? size : 1;
		text += size ? size : 1;
	}
	(void)strcpy(line + length, *text ? "..." : "");
	if (logged)
		step->log_size += strlen(line) + SLURMS_PART;
	if (step->log_size <= limit || !logged) {
		print("pyxis: %s%s%s", who, colon, line);
		return;
	}
	if (before <= limit)
		print("pyxis: %s%smore is not logged", who, colon);
	if (step->is_task && print != slurm_info)
		(void)dprintf(STDERR_FILENO, "pyxis: %s%s%s\n", who, colon, line);
}

/* Whether anybody sees what this task says: srun --pty has /dev/null for all but one. */
bool is_heard(void)
{
	struct stat info;

	return fstat(STDERR_FILENO, &info) < 0 || !S_ISCHR(info.st_mode) || info.st_rdev != makedev(1, 3);
}

/* What fails for one task mostly fails for all: one of them says it. Of the container's start only the task knows
 * that started it, so if that one is not heard, another one says it. */
void print_error(struct step *step, const char *text)
{
	if (!step->is_task || !step->shared) {
		/* Of a step that has failed, srun has told why: what fails at its end too is for the log. */
		say(step, step->shared && step->shared->failed ? slurm_info : slurm_error, node, text);
	} else if (is_heard()) {
		if (!step->reports)
			step->reports = !atomic_exchange(&step->shared->reported, true);
		if (step->reports)
			say(step, slurm_error, node, text);
	} else if (step->starts) {
		size_t used = strlen(step->shared->why);
		(void)snprintf(step->shared->why + used, sizeof(step->shared->why) - used, "%s\n", text);
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

int postpone(struct step *step, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	(void)vsnprintf(step->failure, sizeof(step->failure), format, arguments);
	va_end(arguments);
	return -1;
}

void print_log(struct step *step, const char *level, const char *text)
{
	bool told = strcmp(level, "tell") == 0;

	if (strcmp(level, "error") == 0)
		print_error(step, text);
	else
		say(step, told || strcmp(level, "warn") == 0 ? slurm_spank_log : slurm_info, told ? "" : node, text);
}
