/* What Slurm calls. Nothing is decided here: options are stored and passed on to Python, and a
 * task joins the container that it is told. Without a container option nothing happens at all. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <pthread.h>
#include <pwd.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/slurm.h>
#pragma GCC visibility push(default)
#include <slurm/spank.h>
SPANK_PLUGIN(pyxis, 1)
#pragma GCC visibility pop

#include "cgroup.h"
#include "coprocess.h"
#include "enter.h"
#include "options.h"

/* For `pyxis-py check`, which cannot load what needs functions of Slurm's programs. */
#define TEXT_OF(macro) #macro
#define TEXT(macro) TEXT_OF(macro)
static const char built_for[] __attribute__((used)) = "penroot plugin for Slurm " TEXT(SLURM_VERSION_NUMBER);

/* What srun found out for all nodes of a step: pyxis_py/job.py. */
#define RESOLVED "SLURM_PYXIS_RESOLVED"

/* An option of sbatch, before its name. Slurm's own variables for it are lost with --export=NONE before 23.11. */
#define FORWARDED "SLURM_PYXIS_OPTION_"

/* The variables of srun and sbatch, before their names: every --export lets SLURM_* through. */
#define KEPT "SLURM_"

/* Slurm makes variables of options for the spank epilog, the script and more, under names of up to 100 bytes. One that
 * is longer than the kernel's MAX_ARG_STRLEN lets none of these be executed (E2BIG), which drains the node; the second
 * limit leaves room for some copies of all of them in the 2 MiB that arguments and environment have: execve(2). */
enum { VALUE_LIMIT = 128 * 1024 - 256, VALUES_LIMIT = 256 * 1024 };

/* How long root waits for what the user's processes do, in milliseconds: after a step was killed, and for the epilog of a
 * job, together less than Slurm's patience; at a normal end without anything to save, before another process does it. */
enum { KILLED_WAIT = 3000, EPILOG_WAIT = 5000, END_WAIT = 10000 };

/* What the user's processes may put into slurmd's log: bytes of a line, bytes of a task's lines, of root's for a step. */
enum { LINE_LIMIT = 2048, TASK_LIMIT = 48 << 10, ROOT_LIMIT = 8 << 10 };

enum { NAMES_LIMIT = 100000 };

extern char **environ;

struct given_option {
	int option;
	char *value;
};

/* What the tasks of one step on one node share. */
struct shared {
	pthread_mutex_t lock; /* held while a task starts the helper, until the container is ready */
	bool started;         /* a helper was started: there may be something to remove */
	bool ready;
	bool failed;
	atomic_bool reported; /* one task has said what is wrong */
	char why[2048];       /* lines of one that is not heard: see print_error */
	atomic_uint entered;
	struct identity helper; /* pid 0: it has said that there is no container to enter */
	bool saves;           /* there is something to save at the end */
	char cgroups[CGROUPS_SIZE]; /* of the helper, whose end is that of the step at the latest */
	char cwd[PATH_MAX];
};

static struct {
	struct given_option *options;
	size_t option_count;
	bool active;
	bool is_task; /* this process is a task, or would have become one */
	bool starts;  /* and starts the container, with the lock */
	bool reports; /* and is the one of this node that says what is wrong */
	bool finished;
	bool killed;      /* the task that ended last was killed */
	size_t log_size;  /* bytes that this process has said */
	char *failure; /* found as root in slurmstepd, raised in the task: see init_step */
	unsigned int exited;
	struct shared *shared;
	int control[2]; /* tasks and slurmstepd have the first, the helper has the second */
	struct credentials job;
	uint32_t job_id, step_id, local_tasks, total_tasks;
} step = { .control = { -1, -1 } };

/* The name of this machine, or "" where people are in front of it. */
static const char *node;
static char hostname[HOST_NAME_MAX + 1];

static void set_node(bool shown)
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
static void say(void (*print)(const char *format, ...), const char *who, const char *text)
{
	char line[LINE_LIMIT];
	size_t length = 0, limit = step.is_task ? TASK_LIMIT : ROOT_LIMIT;

	for (const char *at = text; *at && length < sizeof(line) - 8;) {
		size_t size = plain((const unsigned char *)at);
		if (size)
			memcpy(line + length, at, size);
		else
			line[length] = '?';
		length += size ? size : 1;
		at += size ? size : 1;
		if (*at && length >= sizeof(line) - 8) {
			memcpy(line + length, "...", 3);
			length += 3;
			break;
		}
	}
	line[length] = '\0';
	const char *colon = *who ? ": " : "";
	if (spank_context() != S_CTX_REMOTE && spank_context() != S_CTX_JOB_SCRIPT) {
		print("pyxis: %s%s%s", who, colon, line);
		return;
	}
	/* What Slurm puts before it counts too. */
	step.log_size += length + 128;
	if (step.log_size <= limit)
		print("pyxis: %s%s%s", who, colon, line);
	else if (step.log_size - length - 128 <= limit)
		print("pyxis: %s%smore is not logged", who, colon);
	if (step.log_size > limit && step.is_task && print != slurm_info)
		(void)dprintf(STDERR_FILENO, "pyxis: %s%s%s\n", who, colon, line);
}

/* Whether anybody sees what this task says: srun --pty has /dev/null for all but one. */
static bool is_heard(void)
{
	struct stat info;

	return fstat(STDERR_FILENO, &info) < 0 || !S_ISCHR(info.st_mode) || info.st_rdev != makedev(1, 3);
}

/* What fails for one task mostly fails for all: one of them says it. Of the container's start only the task knows
 * that started it, so if that one is not heard, another one says it. */
