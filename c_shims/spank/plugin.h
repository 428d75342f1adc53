/* Declarations that the files of the plugin share, sorted by file. README.md describes each file. */
#ifndef PENROOT_PLUGIN_H
#define PENROOT_PLUGIN_H

#define _GNU_SOURCE
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>

#include <slurm/slurm.h>
#pragma GCC visibility push(default)
#include <slurm/spank.h>
#pragma GCC visibility pop

#include "proc.h"
#include "options.h" /* names shared with pyxis_py: pyxis_py/request/job.py explains them */

#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))

/* Since Slurm 24.05 the extern step waits for the job's other steps before it ends: mgr.c, _spawn_job_container(). */
#ifndef EXTERN_ENDS_LAST
#define EXTERN_ENDS_LAST (SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(24, 5, 0))
#endif

extern char **environ;

/* Return the descriptor in a self-closing variable, and keep the variable from closing it. */
static inline int release_fd(int *fd)
{
	int released = *fd;

	*fd = -1;
	return released;
}

/* Set errno and return -1. */
static inline int set_errno(int number)
{
	errno = number;
	return -1;
}

static inline bool has_prefix(const char *text, const char *prefix)
{
	return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* Check whether a process was killed, probably by Slurm. */
static inline bool was_killed(int status)
{
	return WIFSIGNALED(status) && (WTERMSIG(status) == SIGKILL || WTERMSIG(status) == SIGTERM);
}

/* place.c: the directory of the Python packages, and their interpreter */
const char *library(void);
const char *interpreter(void);
/* Check whether this plugin was loaded inside a container that has the Slurm of its node. */
bool is_in_container(void);

/* helper.c: the helper, a Python process (pyxis_py/helper.py). The int functions return 0 or a descriptor, or -1 with errno. */

/* The user that a process becomes. Only root, in slurmstepd or slurmd, starts processes of other users. */
struct credentials {
	uid_t uid;
	gid_t gid;
	gid_t *groups;
	int group_count;
};

/* `started`, in ticks after the boot, distinguishes a process from a later process with the same id: proc(5). */
struct identity {
	pid_t pid;
	unsigned long long started;
};

/* A process and our connection to it. Root does not trust a process of the user: root waits for it only until the deadline, and
 * accepts only short answers without descriptors. Closing a descriptor may block, for example if it is a file of the user's
 * FUSE. */
struct helper {
	int socket;
	int log;   /* its stderr */
	pid_t pid; /* -1 unless it is our child */
	int pidfd; /* readable when the process ends */
	int64_t deadline;
	bool is_untrusted;
};

#define NO_HELPER { .socket = -1, .log = -1, .pid = -1, .pidfd = -1 }
#define HELPER_NONE ((struct helper)NO_HELPER)

/* Create a file in memory, without a name, whose size is fixed. */
int make_memory(const char *name, off_t size);

#define FOREVER INT64_C(0) /* no deadline */
/* A wait without a deadline ends when MAX_STOPPED_POLLS polls in a row have found the process stopped. */
enum { POLL_INTERVAL_MS = 1500, MAX_STOPPED_POLLS = 6 };
int64_t deadline_in_ms(int64_t milliseconds);

/* The verb of a helper that root starts before there is a task: ahead.c. This helper gets its own session. */
#define AHEAD "ahead"

/* Start the process for `verb`. `control`, if not -1, becomes fd 4. With `as`, the process becomes that user for good, and is
 * untrusted. A `detached` process outlives the task: it is no child of the task, and has a new session. */
int helper_start(struct helper *process, const char *verb, int control, const struct credentials *as, bool detached);

/* Send one end of a new socket pair to the process `who`, which holds the other end of `control`. The sockets have no address, so
 * no other process can answer. Fails with ESRCH if the process is gone. */
int helper_connect(struct helper *process, int control, const struct identity *who, int64_t deadline, bool is_untrusted);

/* Check whether a signal or a debugger has stopped a process: proc_pid_stat(5). */
bool is_stopped(pid_t pid);

/* Wait until `fd` is ready for `events`. Fails with ECONNRESET if the process ends first. Fails with ETIMEDOUT after the deadline.
 * If there is no deadline, fails with ETIMEDOUT if the process stays stopped. */
int helper_await(const struct helper *process, int fd, short events);

/* Wait until the process has ended and left its cgroup. After the deadline, kill the process, and fail with ETIMEDOUT. */
int helper_wait(const struct helper *process);

void helper_free(struct helper *process);

/* message.c: messages to and from the helper. If a function fails, it returns -1 with errno. */

enum { MAX_MESSAGE_BYTES = 64 << 20, MAX_UNTRUSTED_BYTES = 64 << 10, MAX_FDS = 8 };

/* A request that is being written. request_finish() reports a failed write. */
struct request {
	FILE *stream;
	char *data;
	size_t length;
};

/* One answer and its file descriptors. */
struct answer {
	char *data;
	size_t length;
	int fds[MAX_FDS];
	size_t fd_count;
};

void request_add(struct request *request, const char *key, const char *format, ...) __attribute__((format(printf, 3, 4)));
int request_finish(struct request *request);
int request_send(const struct request *request, const struct helper *process);
void request_free(struct request *request);

/* Get the next pair. Start with *at = 0. Returns false after the last pair. */
bool answer_next(const struct answer *answer, size_t *at, const char **key, const char **value);
/* Return the value of a key, or NULL. */
const char *answer_get(const struct answer *answer, const char *wanted);
void answer_free(struct answer *answer);

/* cgroup.c. If a function fails, it returns -1 with errno. */

enum { CGROUPS_SIZE = 8192 };

/* Read all of /proc/PID/cgroup. */
int cgroup_read(pid_t pid, char *text, size_t size);
/* Move a process into the cgroups of a text from cgroup_read(). If the cgroup of a task is gone, use its parent. */
int cgroup_move(pid_t pid, const char *text);
/* Check whether a process is in the cgroups of a text from cgroup_read(), and whether all its user ids are `uid`. */
bool cgroup_holds(pid_t pid, const char *text, uid_t uid);

/* plugin.c */

/* Memory shared by the tasks of one step on one node. */
struct shared {
	bool started; /* a helper was started: there may be something to remove */
	bool ready;
	bool failed;
	atomic_bool reported;       /* one task has printed the error */
	atomic_bool awaited;        /* a message about a stopped task has been printed */
	char unseen_errors[2048];   /* errors of a task whose stderr nobody sees: print_error() */
	atomic_uint entered;        /* tasks in the container */
	atomic_uint ended;          /* ended tasks, counted by their outer processes: save.c */
	bool placed;                /* the helper started ahead is in the cgroups of the first task */
	atomic_bool taken;          /* a task has tried to use that helper */
	struct identity helper;     /* pid 0: the helper's answer was that there is no container */
	bool saves;                 /* there is something to save at the end */
	char cgroups[CGROUPS_SIZE]; /* of the helper: Slurm kills the processes in them with the step */
	char cwd[PATH_MAX];
};

enum { INHERITED_SIZE = 1024 };

/* The helper started by slurmstepd, and a description of the attributes inherited from slurmstepd. */
struct ahead {
	struct helper process;
	struct identity who;
	char inherited[INHERITED_SIZE];
};

struct stored_option {
	int option;
	char *value;
	bool inherited; /* from the sbatch whose script runs this srun or sbatch in a container */
};

/* The state of srun, sbatch or salloc, which handle the components of a job one after the other. */
struct submission {
	bool begun;
	bool checked;
	size_t first_component_options;
	struct helper resolving;
	bool is_unanswered; /* the first answer has not been read */
};

/* All state of the plugin in one process. plugin.c keeps the state: Slurm's callbacks have no argument for it. */
struct step {
	spank_t spank;
	int argument_count;
	char **arguments; /* of the plugin, in plugstack.conf */
	struct stored_option *options;
	size_t option_count;
	bool option_lost; /* an option could not be stored: out of memory */
	struct submission submission;
	bool active;  /* a container is requested: no task runs outside of it */
	bool is_task; /* this process is a task, or would have become one */
	bool starts;  /* this task starts the container, and holds the lock */
	bool reports; /* this task prints the errors of the node */
	bool finished;
	bool killed;                  /* the task that ended last was killed */
	size_t logged_bytes;          /* that this process has written to slurmd's log */
	char failure[PATH_MAX + 512]; /* a failure of root in slurmstepd, which the tasks report: prepare_step() */
	unsigned int exited;
	struct shared *shared;
	int lock;       /* the file of `shared`, which the task that starts the helper locks until the container is ready */
	int control[2]; /* a socket pair: [0] for tasks and slurmstepd, [1] for the helper */
	pid_t outer;    /* the process that waits for this task: save.c */
	struct credentials job;
	struct ahead ahead;
	char swarm[512];
	uint32_t job_id, step_id, local_tasks, total_tasks;
};
#define NO_STEP \
	{ \
		.lock = -1, .control = { -1, -1 }, .ahead = { NO_HELPER }, .submission = { .resolving = NO_HELPER } \
	}

/* Get an item of the step or job for which Slurm calls the plugin. */
#define get_item(step, ...) spank_get_item((step)->spank, __VA_ARGS__)

/* log.c */

extern char hostname[HOST_NAME_MAX + 1];
extern const char *node; /* the host name, or "" in srun, salloc and sbatch: lines begin with it */

void set_node(bool shown);
bool is_stderr_seen(void);
void print_error(struct step *step, const char *text);
void print_log(struct step *step, const char *level, const char *text);
/* Print an error and return -1. */
int fail(struct step *step, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Store an error, which each task prints later, and evaluate to -1. */
#define postpone(step, ...) ((void)snprintf((step)->failure, sizeof((step)->failure), __VA_ARGS__), -1)

/* Unless noted, the following int functions return 0, or print an error and return -1. */

/* options.c */
const char *runtime_path(struct step *step);
int register_options(struct step *step);
bool container_requested(struct step *step);
bool anything_requested(struct step *step);
bool environment_file_requested(struct step *step);
bool get_name_and_image(struct step *step, const char **name, const char **image);
void add_options(struct step *step, struct request *request);
int check_sizes(struct step *step);
int check_component(struct step *step);
int forward_variables(struct step *step, bool to_job);
int forward_content(struct step *step, const char *variable, const char *value, bool to_job);
int take_variables(struct step *step);
int take_swarm(struct step *step);
int take_options_of_sbatch(struct step *step);
const char *variable_of(const char *word);
void free_options(struct step *step);

/* message.c again: whole conversations */
enum { ANSWERED = 0, REFUSED = -1, NO_ANSWER = -2 };

void begin_request(struct step *step, struct request *request, const char *verb, const char *context, const char *cwd);
int begin_step_request(struct step *step, struct request *request, const char *verb);
void add_environ(struct request *request, const char *key, char *const *variables, bool ours_only);
int read_answer(struct step *step, const struct helper *process, struct answer *answer);
int exchange(struct step *step, const struct helper *process, struct request *request, struct answer *answer);
int explain_no_answer(struct step *step, const struct helper *process);
int ask(struct step *step, const struct helper *process, struct request *request, struct answer *answer);
int start_as_user(struct step *step, struct helper *process, const char *verb, int64_t deadline);
int ask_and_wait(struct step *step, struct helper *process, const char *purpose, struct request *request);

/* directory.c. If a function fails, it returns -1 with errno. */
int make_directories(const char *path);
int open_user_directory(struct step *step, struct statx *info);
int make_user_directory(struct step *step);

/* ahead.c */
void start_ahead(struct step *step);
void place_ahead(struct step *step, pid_t task);
int take_ahead(struct step *step, struct helper *process);
bool end_ahead(struct step *step);

/* plain.c */
enum plainness { NOT_PLAIN, PLAIN, PLAIN_TAG };
enum plainness classify_request(struct step *step, const char *context);

/* save.c */
int continue_in_child(struct step *step);
void end_with_parent(struct step *step);
/* End with the exit status or signal of another process, but write no core file. */
_Noreturn void end_like(int status);

/* submit.c, stepd.c, task.c, script.c, enter.c, epilog.c */
int check(struct step *step, const char *context);
int restore_variables(struct step *step);
int take_resolved(struct step *step);
void prepare_step(struct step *step);
int finish_step(struct step *step);
int init_task(struct step *step);
int check_script(struct step *step);
int enter(struct step *step, const struct answer *answer);
int clean_up_job(struct step *step);

#endif
