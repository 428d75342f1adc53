/* A process becomes a member of a container that runs already. */
#ifndef PENROOT_ENTER_H
#define PENROOT_ENTER_H

#include <stddef.h>

/* Namespaces in the order in which they can be joined. */
enum { NAMESPACE_COUNT = 6, MOUNT_NAMESPACE = 2 };
extern const char *const namespace_names[NAMESPACE_COUNT];

/* Join the namespaces of which `fds` has a descriptor (-1: stay where we are; not with the mounts), go to `workdir`
 * unless it is NULL and give up what a container's process must not have. Returns 0, or -1 with
 * errno and the call and its object in `failed`. */
int enter(const int fds[NAMESPACE_COUNT], const char *workdir, char *failed, size_t failed_size);

#endif