static void print_error(const char *text)
{
	if (step.is_task && !is_heard()) {
		size_t used = strlen(step.shared->why);
		if (step.starts)
			(void)snprintf(step.shared->why + used, sizeof(step.shared->why) - used, "%s\n", text);
		return;
	}
	if (step.is_task && !step.reports)
		step.reports = !atomic_exchange(&step.shared->reported, true);
	/* Of a step that has failed, srun has told why: what fails at its end too is for the log. */
	bool told = !step.is_task && step.shared && step.shared->failed;
	if (!step.is_task || step.reports)
		say(told ? slurm_info : slurm_error, node, text);
}

static __attribute__((format(printf, 1, 2))) int fail(const char *format, ...)
{
	char text[PATH_MAX + 512];
	va_list arguments;

	va_start(arguments, format);
	(void)vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	print_error(text);
	return -1;
}

static void print_log(const char *level, const char *text)
{
	if (strcmp(level, "error") == 0)
		print_error(text);
	else if (strcmp(level, "warn") == 0)
		say(slurm_spank_log, node, text);
	else if (strcmp(level, "tell") == 0)
		say(slurm_spank_log, "", text);
	else
		say(slurm_info, node, text);
}

/* Options */

static int option_given(int val, const char *optarg, int remote)
{
	const char *value = optarg ? optarg : "";

	(void)remote;
	for (size_t i = 0; i < step.option_count; i++) {
		if (step.options[i].option == val && strcmp(step.options[i].value, value) == 0)
			return 0;
	}
	struct given_option *options = realloc(step.options, (step.option_count + 1) * sizeof(*options));
	if (!options)
		return fail("out of memory");
	step.options = options;
	options[step.option_count] = (struct given_option){ .option = val, .value = strdup(value) };
	if (!options[step.option_count].value)
		return fail("out of memory");
	step.option_count++;
	return 0;
}

static int register_options(spank_t sp)
{
	for (struct spank_option *o = option_table; o->name; o++) {
		spank_err_t rc = spank_option_register(sp, o);
		if (rc != ESPANK_SUCCESS)
			return fail("cannot register --%s: %s", o->name, spank_strerror(rc));
	}
	return 0;
}

static bool container_asked_for(spank_t sp)
{
	char none[1];

	for (size_t i = 0; i < step.option_count; i++) {
		if (option_selects[step.options[i].option])
			return true;
	}
	for (int i = 0; i < OPTION_COUNT; i++) {
		if (!option_selects[i] || !option_variables[i])
			continue;
		/* The value is longer than the buffer: it is set. */
		spank_err_t rc = spank_getenv(sp, option_variables[i], none, sizeof(none));
		if (rc == ESPANK_SUCCESS || rc == ESPANK_NOSPACE)
			return true;
	}
	return false;
}

/* A variable that is none of ours may be a slip in one that is: the check tells. */
static bool anything_said(void)
{
	static const char prefix[] = "PYXIS_CONTAINER_";

	for (char **variable = environ; variable && *variable; variable++) {
		if (strncmp(*variable, prefix, sizeof(prefix) - 1) == 0)
			return true;
	}
	return step.option_count > 0;
}

/* Messages */

static void add_environ(struct request *request, char *const *variables, bool ours_only)
{
	static const char *const ours[] = { "PYXIS_", "ENROOT_", RESOLVED "=" };

	for (; variables && *variables; variables++) {
		bool wanted = !ours_only;
		for (size_t i = 0; i < sizeof(ours) / sizeof(ours[0]); i++)
			wanted = wanted || strncmp(*variables, ours[i], strlen(ours[i])) == 0;
		if (wanted)
			request_add(request, "environ", *variables);
	}
}

static int begin(struct request *request, const char *verb, const char *context, int ac, char **av, const char *cwd)
{
	if (request_begin(request) < 0)
		return -1;
	request_add(request, "verb", verb);
	request_add(request, "context", context);
	for (int i = 0; i < ac; i++)
		request_add(request, "arg", av[i]);
	for (size_t i = 0; i < step.option_count; i++) {
		char *text;
		if (asprintf(&text, "%s=%s", option_table[step.options[i].option].name, step.options[i].value) < 0)
			return -1;
		request_add(request, "option", text);
		free(text);
	}
	request_add(request, "cwd", cwd);
	request_add(request, "node", hostname);
	return 0;
}

/* What step, join and finish have in common. */
static int begin_step(struct request *request, spank_t sp, const char *verb, int ac, char **av, const char *cwd)
{
	char **variables = NULL;
	spank_err_t rc = spank_get_item(sp, S_JOB_ENV, &variables);

	if (rc != ESPANK_SUCCESS)
		return fail("cannot get the environment of the job: %s", spank_strerror(rc));
	if (begin(request, verb, "stepd", ac, av, cwd) < 0)
		return fail("out of memory");
	add_environ(request, variables, false);
	request_add_number(request, "jobid", step.job_id);
	request_add_number(request, "stepid", step.step_id);
	request_add_number(request, "uid", step.job.uid);
	request_add_number(request, "gid", step.job.gid);
	request_add_number(request, "localtasks", step.local_tasks);
	request_add_number(request, "totaltasks", step.total_tasks);
	return 0;
}

static const char *answer_get(const struct answer *answer, const char *wanted)
{
	const char *key, *value;

	for (size_t at = 0; answer_next(answer, &at, &key, &value);) {
		if (strcmp(key, wanted) == 0)
			return value;
	}
	return NULL;
}

enum { ANSWERED = 0, REFUSED = -1, SILENT = -2 };

