/* What the files of the plugin share, by file: README.md tells what each of them does. */
#ifndef PENROOT_PLUGIN_H
#define PENROOT_PLUGIN_H

#define _GNU_SOURCE
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <slurm/slurm.h>
#pragma GCC visibility push(default)
#include <slurm/spank.h>
#pragma GCC visibility pop

#include "proc.h"
#include "options.h" /* names that pyxis_py has too: what each means, pyxis_py/request/job.py tells */

#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))

/* Since Slurm 24.05 the extern step waits for the job's others before its end: mgr.c, _spawn_job_container(). */
#ifndef EXTERN_ENDS_LAST
#define EXTERN_ENDS_LAST (SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(24, 5, 0))
#endif

extern char **environ;

/* For a descriptor that is to outlive its variable. */
static inline int keep_fd(int *fd)
{
	int kept = *fd;

	*fd = -1;
	return kept;
}

/* place.c: the directory of our Python packages, the Python that runs them, and whether a container has both of its node. */
const char *library(void);
const char *interpreter(void);
bool is_brought(void);

/* coprocess.c: the Python process that decides. All return 0 or a descriptor, or -1 with errno. */

/* Who the process is to be: only slurmstepd, which is root, has to change. */
struct credentials {
	uid_t uid;
	gid_t gid;
	gid_t *groups;
	int group_count;
};

/* Which process, among all that ever had its number: `started` is in ticks after the boot, proc(5). */
struct identity {
	pid_t pid;
	unsigned long long started;
};

/* A process and our connection to it: the socket, its stderr, its pid if it is our child, and a pidfd, readable when it
 * ends. As root we wait for a user's process until `until` at most, and are `wary`: we take short answers and no
 * descriptors, as closing one may block (a file of the user's FUSE). */
struct coprocess {
	int socket;
	int log;
	pid_t pid;
	int end;
	int64_t until;
	bool wary;
};

#define NO_COPROCESS { .socket = -1, .log = -1, .pid = -1, .end = -1 }
#define COPROCESS_NONE ((struct coprocess)NO_COPROCESS)

/* A file of this size for good: it is memory, and nobody's. */
int make_memory(const char *name, off_t size);

/* A moment to wait until; FOREVER is none. */
#define FOREVER INT64_C(0)
/* A wait without a limit ends when the process is stopped at so many looks in a row. */
enum { LOOK_MS = 1500, LOOKS = 6 };
int64_t in_milliseconds(int64_t milliseconds);

/* The verb of a helper that was started before there is a task, by root: it has its own session as well. */
#define AHEAD "ahead"

/* Which process has this number now. ESRCH where that cannot be known. */
int identify(pid_t pid, struct identity *who);

/* Start the process that `verb` names. `control` is its fd 4, or -1. With `as` it becomes that user for good, and we are
 * wary. `detached`: it is nobody's child and has its own session, so that it outlives the task. */
int coprocess_start(struct coprocess *process, const char *verb, int control, const struct credentials *as, bool detached);

/* Send one end of a new pair of sockets to the process `who`, which has the other end of `control`. There is no address,
 * so nobody else can answer. ESRCH if the process is gone. */
int coprocess_connect(struct coprocess *process, int control, const struct identity *who, int64_t until, bool wary);

/* Wait until `fd` is ready for `events`. ECONNRESET where the process ends first, ETIMEDOUT when it takes too long. */
bool is_stopped(pid_t pid);
int coprocess_await(const struct coprocess *process, int fd, short events);

/* Wait for the end of the process, when it has left its cgroup too. One that takes too long is killed: ETIMEDOUT. */
int coprocess_wait(const struct coprocess *process);

void coprocess_free(struct coprocess *process);

/* message.c: what is sent to that process, and comes from it. -1 with errno. */

enum { MESSAGE_LIMIT = 64 << 20, WARY_LIMIT = 64 << 10, FDS_LIMIT = 8 };

/* A request while it is written; what cannot be written shows at request_finish. */
struct request {
	FILE *stream;
	char *data;
	size_t length;
};

/* One answer and the file descriptors that came with it. */
struct answer {
	char *data;
	size_t length;
	int fds[FDS_LIMIT];
	size_t fd_count;
};

void request_add(struct request *request, const char *key, const char *format, ...) __attribute__((format(printf, 3, 4)));
int request_finish(struct request *request);
int request_send(const struct request *request, const struct coprocess *process);
void request_free(struct request *request);

/* The pairs in turn: start with *at = 0. False after the last one. */
bool answer_next(const struct answer *answer, size_t *at, const char **key, const char **value);
/* The value of a key, or NULL. */
const char *answer_get(const struct answer *answer, const char *wanted);
void answer_free(struct answer *answer);

/* cgroup.c: -1 with errno. */

enum { CGROUPS_SIZE = 8192 };

/* The text of /proc/PID/cgroup, all of it. */
int cgroup_read(pid_t pid, char *text, size_t size);
/* Move a process to the groups of such a text; where one has gone since, as that of a task, to the one above it. */
int cgroup_move(pid_t pid, const char *text);
/* Whether a process is in the groups of such a text, and all that it may is `uid`. */
bool cgroup_holds(pid_t pid, const char *text, uid_t uid);

/* plugin.c */

/* What the tasks of one step on one node share. */
struct shared {
	bool started;         /* a helper was started: there may be something to remove */
	bool ready;
	bool failed;
	atomic_bool reported; /* one task has said what is wrong */
	atomic_bool awaited;  /* one task has said that it waits for a stopped one */
	char why[2048];       /* lines of one that is not heard: see print_error */
	atomic_uint entered;
	atomic_uint ended;    /* tasks with an outer process that saves: save.c */
	bool placed;          /* the helper that was started ahead is in the cgroups of the first task */
	atomic_bool taken;    /* and is that of the step, or none */
	struct identity helper; /* pid 0: it has said that there is no container to enter */
	bool saves;           /* there is something to save at the end */
	char cgroups[CGROUPS_SIZE]; /* of the helper, whose end is that of the step at the latest */
	char cwd[PATH_MAX];
};

