/* System calls under the names of their man pages, for Python, the SPANK plugin and the static programs. Each returns
 * what the system call returns, with errno.
 *
 * The calls are made by number, since a C library may be older than the kernel. mount_setattr(2) is the newest system call for
 * which penroot has no substitute, so penroot needs Linux 5.12 (FLOOR in enroot_py/base/linux.py).
 */
#ifndef PENROOT_LINUX_H
#define PENROOT_LINUX_H

#include <errno.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

/* These numbers are the same on x86-64, arm64 and most other architectures. */
enum {
	NR_pidfd_send_signal = 424,
	NR_open_tree = 428,
	NR_move_mount = 429,
	NR_fsopen = 430,
	NR_fsconfig = 431,
	NR_fsmount = 432,
	NR_pidfd_open = 434,
	NR_clone3 = 435,
	NR_close_range = 436,
	NR_openat2 = 437,
	NR_pidfd_getfd = 438,
	NR_mount_setattr = 442,
};

static inline int linux_pidfd_open(pid_t pid)
{
	return (int)syscall(NR_pidfd_open, pid, 0);
}

static inline int linux_pidfd_send_signal(int pidfd, int signal)
{
	return (int)syscall(NR_pidfd_send_signal, pidfd, signal, NULL, 0);
}

static inline int linux_pidfd_getfd(int pidfd, int fd)
{
	return (int)syscall(NR_pidfd_getfd, pidfd, fd, 0);
}

static inline int linux_open_tree(int dirfd, const char *path, unsigned int flags)
{
	return (int)syscall(NR_open_tree, dirfd, path, flags);
}

static inline int linux_move_mount(int from_dirfd, const char *from, int to_dirfd, const char *to, unsigned int flags)
{
	return (int)syscall(NR_move_mount, from_dirfd, from, to_dirfd, to, flags);
}

static inline int linux_fsopen(const char *fstype, unsigned int flags)
{
	return (int)syscall(NR_fsopen, fstype, flags);
}

static inline int linux_fsconfig(int fd, unsigned int command, const char *key, const char *value, int aux)
{
	return (int)syscall(NR_fsconfig, fd, command, key, value, aux);
}

static inline int linux_fsmount(int fd, unsigned int flags, unsigned int attributes)
{
	return (int)syscall(NR_fsmount, fd, flags, attributes);
}

static inline int linux_mount_setattr(int dirfd, const char *path, unsigned int flags, uint64_t set, uint64_t clear,
				      uint64_t propagation)
{
	struct {
		uint64_t attr_set, attr_clr, propagation, userns_fd;
	} attributes = { set, clear, propagation, 0 };

	return (int)syscall(NR_mount_setattr, dirfd, path, flags, &attributes, sizeof(attributes));
}

static inline int linux_openat2(int dirfd, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve)
{
	struct {
		uint64_t flags, mode, resolve;
	} how = { flags, mode, resolve };
	int fd, tries = 0;

	/* With RESOLVE_BENEATH or RESOLVE_IN_ROOT, a path with ".." may fail with EAGAIN if anything on the machine is renamed or
	 * mounted meanwhile: openat2(2) says to retry. */
	do {
		fd = (int)syscall(NR_openat2, dirfd, path, &how, sizeof(how));
	} while (fd < 0 && errno == EAGAIN && ++tries < 10000);
	return fd;
}

/*
 * fork(2) with `flags`. Only a process with a single thread may call this: the C library does not notice the fork. With
 * CLONE_PARENT, the child is a sibling of this process, and their parent gets the same signal when either ends.
 */
static inline int linux_clone3(uint64_t flags)
{
	struct {
		uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls;
	} arguments = { .flags = flags, .exit_signal = flags & CLONE_PARENT ? 0 : SIGCHLD };

	return (int)syscall(NR_clone3, &arguments, sizeof(arguments));
}

static inline int linux_pivot_root(const char *new_root, const char *put_old)
{
	return (int)syscall(SYS_pivot_root, new_root, put_old);
}

static inline int linux_close_range(unsigned int first, unsigned int last, unsigned int flags)
{
	return (int)syscall(NR_close_range, first, last, flags);
}

static inline int linux_prctl(int operation, unsigned long a, unsigned long b, unsigned long c, unsigned long d)
{
	return prctl(operation, a, b, c, d);
}

static inline int linux_capset(uint64_t effective, uint64_t permitted, uint64_t inheritable)
{
	struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct data[2] = {
		{ (uint32_t)effective, (uint32_t)permitted, (uint32_t)inheritable },
		{ (uint32_t)(effective >> 32), (uint32_t)(permitted >> 32), (uint32_t)(inheritable >> 32) },
	};

	return (int)syscall(SYS_capset, &header, data);
}

static inline int linux_capget_permitted(uint64_t *permitted)
{
	struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct data[2] = { 0 };

	if (syscall(SYS_capget, &header, data) < 0)
		return -1;
	*permitted = data[0].permitted | (uint64_t)data[1].permitted << 32;
	return 0;
}

#endif