/* Wait for an answer; what comes before it is printed at once, and so are the reasons of a refusal.
 * SILENT, with errno, if the process goes without an answer. */
static int listen_to(const struct coprocess *process, struct answer *answer)
{
	for (;;) {
		const char *kind, *text, *key, *value;
		size_t at = 0;

		answer_free(answer);
		if (answer_receive(answer, process) < 0)
			return SILENT;
		(void)answer_next(answer, &at, &kind, &text);
		if (strcmp(kind, "ok") == 0)
			return ANSWERED;
		if (strcmp(kind, "log") == 0) {
			const char *level = answer_next(answer, &at, &key, &value) ? value : "info";
			print_log(level, text);
			continue;
		}
		for (at = 0; answer_next(answer, &at, &key, &value);) {
			if (*value) /* else it has been said */
				print_error(value);
		}
		return REFUSED;
	}
}

/* Send a request and wait for the answer. */
static int converse(const struct coprocess *process, const struct request *request, struct answer *answer)
{
	/* The process may answer before it has read everything, so a failed send shows in the answer. */
	int sent = request_send(request, process);
	int why = errno;
	int rc = listen_to(process, answer);

	if (rc == SILENT && sent < 0)
		errno = why;
	return rc;
}

/* The same where silence is a failure too: returns 0, or -1 with the reason printed. */
static int ask(const struct coprocess *process, const struct request *request, struct answer *answer)
{
	int rc = converse(process, request, answer);

	if (rc != SILENT)
		return rc;
	int why = errno;
	bool said = coprocess_each_log_line(process, print_error);
	if (why != ECONNRESET && why != EPIPE)
		return fail("no answer from the helper process of the container: %s", strerror(why));
	return said ? fail("the helper process of the container ended without an answer: pyxis-py check tells more there") :
		      fail("the helper process of the container ended without an answer: killed? see --mem and dmesg");
}

/* Ask a process of the user's that root has started, and wait for its end. */
static int consult(struct coprocess *process, const char *verb, const struct request *request)
{
	cleanup(answer_free) struct answer answer = { 0 };

	int rc = ask(process, request, &answer);
	close_fd(&process->socket);
	if (coprocess_wait(process) < 0)
		return fail("a process for the %s has not ended in time, and was killed", verb);
	return rc;
}

/* Start one; it does nothing before it is asked. */
static int engage(struct coprocess *process, const char *verb, int64_t until)
{
	if (coprocess_start(process, verb, -1, &step.job, false) < 0)
		return fail("cannot start " PENROOT_PYTHON ": %s", strerror(errno));
	process->until = until;
	return 0;
}

/* Submit: a mistake ends srun, salloc or sbatch before anything is queued. For srun the process goes on
 * meanwhile: it resolves a tag, and what it found is there when the allocation is. Of several components of
 * a heterogeneous job only one would get it then, so there srun waits. */

static struct coprocess resolving = COPROCESS_NONE;

/* What all nodes of the step are to know goes to them with the environment of its tasks. */
static int take_resolved(void)
{
	cleanup(answer_free) struct answer answer = { 0 };
	cleanup(coprocess_free) struct coprocess process = resolving;

	resolving = COPROCESS_NONE;
	if (process.socket < 0)
		return 0;
	bool answered = listen_to(&process, &answer) == ANSWERED;
	close_fd(&process.socket);
	(void)coprocess_wait(&process);
	/* Without it each node resolves the tag, and says so. */
	const char *resolved = answered ? answer_get(&answer, "resolved") : NULL;
	if (resolved && setenv(RESOLVED, resolved, 1) < 0)
		return fail("cannot set " RESOLVED ": %s", strerror(errno));
	return 0;
}

static int check(int ac, char **av, const char *context)
{
	static bool checked;
	char cwd[PATH_MAX];
	cleanup(request_free) struct request request = { 0 };

	/* An srun in a container may have the plugin and no more of us. The nodes check it all again. */
	if (access(PENROOT_PYTHON, X_OK) < 0 || access(PENROOT_LIB "/pyxis_py/helper.py", R_OK) < 0) {
		slurm_debug("pyxis: nothing is checked here: " PENROOT_PYTHON " or " PENROOT_LIB ": %s", strerror(errno));
		return 0;
	}
	if (!getcwd(cwd, sizeof(cwd)))
		cwd[0] = '\0';
	if (begin(&request, "check", context, ac, av, cwd) < 0)
		return fail("out of memory");
	/* It is of a step around this one; but Slurm comes here once for each component, and what the first has found
	 * holds for all. */
	if (!checked)
		(void)unsetenv(RESOLVED);
	checked = true;
	add_environ(&request, environ, true);
	if (request_finish(&request) < 0)
		return fail("cannot write a message: %s", strerror(errno));
	cleanup(answer_free) struct answer answer = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	if (coprocess_start(&process, "check", -1, NULL, false) < 0)
		return fail("cannot start " PENROOT_PYTHON ": %s", strerror(errno));
	int rc = ask(&process, &request, &answer);
	const char *later = rc == ANSWERED ? answer_get(&answer, "later") : NULL;
	if (later) {
		resolving = process;
		process = COPROCESS_NONE;
		return *later ? take_resolved() : 0;
	}
	close_fd(&process.socket);
	if (coprocess_wait(&process) < 0)
		return fail("waitpid: %s", strerror(errno));
	return rc;
}

/* Add the size of a value to that of all. */
static int measure(const char *origin, const char *value, size_t *all)
{
	size_t size = value ? strlen(value) : 0;

	*all += size;
	if (size > VALUE_LIMIT)
		return fail("%s has %zu bytes, and at most %d fit into the environment of a job: give less of it, such as a mount of "
			    "the directory above many", origin, size, VALUE_LIMIT);
	return 0;
}