enum { INHERITED_SIZE = 1024 };

/* A helper that slurmstepd has started, what it is, and what it has of slurmstepd. */
struct ahead {
	struct coprocess process;
	struct identity who;
	char inherited[INHERITED_SIZE];
};

/* An option as Slurm has given it. */
struct given_option {
	int option;
	char *value;
	bool inherited; /* of sbatch, where an srun or sbatch in its script is in a container, too */
};

/* What srun, sbatch or salloc has asked, for one component of a job after the other. */
struct submission {
	bool begun;
	bool checked;
	size_t options_of_first;
	struct coprocess resolving;
	bool unheard; /* its first answer is to come, and will be that nothing is wrong */
};

/* All that the plugin knows in one process. Slurm's calls bring no place for it: plugin.c has it. */
struct step {
	spank_t spank; /* what Slurm calls us with, and the arguments in plugstack.conf */
	int argument_count;
	char **arguments;
	struct given_option *options;
	size_t option_count;
	bool option_lost; /* for want of memory */
	struct submission submission;
	bool active; /* a container is asked for: no task runs outside of it */
	bool is_task; /* this process is a task, or would have become one */
	bool starts;  /* and starts the container, with the lock */
	bool reports; /* and is the one of this node that says what is wrong */
	bool finished;
	bool killed;      /* the task that ended last was killed */
	size_t log_size;  /* bytes that this process has said */
	char failure[PATH_MAX + 512]; /* found as root in slurmstepd, raised in the task: see prepare_step */
	unsigned int exited;
	struct shared *shared;
	int lock;       /* the file of that memory: held by the task that starts the helper, until the container is ready */
	int control[2]; /* tasks and slurmstepd have the first, the helper has the second */
	pid_t outer;    /* the process that waits for this task: save.c */
	struct credentials job;
	struct ahead ahead;
	char swarm[512];
	uint32_t job_id, step_id, local_tasks, total_tasks;
};
#define NO_STEP \
	{ \
		.lock = -1, .control = { -1, -1 }, .ahead = { NO_COPROCESS }, .submission = { .resolving = NO_COPROCESS } \
	}

/* Of the step or job that Slurm calls us for. */
#define get_item(step, ...) spank_get_item((step)->spank, __VA_ARGS__)

/* log.c */

/* The name of this machine, and what lines begin with: that, or "" where people are in front of it. */
extern char hostname[HOST_NAME_MAX + 1];
extern const char *node;

void set_node(bool shown);
bool is_heard(void);
void print_error(struct step *step, const char *text);
void print_log(struct step *step, const char *level, const char *text);
/* Print an error, or have each task print it, and return -1. */
int fail(struct step *step, const char *format, ...) __attribute__((format(printf, 2, 3)));
int postpone(struct step *step, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The rest returns 0, or -1 where it has failed, and said why. */

/* options.c */
const char *runtime_path(struct step *step);
int register_options(struct step *step);
bool container_asked_for(struct step *step);
bool anything_said(struct step *step);
bool environment_asked_for(struct step *step);
bool get_only(struct step *step, const char **name, const char **image);
void add_options(struct step *step, struct request *request);
int check_sizes(struct step *step);
int check_component(struct step *step);
int forward_variables(struct step *step, bool of_job);
int carry(struct step *step, const char *variable, const char *value, bool of_job);
int take_variables(struct step *step);
int take_swarm(struct step *step);
int take_options_of_sbatch(struct step *step);
const char *variable_of(const char *word);
void free_options(struct step *step);

/* message.c again: whole conversations */
enum { ANSWERED = 0, REFUSED = -1, SILENT = -2 };

void begin_request(struct step *step, struct request *request, const char *verb, const char *context, const char *cwd);
int begin_step_request(struct step *step, struct request *request, const char *verb);
void add_environ(struct request *request, const char *key, char *const *variables, bool ours_only);
int listen_to(struct step *step, const struct coprocess *process, struct answer *answer);
int converse(struct step *step, const struct coprocess *process, struct request *request, struct answer *answer);
int explain_silence(struct step *step, const struct coprocess *process);
int ask(struct step *step, const struct coprocess *process, struct request *request, struct answer *answer);
int start_as_user(struct step *step, struct coprocess *process, const char *verb, int64_t until);
int consult(struct step *step, struct coprocess *process, const char *verb, struct request *request);

/* directory.c; these two return -1 with errno */
int make_directories(const char *path);
int open_user_directory(struct step *step, struct statx *info);
int make_user_directory(struct step *step);

/* ahead.c */
void start_ahead(struct step *step);
void place_ahead(struct step *step, pid_t task);
int take_ahead(struct step *step, struct coprocess *process);
bool end_ahead(struct step *step);

/* plain.c */
enum plainness { NOT_PLAIN, PLAIN, PLAIN_TAG };
enum plainness judge(struct step *step, const char *context);

/* save.c */
int go_on_in_child(struct step *step);
void end_with_parent(struct step *step);
/* End as another process did, but without its core file. */
_Noreturn void end_like(int status);

/* submit.c, stepd.c, task.c, script.c, enter.c, epilog.c */
int check(struct step *step, const char *context);
int give_back_variables(struct step *step);
int take_resolved(struct step *step);
void prepare_step(struct step *step);
int finish_step(struct step *step);
int init_task(struct step *step);
int check_script(struct step *step);
int enter(struct step *step, const struct answer *answer);
int clean_up_job(struct step *step);

#endif
