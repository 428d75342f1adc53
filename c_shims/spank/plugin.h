/* What the files of the plugin share: who runs which is in README.md. */
#ifndef PENROOT_PLUGIN_H
#define PENROOT_PLUGIN_H

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#pragma GCC visibility push(default)
#include <slurm/spank.h>
#pragma GCC visibility pop

#include "cgroup.h"
#include "coprocess.h"

/* What srun found out for all nodes of a step: pyxis_py/job.py. */
#define RESOLVED "SLURM_PYXIS_RESOLVED"

extern char **environ;

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

struct step {
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
};
extern struct step step;

/* log.c */

/* The name of this machine, or "" where people are in front of it. */
extern const char *node;
extern char hostname[HOST_NAME_MAX + 1];

void set_node(bool shown);
bool is_heard(void);
void print_error(const char *text);
void print_log(const char *level, const char *text);
int fail(const char *format, ...) __attribute__((format(printf, 1, 2))); /* prints an error, and returns -1 */

/* options.c: -1 where it has failed, and said why */

const char *runtime_path(int ac, char **av);
int register_options(spank_t sp);
bool container_asked_for(spank_t sp);
bool anything_said(void);
int add_options(struct request *request);
int check_sizes(void);
int forward_variables(void);
int forward_options(void);
int take_variables(spank_t sp);
int take_forwarded(spank_t sp);
void free_options(void);

/* ask.c */

enum { ANSWERED = 0, REFUSED = -1, SILENT = -2 };

void add_environ(struct request *request, char *const *variables, bool ours_only);
int begin(struct request *request, const char *verb, const char *context, int ac, char **av, const char *cwd);
int begin_step(struct request *request, spank_t sp, const char *verb, int ac, char **av, const char *cwd);
const char *answer_get(const struct answer *answer, const char *wanted);
int listen_to(const struct coprocess *process, struct answer *answer);
int converse(const struct coprocess *process, const struct request *request, struct answer *answer);
int ask(const struct coprocess *process, const struct request *request, struct answer *answer);
int consult(struct coprocess *process, const char *verb, const struct request *request);
int engage(struct coprocess *process, const char *verb, int64_t until);

/* directory.c: -1 with errno */

int make_directories(const char *path);
int make_user_directory(const char *runtime_path, const struct credentials *user);
int open_user_directory(const char *runtime_path, uid_t uid, struct statx *info);

/* submit.c, stepd.c, task.c, epilog.c: -1 where it has failed, and said why */

int check(int ac, char **av, const char *context);
int take_resolved(void);
int init_step(spank_t sp, int ac, char **av);
int finish(spank_t sp, int ac, char **av);
int init_task(spank_t sp, int ac, char **av);
int clean_up_job(spank_t sp, int ac, char **av);

#endif