/* What would run, and then drain its nodes. */
static int check_sizes(void)
{
	size_t all = 0;

	for (size_t i = 0; i < step.option_count; i++) {
		char origin[64];
		(void)snprintf(origin, sizeof(origin), "--%s", option_table[step.options[i].option].name);
		if (measure(origin, step.options[i].value, &all) < 0)
			return -1;
	}
	for (int i = 0; i < OPTION_COUNT; i++) {
		if (option_variables[i] && measure(option_variables[i], getenv(option_variables[i]), &all) < 0)
			return -1;
	}
	if (all > VALUES_LIMIT)
		return fail("the container options and PYXIS_CONTAINER_* variables have %zu bytes together, and at most %d fit into "
			    "the environment of a job: give less of them", all, VALUES_LIMIT);
	return 0;
}

/* srun, sbatch: the variables that say which container go along where --export leaves them out, too. */
static int forward_variables(void)
{
	for (int i = 0; i < OPTION_COUNT; i++) {
		char name[64];
		const char *variable = option_variables[i];
		if (!variable)
			continue;
		(void)snprintf(name, sizeof(name), KEPT "%s", variable);
		const char *value = getenv(variable);
		/* What is there already is of a job around this one. */
		if (value ? setenv(name, value, 1) < 0 : unsetenv(name) < 0)
			return fail("cannot set %s: %s", name, strerror(errno));
	}
	return 0;
}

/* sbatch: its options go to the batch script as variables that every --export lets through. */
static int forward_options(void)
{
	for (size_t i = 0; i < step.option_count; i++) {
		char name[64];
		(void)snprintf(name, sizeof(name), FORWARDED "%s", option_table[step.options[i].option].name);
		if (setenv(name, step.options[i].value, 1) < 0)
			return fail("cannot set %s: %s", name, strerror(errno));
	}
	return 0;
}

/* slurmd and slurmstepd, as root */

/* The variables as they were where srun or sbatch was called; one that --export has set is left as it is. */
static int take_variables(spank_t sp)
{
	for (int i = 0; i < OPTION_COUNT; i++) {
		char **variables = NULL;
		char name[64];

		if (!option_variables[i])
			continue;
		if (spank_get_item(sp, S_JOB_ENV, &variables) != ESPANK_SUCCESS)
			return fail("cannot get the environment of the job");
		int length = snprintf(name, sizeof(name), KEPT "%s=", option_variables[i]);
		while (variables && *variables && strncmp(*variables, name, (size_t)length) != 0)
			variables++;
		if (!variables || !*variables)
			continue;
		spank_err_t rc = spank_setenv(sp, option_variables[i], *variables + length, 0);
		if (rc != ESPANK_SUCCESS && rc != ESPANK_ENV_EXISTS)
			return fail("cannot set %s: %s", option_variables[i], spank_strerror(rc));
		name[length - 1] = '\0';
		(void)spank_unsetenv(sp, name);
	}
	return 0;
}

/* What sbatch has forwarded, taken where Slurm has lost the options. Nobody else is to see it: a job that the
 * script submits has options of its own. */
static int take_forwarded(spank_t sp)
{
	bool lost = step.option_count == 0;
	char **variables = NULL;
	char name[64];

	if (spank_get_item(sp, S_JOB_ENV, &variables) != ESPANK_SUCCESS)
		return fail("cannot get the environment of the job");
	for (char **v = variables; lost && v && *v; v++) {
		for (int i = 0; i < OPTION_COUNT; i++) {
			int length = snprintf(name, sizeof(name), FORWARDED "%s=", option_table[i].name);
			if (strncmp(*v, name, (size_t)length) == 0 && option_given(i, *v + length, 1) < 0)
				return -1;
		}
	}
	for (int i = 0; i < OPTION_COUNT; i++) {
		(void)snprintf(name, sizeof(name), FORWARDED "%s", option_table[i].name);
		(void)spank_unsetenv(sp, name);
	}
	return 0;
}

/* The value of `name=` in plugstack.conf; the last one counts. */
static const char *argument(int ac, char **av, const char *name, const char *otherwise)
{
	size_t length = strlen(name);

	for (int i = 0; i < ac; i++) {
		if (strncmp(av[i], name, length) == 0 && av[i][length] == '=')
			otherwise = av[i] + length + 1;
	}
	return otherwise;
}

/* Whether nobody but root can put anything into a directory, or, on the way to another, in place of what is in it. */
static bool is_roots(const char *path, bool on_the_way)
{
	struct stat link, info;

	if (lstat(path, &link) < 0 || stat(path, &info) < 0 || !S_ISDIR(info.st_mode))
		return false;
	bool closed = !(info.st_mode & (S_IWGRP | S_IWOTH)) || (on_the_way && info.st_mode & S_ISVTX);
	return link.st_uid == 0 && info.st_uid == 0 && closed;
}

/* Like mkdir -p -m 755, whatever the umask; what is there already is root's. */
static int make_directories(const char *path)
{
	char part[PATH_MAX];

	for (const char *end = path; *end; ) {
		end += 1 + strcspn(end + 1, "/");
		(void)snprintf(part, sizeof(part), "%.*s", (int)(end - path), path);
		if (mkdir(part, 0755) == 0) {
			if (chmod(part, 0755) < 0)
				return -1;
		} else if (errno != EEXIST) {
			return -1;
		} else if (geteuid() == 0 && !is_roots(part, *end)) {
			errno = EPERM;
			return -1;
		}
	}
	return 0;
}

