/* The Python process that decides, and the messages that it is sent and answers with.
 *
 * A message is a little-endian uint32 with the length of what follows: KEY and
 * VALUE strings in turn, each with its NUL. See README.md.
 */
#ifndef PENROOT_COPROCESS_H
#define PENROOT_COPROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>

enum { MESSAGE_LIMIT = 64 << 20, WARY_LIMIT = 64 << 10, FDS_LIMIT = 8 };

/* Who the process is to be: only slurmstepd, which is root, has to change. */
struct credentials {
	uid_t uid;
	gid_t gid;
	gid_t *groups;
	int group_count;
};

/* A process and our connection to it: the socket, what it wrote to stderr, its pid if it is our child, and a pidfd,
 * which becomes readable when it ends. Where we are root and it is the user's, we wait for nothing of it longer than
 * `until`, and are `wary`: we take short answers, and no descriptors: to close one may last, of a file of his FUSE. */
struct coprocess {
	int socket;
	int log;
	pid_t pid;
	int end;
	int64_t until;
	bool wary;
};

/* A moment to wait until; FOREVER is none. */
#define FOREVER INT64_C(0)
int64_t in_milliseconds(int64_t milliseconds);

#define COPROCESS_NONE ((struct coprocess){ .socket = -1, .log = -1, .pid = -1, .end = -1 })

/* Which process, among all that ever had its number: `started` is in ticks after the boot, proc(5). */
struct identity {
	pid_t pid;
	unsigned long long started;
};

/* A request while it is written; `stream` is NULL once it is finished. */
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

static inline void close_fd(int *fd)
{
	if (*fd >= 0)
		(void)close(*fd);
	*fd = -1;
}

void request_free(struct request *request);
void answer_free(struct answer *answer);
void coprocess_free(struct coprocess *process);

#define cleanup(f) __attribute__((cleanup(f)))

/* All return 0, or -1 with errno; what cannot be written shows at request_finish. */
int request_begin(struct request *request);
void request_add(struct request *request, const char *key, const char *value);
void request_add_number(struct request *request, const char *key, unsigned long value);
int request_finish(struct request *request);
int request_send(const struct request *request, const struct coprocess *process);

/* Receive one answer. ECONNRESET when the process is gone, ETIMEDOUT when it has taken too long. */
int answer_receive(struct answer *answer, const struct coprocess *process);

/* The pairs in turn: start with *at = 0. False after the last one. */
bool answer_next(const struct answer *answer, size_t *at, const char **key, const char **value);

/* Start the process that `verb` names. `control` is its fd 4, or -1. With `as` it is our child
 * and becomes that user for good, and we are wary; without, it keeps the user that we are. `detached`: it is
 * nobody's child and has its own session, so that it outlives the task. */
int coprocess_start(struct coprocess *process, const char *verb, int control, const struct credentials *as, bool detached);

/* Wait for the end of a process that is our child. One that has taken too long is killed: ETIMEDOUT. */
int coprocess_wait(struct coprocess *process);

/* Connect to the process `who`, which was started with the other end of `control`: it gets one end of a new pair of
 * sockets that way. There is no address, so nobody else can answer there. ESRCH where it is gone. */
int coprocess_connect(struct coprocess *process, int control, const struct identity *who, int64_t until, bool wary);

/* Wait until the connected process has left its cgroup, which is after its sockets are closed; it is killed where
 * it takes too long. */
int coprocess_wait_end(const struct coprocess *process);

/* What it wrote to stderr, line by line; false if that is nothing. */
bool coprocess_each_log_line(const struct coprocess *process, void (*print)(const char *line));

#endif
