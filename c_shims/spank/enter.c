#define _GNU_SOURCE
#include "enter.h"
#include "seccomp.h"

#include <errno.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef CLONE_NEWCGROUP
#define CLONE_NEWCGROUP 0x02000000
#endif

/* The user namespace first: it gives the capabilities that the others ask for, setns(2). */
const char *const namespace_names[NAMESPACE_COUNT] = { "user", "cgroup", "mnt", "ipc", "uts", "net" };
static const int namespace_types[NAMESPACE_COUNT] = { CLONE_NEWUSER, CLONE_NEWCGROUP, CLONE_NEWNS,
						      CLONE_NEWIPC,  CLONE_NEWUTS,    CLONE_NEWNET };

/* As `penroot start` does. Root of the namespace keeps its capabilities, as that is what
 * --container-remap-root asks for. */
static int drop_capabilities(void)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = { { 0 } };

	if (geteuid() == 0)
		return 0;
	for (int capability = 0; prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0; capability++) {
		if (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0)
			return -1;
	}
	return (int)syscall(SYS_capset, &header, none);
}

/* A task that is asked into a container must not stay where it is, whatever is handed to it. */
static bool leads_away(int fd)
{
	struct stat there, here;

	return fd >= 0 && fstat(fd, &there) == 0 && stat("/proc/self/ns/mnt", &here) == 0 &&
	       (there.st_ino != here.st_ino || there.st_dev != here.st_dev);
}

int enter(const int fds[NAMESPACE_COUNT], const char *workdir, char *failed, size_t failed_size)
{
	(void)snprintf(failed, failed_size, "the helper sent no mount namespace of a container");
	errno = EBADMSG;
	if (!leads_away(fds[MOUNT_NAMESPACE]))
		return -1;
	/* Who is root in the container could trace this process, a copy of slurmstepd, until it executes its program.
	 * setns(2) leaves this as it is. */
	(void)snprintf(failed, failed_size, "prctl PR_SET_DUMPABLE");
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
		return -1;
	for (int i = 0; i < NAMESPACE_COUNT; i++) {
		if (fds[i] >= 0 && setns(fds[i], namespace_types[i]) < 0) {
			(void)snprintf(failed, failed_size, "setns %s", namespace_names[i]);
			return -1;
		}
	}
	if (workdir && chdir(workdir) < 0) {
		(void)snprintf(failed, failed_size, "cannot enter the working directory in the container (--container-workdir): %s", workdir);
		return -1;
	}
	/* Only a container of the superuser's has no user namespace, ENROOT_ALLOW_SUPERUSER: he keeps all that he may. */
	if (fds[0] < 0 && geteuid() == 0)
		return 0;
	(void)snprintf(failed, failed_size, "prctl PR_SET_NO_NEW_PRIVS");
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return -1;
	(void)snprintf(failed, failed_size, "drop capabilities");
	if (drop_capabilities() < 0)
		return -1;
	(void)snprintf(failed, failed_size, "seccomp");
	return penroot_install_filter();
}