/* RUNTIME_PATH/UID itself, as a descriptor with O_PATH: not what the user has mounted over it, which may be a FUSE that
 * never answers, so nothing here asks it. */
static int open_user_directory(const char *runtime_path, uid_t uid, struct statx *info)
{
	char path[PATH_MAX];
	struct statx above;

	if (snprintf(path, sizeof(path), "%s/%u", runtime_path, (unsigned int)uid) >= (int)sizeof(path)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	cleanup(close_fd) int fd = open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0 || statx(AT_FDCWD, runtime_path, 0, STATX_BASIC_STATS, &above) < 0 ||
	    statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_BASIC_STATS, info) < 0)
		return -1;
	if (info->stx_dev_major != above.stx_dev_major || info->stx_dev_minor != above.stx_dev_minor) {
		errno = EXDEV;
		return -1;
	}
	int directory = fd;
	fd = -1;
	return directory;
}

/* RUNTIME_PATH/UID, 0700. Nobody but root can have made it otherwise: the parent is root's. */
static int make_user_directory(const char *runtime_path, const struct credentials *user)
{
	char path[PATH_MAX];
	struct statx info;
	int length = snprintf(path, sizeof(path), "%s/%u", runtime_path, (unsigned int)user->uid);

	if (length < 0 || (size_t)length >= sizeof(path)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	if (make_directories(runtime_path) < 0 || (mkdir(path, 0700) < 0 && errno != EEXIST))
		return -1;
	cleanup(close_fd) int fd = open_user_directory(runtime_path, user->uid, &info);
	if (fd < 0)
		return -1;
	/* Another step may be between its mkdir and its chown. */
	if (S_ISDIR(info.stx_mode) && info.stx_uid == 0 && lchown(path, user->uid, user->gid) == 0)
		return 0;
	if (!S_ISDIR(info.stx_mode) || info.stx_uid != user->uid) {
		errno = EEXIST;
		return -1;
	}
	return 0;
}

static struct shared *make_shared(void)
{
	pthread_mutexattr_t attributes;
	struct shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (shared == MAP_FAILED)
		return NULL;
	if ((errno = pthread_mutexattr_init(&attributes)))
		return NULL;
	/* Robust: a task that is killed while it holds the lock does not block the others. */
	if (!(errno = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED)) &&
	    !(errno = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST)))
		errno = pthread_mutex_init(&shared->lock, &attributes);
	(void)pthread_mutexattr_destroy(&attributes);
	return errno ? NULL : shared;
}

static int get_job(spank_t sp)
{
	gid_t *groups = NULL;
	int count = 0;
	spank_err_t rc;

	if ((rc = spank_get_item(sp, S_JOB_UID, &step.job.uid)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_GID, &step.job.gid)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_SUPPLEMENTARY_GIDS, &groups, &count)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_ID, &step.job_id)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_STEPID, &step.step_id)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_LOCAL_TASK_COUNT, &step.local_tasks)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_TOTAL_TASK_COUNT, &step.total_tasks)) != ESPANK_SUCCESS)
		return fail("cannot learn about the job: %s", spank_strerror(rc));
	step.job.groups = calloc((size_t)count + 1, sizeof(gid_t));
	if (!step.job.groups)
		return fail("out of memory");
	for (int i = 0; i < count; i++)
		step.job.groups[i] = groups[i];
	step.job.group_count = count;
	return 0;
}

/* Errors wait for the tasks: one here would make slurmd drain the node, or srun exit with 0. */
static int init_step(spank_t sp, int ac, char **av)
{
	const char *runtime_path = argument(ac, av, "runtime_path", DEFAULT_RUNTIME_PATH);

	uint32_t step_id = 0;

	if (spank_get_item(sp, S_JOB_STEPID, &step_id) == ESPANK_SUCCESS && step_id == SLURM_BATCH_SCRIPT &&
	    take_forwarded(sp) < 0)
		return -1;
	if (take_variables(sp) < 0)
		return -1;
	step.active = container_asked_for(sp);
	if (!step.active)
		return 0;
	if (get_job(sp) < 0)
		return -1;
	step.shared = make_shared();
	/* Our end lives as long as slurmstepd and its children before exec: by its end the helper sees theirs. */
	if (!step.shared || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, step.control) < 0)
		return fail("cannot prepare the step: %s", strerror(errno));
	if (make_user_directory(runtime_path, &step.job) < 0 &&
	    asprintf(&step.failure, "cannot make the directory %s/%u: %s; it is to be the user's own, in a runtime_path of root's",
		     runtime_path, (unsigned int)step.job.uid, strerror(errno)) < 0)
		return fail("out of memory");
	return 0;
}

/* Tasks, as the user */

static struct shared *lock(struct shared *shared)
{
	int rc = pthread_mutex_lock(&shared->lock);

	if (rc == EOWNERDEAD) /* the task that started the helper was killed: the helper goes with it, we are next */
		rc = pthread_mutex_consistent(&shared->lock);
	errno = rc;
	return rc ? NULL : shared;
}

static void unlock(struct shared **shared)
{
	if (*shared)
		(void)pthread_mutex_unlock(&(*shared)->lock);
}

