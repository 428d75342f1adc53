/* Remove privileges of a process before it executes a program of an image. The Python extension and the SPANK plugin include this
 * header. */
#ifndef PENROOT_SECCOMP_H
#define PENROOT_SECCOMP_H

#include "linux.h"

#include <asm/ioctls.h>
#include <dirent.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/keyctl.h>
#include <linux/magic.h>
#include <linux/seccomp.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/vfs.h>

/* Install PENROOT_FILTER, which enroot_py/base/filter.py generates and explains. The caller must have set
 * PR_SET_NO_NEW_PRIVS. Returns 0, or -1 with errno. */
static inline int penroot_install_filter(void)
{
	struct sock_filter filter[] = PENROOT_FILTER;
	struct sock_fprog program = { .filter = filter, .len = sizeof(filter) / sizeof(filter[0]) };

	/* SPEC_ALLOW: this filter isolates nothing, so the program should keep speculative execution. By default, kernels before
	 * 5.16 disable it for a process with a filter. */
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program);
}

static inline int penroot_drop_capabilities(void)
{
	unsigned long capability = 0;

	while (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0)
		capability++;
	return errno == EINVAL ? linux_capset(0, 0, 0) : -1; /* EINVAL: the loop has passed the kernel's last capability */
}

/* Check whether a program could leave the container through a descriptor of the caller: through a directory or an O_PATH descriptor
 * (openat(2), /proc/self/fd), or through a namespace (setns(2)). */
static inline int penroot_leads_out(int fd, int flags)
{
	struct statfs system;
	struct stat info;

	if (flags & O_PATH)
		return 1;
	if (fstat(fd, &info) < 0)
		return 0;
	return S_ISDIR(info.st_mode) || (S_ISREG(info.st_mode) && fstatfs(fd, &system) == 0 && system.f_type == NSFS_MAGIC);
}

/* Let execve(2) close the caller's descriptors that lead out of the container. If stdin, stdout or stderr is such a descriptor,
 * /dev/null replaces it. This /dev/null is open for writing as stdin, and for reading as stdout or stderr: reads and writes fail, as
 * on a directory. Call this while /proc is the /proc of the node. Returns 0, or -1 with errno. */
static inline int penroot_withhold_descriptors(void)
{
	DIR *entries = opendir("/proc/self/fd");
	struct dirent *entry;
	int result = entries ? 0 : -1;

	while (result == 0 && (entry = readdir(entries))) {
		int fd = atoi(entry->d_name), flags = *entry->d_name == '.' ? -1 : fcntl(fd, F_GETFL), null;

		if (flags < 0 || fd == dirfd(entries) || !penroot_leads_out(fd, flags))
			continue;
		if (fd > STDERR_FILENO) {
			result = fcntl(fd, F_SETFD, FD_CLOEXEC);
			continue;
		}
		null = open("/dev/null", (fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) | O_CLOEXEC);
		result = null < 0 || dup2(null, fd) < 0 ? -1 : close(null);
	}
	if (entries)
		closedir(entries);
	return result;
}

/* Replace the caller's session keyring, keyrings(7), by a new, empty one. Returns 0, or -1 with errno. */
static inline int penroot_renew_keyring(void)
{
	/* ENOSYS: the kernel has no keyrings */
	return syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL) < 0 && errno != ENOSYS ? -1 : 0;
}

#endif
