/* A task becomes a member of a container that runs already. */
#include "plugin.h"

#include "seccomp.h"

#include <sched.h>
#include <sys/prctl.h>

/* In the order in which they can be joined, setns(2): the user namespace gives the capabilities for the others. */
static const struct {
	const char *name;
	int type;
} kinds[] = {
	{ "user", CLONE_NEWUSER }, { "cgroup", CLONE_NEWCGROUP }, { "mnt", CLONE_NEWNS },
	{ "ipc", CLONE_NEWIPC },   { "uts", CLONE_NEWUTS },       { "net", CLONE_NEWNET },
};
enum { USER = 0, MOUNT = 2 };

/* Which descriptor is of which namespace, -1 where we stay where we are. */
static int sort(struct step *step, const struct answer *answer, int fds[LENGTH(kinds)])
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
			return fail(step, "the helper named a namespace that it did not send: %s", value);
		fds[kind] = answer->fds[used++];
	}
	return 0;
}

/* A task that is asked into a container must not stay where it is, whatever is handed to it. */
static bool leads_away(int fd)
{
	struct stat there, here;

	return fd >= 0 && fstat(fd, &there) == 0 && stat("/proc/self/ns/mnt", &here) == 0 &&
	       (there.st_ino != here.st_ino || there.st_dev != here.st_dev);
}

int enter(struct step *step, const struct answer *answer)
{
	const char *workdir = answer_get(answer, "workdir"), *by = answer_get(answer, "workdir_by");
	int fds[LENGTH(kinds)];

	if (sort(step, answer, fds) < 0)
		return -1;
	if (!leads_away(fds[MOUNT]))
		return fail(step, "the helper sent no mount namespace of a container: %s", strerror(EBADMSG));
	/* Who is root in the container could trace this process, a copy of slurmstepd, until it executes its program.
	 * setns(2) leaves this as it is. */
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
		return fail(step, "prctl PR_SET_DUMPABLE: %s", strerror(errno));
	if (penroot_withhold_descriptors() < 0)
		return fail(step, "cannot look through the open descriptors: %s", strerror(errno));
	if (answer_get(answer, "keyring") && penroot_renew_keyring() < 0)
		return fail(step, "cannot create a session keyring: %s", strerror(errno));
	for (size_t i = 0; i < LENGTH(kinds); i++) {
		if (fds[i] >= 0 && setns(fds[i], kinds[i].type) < 0)
			return fail(step, "setns %s: %s", kinds[i].name, strerror(errno));
	}
	if (workdir && chdir(workdir) < 0)
		return fail(step, "cannot enter the working directory in the container (%s): %s: %s", by ? by : "--container-workdir",
			    workdir, strerror(errno));
	/* Only a container of the superuser's has no user namespace, ENROOT_ALLOW_SUPERUSER: he keeps all that he may. */
	if (fds[USER] < 0 && geteuid() == 0)
		return 0;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return fail(step, "prctl PR_SET_NO_NEW_PRIVS: %s", strerror(errno));
	if (!answer_get(answer, "root") && penroot_drop_capabilities() < 0)
		return fail(step, "drop capabilities: %s", strerror(errno));
	return penroot_install_filter() < 0 ? fail(step, "seccomp: %s", strerror(errno)) : 0;
}