static int begin_task(struct request *request, spank_t sp, const char *verb, int ac, char **av, const char *cwd)
{
	int local_id = 0, argc = 0;
	char **argv = NULL;
	uint32_t global_id = 0;
	spank_err_t rc;

	if ((rc = spank_get_item(sp, S_TASK_ID, &local_id)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_TASK_GLOBAL_ID, &global_id)) != ESPANK_SUCCESS)
		return fail("cannot learn about the task: %s", spank_strerror(rc));
	if (begin_step(request, sp, verb, ac, av, cwd) < 0)
		return -1;
	request_add_number(request, "taskid", (unsigned long)local_id);
	request_add_number(request, "procid", global_id);
	rc = spank_get_item(sp, S_JOB_ARGV, &argc, &argv);
	if (rc == ESPANK_SUCCESS && argc > 0)
		request_add(request, "command", argv[0]);
	else if (step.step_id == SLURM_BATCH_SCRIPT)
		return fail("cannot get the batch script: %s", spank_strerror(rc));
	if (request_finish(request) < 0)
		return fail("cannot write a message: %s", strerror(errno));
	return 0;
}

/* The first task: start the helper and wait until the container is ready, which may take an import. */
static int start_container(spank_t sp, int ac, char **av, struct answer *answer)
{
	struct shared *shared = step.shared;
	cleanup(request_free) struct request request = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	if (!getcwd(shared->cwd, sizeof(shared->cwd)))
		shared->cwd[0] = '\0';
	if (begin_task(&request, sp, "step", ac, av, shared->cwd) < 0)
		return -1;
	if (cgroup_read(getpid(), shared->cgroups, sizeof(shared->cgroups)) < 0)
		return fail("cannot read /proc/self/cgroup: %s", strerror(errno));
	shared->started = true;
	shared->helper = (struct identity){ 0 };
	if (coprocess_start(&process, "step", step.control[1], NULL, true) < 0)
		return fail("cannot start " PENROOT_PYTHON ": %s", strerror(errno));
	if (ask(&process, &request, answer) < 0)
		return -1;
	const char *who = answer_get(answer, "helper");
	if (!who) /* nothing to join */
		return 0;
	shared->saves = answer_get(answer, "saves") != NULL;
	if (sscanf(who, "%d %llu", &shared->helper.pid, &shared->helper.started) != 2 || shared->helper.pid <= 0)
		return fail("the helper does not say who it is: %s", who);
	return 0;
}

/* The others: the helper hands them what the first task has got. */
static int find_container(spank_t sp, int ac, char **av, struct answer *answer)
{
	cleanup(request_free) struct request request = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	if (!step.shared->helper.pid)
		return 0;
	if (begin_task(&request, sp, "join", ac, av, step.shared->cwd) < 0)
		return -1;
	if (coprocess_connect(&process, step.control[0], &step.shared->helper, FOREVER, false) < 0)
		return fail("the helper process of the container is gone: %s", strerror(errno));
	return ask(&process, &request, answer);
}

static int get_container(spank_t sp, int ac, char **av, struct answer *answer)
{
	{
		cleanup(unlock) struct shared *shared = lock(step.shared);
		if (!shared)
			return fail("cannot lock the step: %s", strerror(errno));
		if (shared->failed) {
			for (char *line, *rest = shared->why; is_heard() && (line = strsep(&rest, "\n")) && *line;)
				print_error(line);
			return -1; /* else the task that failed has said why */
		}
		if (!shared->ready) {
			step.starts = true;
			shared->ready = start_container(sp, ac, av, answer) == 0;
			step.starts = false;
			shared->failed = !shared->ready;
			return shared->ready ? 0 : -1;
		}
	}
	return find_container(sp, ac, av, answer);
}

static void free_string(char **string)
{
	free(*string);
}

static int change_environment(spank_t sp, const struct answer *answer)
{
	const char *key, *value;

	for (size_t at = 0; answer_next(answer, &at, &key, &value);) {
		spank_err_t rc = ESPANK_SUCCESS;
		if (strcmp(key, "unset") == 0) {
			rc = spank_unsetenv(sp, value);
		} else if (strcmp(key, "set") == 0) {
			cleanup(free_string) char *name = strdup(value);
			if (!name)
				return fail("out of memory");
			char *equals = strchr(name, '=');
			if (!equals)
				return fail("the helper set %s to nothing", value);
			*equals = '\0';
			rc = spank_setenv(sp, name, equals + 1, 1);
		}
		if (rc != ESPANK_SUCCESS)
			return fail("cannot %s %s: %s", key, value, spank_strerror(rc));
	}
	return 0;
}

static int enter_container(const struct answer *answer)
{
	int fds[NAMESPACE_COUNT];
	size_t used = 0;
	const char *key, *value;
	char failed[PATH_MAX + 64];

	for (int i = 0; i < NAMESPACE_COUNT; i++)
		fds[i] = -1;
	for (size_t at = 0; answer_next(answer, &at, &key, &value);) {
		if (strcmp(key, "ns") != 0)
			continue;
		int kind = 0;
		while (kind < NAMESPACE_COUNT && strcmp(namespace_names[kind], value) != 0)
			kind++;
		if (kind == NAMESPACE_COUNT || used == answer->fd_count)
			return fail("the helper named a namespace that it did not send: %s", value);
		fds[kind] = answer->fds[used++];
	}
	if (!step.shared->helper.pid) /* no container for this step */
		return 0;
	if (enter(fds, answer_get(answer, "workdir"), failed, sizeof(failed)) < 0)
		return fail("%s: %s", failed, strerror(errno));
	return 0;
}

/* Until exec resets it a task has slurmstepd's handler for what cancels it, which since Slurm 24.11 does
 * nothing: an import would go on until Slurm kills the step. */
