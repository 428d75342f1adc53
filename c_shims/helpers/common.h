/* What the static helper programs share: failures, namespaces, paths beneath a root.
 *
 * They run where there is nothing else, so each is one static file. A failed
 * call ends the program with one line that names the call's object, err(3).
 */
#ifndef PENROOT_COMMON_H
#define PENROOT_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#define CLEANUP(function) __attribute__((cleanup(function)))
#define AUTO_CLOSE CLEANUP(close_fd) int
#define AUTO_FREE CLEANUP(free_text) char *
#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))

/* Where something is made: on file systems of the container's own; also in a tree of the host that a path without
 * symlinks leads to; wherever a path leads. */
enum place { OWN, NAMED, ANYWHERE };

void close_fd(int *fd);
void free_text(char **text);
void close_dir(void *dir); /* a DIR ** */

char *text(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* All of a file or pipe, up to 64 MiB, with a NUL after it. Returns NULL with errno. */
char *read_all(int fd, size_t *length);
bool write_all(int fd, const void *data, size_t length);

/* The value of "--name VALUE" or "--name=VALUE" at argv[*at], else NULL; *at moves beyond it. */
const char *option(char **argv, int *at, const char *name);

/* namespaces(7); each ends the program where the kernel refuses, and says what the administrator can change. */
void enter_user(uid_t uid, gid_t gid);
void enter_namespaces(int flags);
void keep_capabilities(void);

/* fork(2), where the parent passes signals on to the child and ends as it ended. Returns in the child. */
void fork_and_forward(void);
/* The same for a child that was forked already: its exit status, 128 + N for signal N. Calls before(argument) in between. */
int wait_and_forward(pid_t child);
void catch_signals(void);
void release_signals(void);

/* Paths beneath the open directory root: no symlink and no ".." leads out of it. Return -1 with errno. */
int open_in(int root, const char *path, int flags);
int create_in(int root, const char *path, mode_t type, mode_t mode, enum place place);
int open_root(const char *path);
/* To read: a regular file of the container's, or of the host's where no symlink leads there. */
int open_regular_in(int root, const char *path);
/* The same without a root. */
int open_regular(const char *path);
/* Whether an open file is of the root's own mount, or of a tmpfs that is mounted beneath it only: no tree of the host. */
bool is_own(int root, int fd);

/* ${NAME}, ${NAME:-default} and $NAME replaced from the environment. Ends the program for "${" without "}". */
char *substitute(const char *text);

/* Deletes what is beneath a directory, whatever its modes, on one file system. */
bool delete_beneath(int directory);

#endif
