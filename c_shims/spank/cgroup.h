/* In which control groups a process is, and how another one gets there: cgroups(7). */
#ifndef PENROOT_CGROUP_H
#define PENROOT_CGROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { CGROUPS_SIZE = 8192 };

/* The text of /proc/PID/cgroup, all of it. Returns 0, or -1 with errno. */
int cgroup_read(pid_t pid, char *text, size_t size);

/* Move a process to the groups of such a text; where one has gone since, as that of a task, to the one above it.
 * Returns 0 if it is in all of them, or -1 with errno. */
int cgroup_move(pid_t pid, const char *text);

/* Whether a process is in the groups of such a text, and all that it may is `uid`. */
bool cgroup_holds(pid_t pid, const char *text, uid_t uid);

#endif