static void heed_cancel(void)
{
	static const int numbers[] = { SIGTERM, SIGINT };
	struct sigaction now;

	for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
		if (sigaction(numbers[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN)
			(void)signal(numbers[i], SIG_DFL);
	}
}

static int init_task(spank_t sp, int ac, char **av)
{
	cleanup(answer_free) struct answer answer = { 0 };

	step.is_task = true;
	heed_cancel();
	if (geteuid() != step.job.uid)
		return fail("this task runs as user %u, not %u", (unsigned int)geteuid(), (unsigned int)step.job.uid);
	if (step.failure)
		return fail("%s", step.failure);
	if (get_container(sp, ac, av, &answer) < 0 || change_environment(sp, &answer) < 0 || enter_container(&answer) < 0)
		return -1;
	atomic_fetch_add(&step.shared->entered, 1);
	return 0;
}

/* Let the helper finish. SILENT if it does not: with ESRCH if it was dead before. */
static int finish_by_helper(const struct request *request, int64_t until)
{
	cleanup(answer_free) struct answer answer = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	errno = ESRCH;
	if (!step.shared->helper.pid || coprocess_connect(&process, step.control[0], &step.shared->helper, until, true) < 0)
		return SILENT;
	/* It was the helper that said who it is. What is in the step's cgroups ends with the step. */
	if (!cgroup_holds(step.shared->helper.pid, step.shared->cgroups, step.job.uid)) {
		errno = ESRCH;
		return SILENT;
	}
	int rc = converse(&process, request, &answer);
	int why = errno;
	/* Where slurmstepd still finds a process of the step, it sleeps for a second. */
	process.until = in_milliseconds(rc == SILENT ? 0 : KILLED_WAIT);
	if (coprocess_wait_end(&process) < 0)
		slurm_info("pyxis: %s: the helper process has not ended, and was killed", node);
	errno = why;
	return rc;
}

/* What the end of the step is to be told; `failed`: there is nothing to save. */
static int begin_finish(struct request *request, spank_t sp, int ac, char **av, bool failed)
{
	if (begin_step(request, sp, "finish", ac, av, step.shared->cwd) < 0)
		return -1;
	request_add_number(request, "failed", failed);
	request_add_number(request, "killed", step.killed);
	if (request_finish(request) < 0)
		return fail("cannot write a message: %s", strerror(errno));
	return 0;
}

/* Where the helper does not, another process finishes, in the same cgroups: so it ends when Slurm ends the step. */
static int finish_by_another(spank_t sp, int ac, char **av, bool failed, int64_t until)
{
	cleanup(request_free) struct request request = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	if (engage(&process, "finish", until) < 0)
		return -1;
	if (cgroup_move(process.pid, step.shared->cgroups) < 0 || !step.shared->ready) {
		/* They go with the last process of a step that never began, and Slurm ends what is in them no more. */
		failed = true;
		if (until == FOREVER)
			process.until = in_milliseconds(KILLED_WAIT);
	}
	if (begin_finish(&request, sp, ac, av, failed) < 0)
		return -1;
	return consult(&process, "end of the step", &request);
}

/* The end of the step, in slurmstepd as root: what was started is finished as the user. A save at a normal end lasts as
 * long as it lasts, or until Slurm ends the step; after a kill there is no time for anything. */
static int finish(spank_t sp, int ac, char **av)
{
	cleanup(request_free) struct request request = { 0 };

	if (step.finished || !step.shared->started)
		return 0;
	step.finished = true;
	int64_t until = in_milliseconds(step.killed ? KILLED_WAIT : END_WAIT);
	bool failed = atomic_load(&step.shared->entered) < step.local_tasks;
	bool saves = step.shared->saves && !failed && !step.killed;
	if (begin_finish(&request, sp, ac, av, failed) < 0)
		return -1;
	int rc = finish_by_helper(&request, saves ? FOREVER : until);
	if (rc != SILENT)
		return rc;
	if (errno != ESRCH && saves) {
		(void)fail("the container is not saved: what saved it was killed");
		failed = step.killed = true;
		until = in_milliseconds(KILLED_WAIT);
	}
	/* Where there is no time left, the rest is the epilog's. */
	if (step.killed && in_milliseconds(0) >= until)
		return 0;
	return finish_by_another(sp, ac, av, failed, step.killed ? until : FOREVER);
}

/* The end of a job, as root. Nothing that goes wrong here may reach slurmd: it would drain the node. */

/* Whether the job has left something: what may stay is noted in RUNTIME_PATH/UID under its name. */
static bool anything_left(const char *runtime_path, uid_t uid, uint32_t job_id)
{
	char prefix[32];
	struct statx info;
	bool found = false;

	int length = snprintf(prefix, sizeof(prefix), "pyxis_%u", job_id);
	cleanup(close_fd) int there = open_user_directory(runtime_path, uid, &info);
	int fd = there < 0 ? -1 : openat(there, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *directory = fd < 0 ? NULL : fdopendir(fd);
	if (!directory) {
		close_fd(&fd);
		return false;
	}
	/* Where there are very many the user's process looks. */
	unsigned int read = 0;
	for (struct dirent *entry; !found && (entry = readdir(directory));)
		found = ++read > NAMES_LIMIT ||
			(strncmp(entry->d_name, prefix, (size_t)length) == 0 && strchr("._", entry->d_name[length]) &&
			 entry->d_name[length]);
	(void)closedir(directory);
	return found;
}

/* Who the user is: of the job itself, only the number is known here. Whoever has left the site since has the
 * group to which his directory was given. */
static int get_user(const char *runtime_path, struct credentials *user, char *home, size_t home_size)
{
	const struct passwd *entry = getpwuid(user->uid);
	struct statx info;
	int count = 0;

	if (!entry) {
		cleanup(close_fd) int fd = open_user_directory(runtime_path, user->uid, &info);
		if (fd < 0 || info.stx_uid != user->uid)
			return -1;
		user->gid = info.stx_gid;
		(void)snprintf(home, home_size, "HOME=/");
		return 0;
	}
	(void)snprintf(home, home_size, "HOME=%s", entry->pw_dir);
	user->gid = entry->pw_gid;
	(void)getgrouplist(entry->pw_name, entry->pw_gid, NULL, &count);
	user->groups = calloc((size_t)count + 1, sizeof(gid_t));
	if (!user->groups || getgrouplist(entry->pw_name, entry->pw_gid, user->groups, &count) < 0)
		return -1;
	user->group_count = count;
	return 0;
}

static int clean_up_job(spank_t sp, int ac, char **av)
{
	cleanup(request_free) struct request request = { 0 };
	const char *runtime_path = argument(ac, av, "runtime_path", DEFAULT_RUNTIME_PATH);
	char home[PATH_MAX];
	spank_err_t rc;

	if ((rc = spank_get_item(sp, S_JOB_UID, &step.job.uid)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_ID, &step.job_id)) != ESPANK_SUCCESS)
		return fail("cannot learn about the job: %s", spank_strerror(rc));
	if (!anything_left(runtime_path, step.job.uid, step.job_id))
		return 0;
	if (get_user(runtime_path, &step.job, home, sizeof(home)) < 0)
		return fail("cannot learn about user %u", (unsigned int)step.job.uid);
	if (begin(&request, "epilog", "epilog", ac, av, "/") < 0)
		return fail("out of memory");
	request_add(&request, "environ", home);
	request_add_number(&request, "jobid", step.job_id);
	request_add_number(&request, "uid", step.job.uid);
	if (request_finish(&request) < 0)
		return fail("cannot write a message: %s", strerror(errno));
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;
	if (engage(&process, "epilog", in_milliseconds(EPILOG_WAIT)) < 0)
		return -1;
	return consult(&process, "epilog", &request);
}

static void free_step(void)
{
	for (size_t i = 0; i < step.option_count; i++)
		free(step.options[i].value);
	free(step.options);
	free(step.failure);
	free(step.job.groups);
	close_fd(&step.control[0]);
	close_fd(&step.control[1]);
	if (step.shared)
		(void)munmap(step.shared, sizeof(*step.shared));
	step = (typeof(step)){ .control = { -1, -1 } };
}

/* Slurm's entry points: spank(8). */

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	switch (spank_context()) {
	case S_CTX_SLURMD:
		set_node(false);
		if (make_directories(argument(ac, av, "runtime_path", DEFAULT_RUNTIME_PATH)) < 0)
			return fail("cannot make the runtime_path: %s", strerror(errno));
		return 0;
	case S_CTX_LOCAL:
	case S_CTX_ALLOCATOR:
		set_node(false);
		return register_options(sp);
	case S_CTX_REMOTE:
		set_node(true);
		return register_options(sp);
	default:
		return 0;
	}
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	switch (spank_context()) {
	case S_CTX_LOCAL:
		if (check_sizes() < 0 || forward_variables() < 0)
			return -1;
		return anything_said() ? check(ac, av, "srun") : 0;
	case S_CTX_ALLOCATOR:
		if (check_sizes() < 0)
			return -1;
		/* The command of salloc has its environment, and each srun in that forwards what it has. */
		if (strcmp(program_invocation_short_name, "salloc") == 0)
			return anything_said() ? check(ac, av, "salloc") : 0;
		if (forward_variables() < 0)
			return -1;
		if (!anything_said())
			return 0;
		return check(ac, av, "sbatch") < 0 ? -1 : forward_options();
	case S_CTX_REMOTE:
		return init_step(sp, ac, av);
	default:
		return 0;
	}
}

