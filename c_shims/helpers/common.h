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

/* An option: a flag, whose bit is set, or one with a value, "--name VALUE" or "--name=VALUE", or a list of values. */
struct word {
	const char *name;
	int bit;
	const char **value;
	const char ***list; /* where the next value goes */
};

enum { HELP = 1 }; /* the bit of --help and -h */

/* Where the options from argv[at] on end, by "--" or before the first word that is none. Ends the program for one that
 * is not among `words`, of which the last has no name. */
int parse_options(char **argv, int at, const struct word *words, int *flags);

/* namespaces(7); each ends the program where the kernel refuses, and says what the administrator can change. */
void enter_user(uid_t uid, gid_t gid);
void enter_namespaces(int flags);
void keep_capabilities(void);

/* fork(2) of a child to which the parent passes signals on. */
pid_t fork_heard(void);
/* Wait for it: its exit status, 128 + N for signal N. */
int wait_and_forward(pid_t child);
/* End by that signal too; returns the status of one that ended by itself. */
int end_as(int status);
/* All of that; returns in the child only, which ends with its parent. */
void fork_and_forward(void);

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
