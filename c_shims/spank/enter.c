/* Let a task join a running container. */
#include "plugin.h"

#include "seccomp.h"

#include <sched.h>
#include <sys/prctl.h>

/* The namespaces, in the order in which setns(2) can join them: the user namespace gives the capabilities for the others. */
static const struct {
	const char *name;
	int type;
} kinds[] = {
	{ "user", CLONE_NEWUSER }, { "cgroup", CLONE_NEWCGROUP }, { "mnt", CLONE_NEWNS },
	{ "ipc", CLONE_NEWIPC },   { "uts", CLONE_NEWUTS },       { "net", CLONE_NEWNET },
};
enum { USER = 0, MOUNT = 2 };

/* Assign the descriptors to the kinds of namespaces. A kind without a descriptor gets -1: the task keeps its own namespace. */
static int sort_descriptors(struct step *step, const struct answer *answer, int fds[LENGTH(kinds)])
{
	const char *key, *value;
	size_t used = 0;

	for (size_t i = 0; i < LENGTH(kinds); i++)
		fds[i] = -1;
	for (size_t at = 0; answer_next(answer, &at, &key, &value);) {
		size_t kind = 0;
		if (strcmp(key, "ns") != 0)
			continue;
		while (kind < LENGTH(kinds) && strcmp(kinds[kind].name, value) != 0)
			kind++;
		if (kind == LENGTH(kinds) || used == answer->fd_count)
			return fail(step, "the helper sent no descriptor for the namespace %s", value);
		fds[kind] = answer->fds[used++];
	}
	return 0;
}

/* Check that a descriptor is not the mount namespace of this task: whatever the helper sends, a task must not run in the mount
 * namespace of the host. */
static bool is_other_mount_namespace(int fd)
{
	struct stat other, current;

	return fd >= 0 && fstat(fd, &other) == 0 && stat("/proc/self/ns/mnt", &current) == 0 &&
	       (other.st_ino != current.st_ino || other.st_dev != current.st_dev);
}

int enter(struct step *step, const struct answer *answer)
{
	const char *workdir = answer_get(answer, "workdir"), *origin = answer_get(answer, "workdir_by");
	int fds[LENGTH(kinds)];

	if (sort_descriptors(step, answer, fds) < 0)
		return -1;
	if (!is_other_mount_namespace(fds[MOUNT]))
		return fail(step, "the helper sent no mount namespace of a container: %s", strerror(EBADMSG));
	/* Until exec, this process is a copy of slurmstepd, which root in the container could trace: clear the dumpable flag.
	 * setns(2) does not set it again. */
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
		return fail(step, "cannot clear PR_SET_DUMPABLE: %s", strerror(errno));
	if (penroot_withhold_descriptors() < 0)
		return fail(step, "cannot list the open descriptors: %s", strerror(errno));
	if (answer_get(answer, "keyring") && penroot_renew_keyring() < 0)
		return fail(step, "cannot create a session keyring: %s", strerror(errno));
	for (size_t i = 0; i < LENGTH(kinds); i++) {
		if (fds[i] >= 0 && setns(fds[i], kinds[i].type) < 0)
			return fail(step, "cannot setns to the %s namespace: %s", kinds[i].name, strerror(errno));
	}
	if (workdir && chdir(workdir) < 0)
		return fail(step, "cannot enter the working directory in the container (%s): %s: %s",
			    origin ? origin : "--container-workdir", workdir, strerror(errno));
	/* A container without a user namespace is root's (ENROOT_ALLOW_SUPERUSER). Root keeps all privileges in it. */
	if (fds[USER] < 0 && geteuid() == 0)
		return 0;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return fail(step, "cannot set PR_SET_NO_NEW_PRIVS: %s", strerror(errno));
	if (!answer_get(answer, "root") && penroot_drop_capabilities() < 0)
		return fail(step, "cannot drop capabilities: %s", strerror(errno));
	return penroot_install_filter() < 0 ? fail(step, "cannot install the seccomp filter: %s", strerror(errno)) : 0;
}