int slurm_spank_local_user_init(spank_t sp, int ac, char **av)
{
	(void)sp, (void)ac, (void)av;
	return take_resolved();
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	/* Not `return -1`: where plugstack.conf says "optional", Slurm would then run the task outside of its
	 * container, and where it says "required" add two lines for each task to the one that says why. */
	if (step.active && init_task(sp, ac, av) < 0)
		_exit(EXIT_FAILURE);
	return 0;
}

int slurm_spank_task_exit(spank_t sp, int ac, char **av)
{
	int status = 0;

	/* Where Slurm ends a step, it kills all that is left of it: so the last one tells. */
	if (step.active && spank_get_item(sp, S_TASK_EXIT_STATUS, &status) == ESPANK_SUCCESS)
		step.killed = WIFSIGNALED(status) && (WTERMSIG(status) == SIGKILL || WTERMSIG(status) == SIGTERM);
	/* What is still being set up must be dead first: slurm_spank_exit comes after that. */
	if (!step.active || ++step.exited < step.local_tasks || !step.shared->ready)
		return 0;
	/* It has said what failed. Slurm would add two lines to that, and change no exit status. */
	(void)finish(sp, ac, av);
	return 0;
}

int slurm_spank_exit(spank_t sp, int ac, char **av)
{
	int rc = 0;

	/* Only if no container was ready when the last task ended, or a task could not even be launched. */
	if (step.active && !step.is_task)
		rc = finish(sp, ac, av);
	free_step();
	return rc;
}

int slurm_spank_job_epilog(spank_t sp, int ac, char **av)
{
	set_node(true);
	if (clean_up_job(sp, ac, av) < 0)
		slurm_info("pyxis: %s: job %u may have left containers behind", node, step.job_id);
	free_step();
	return 0;
}
