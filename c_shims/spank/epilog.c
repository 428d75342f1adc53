/* The end of a job, in slurmd as root. Nothing that goes wrong here may reach slurmd: it would drain the node. */
#define _GNU_SOURCE
#include "plugin.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* How long root waits for the user's process, in milliseconds: less than Slurm's patience. */
enum { EPILOG_WAIT = 5000 };

enum { NAMES_LIMIT = 100000 };

/* Whether the job has left something: what may stay is noted in RUNTIME_PATH/UID under its name. */
static bool anything_left(const char *runtime_path, uid_t uid, uint32_t job_id)
{
	char prefix[32];
	struct statx info;
	bool found = false;

	int length = snprintf(prefix, sizeof(prefix), "pyxis_%u", job_id);
	cleanup(close_fd) int there = open_user_directory(runtime_path, uid, &info);
	int fd = there < 0 ? -1 : openat(there, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *directory = fd < 0 ? NULL : fdopendir(fd);
	if (!directory) {
		close_fd(&fd);
		return false;
	}
	/* Where there are very many the user's process looks. */
	unsigned int read = 0;
	for (struct dirent *entry; !found && (entry = readdir(directory));)
		found = ++read > NAMES_LIMIT ||
			(strncmp(entry->d_name, prefix, (size_t)length) == 0 && strchr("._", entry->d_name[length]) &&
			 entry->d_name[length]);
	(void)closedir(directory);
	return found;
}

/* Who the user is: of the job itself, only the number is known here. Whoever has left the site since has the
 * group to which his directory was given. */
static int get_user(const char *runtime_path, struct credentials *user, char *home, size_t home_size)
{
	const struct passwd *entry = getpwuid(user->uid);
	struct statx info;
	int count = 0;

	if (!entry) {
		cleanup(close_fd) int fd = open_user_directory(runtime_path, user->uid, &info);
		if (fd < 0 || info.stx_uid != user->uid)
			return -1;
		user->gid = info.stx_gid;
		(void)snprintf(home, home_size, "HOME=/");
		return 0;
	}
	(void)snprintf(home, home_size, "HOME=%s", entry->pw_dir);
	user->gid = entry->pw_gid;
	(void)getgrouplist(entry->pw_name, entry->pw_gid, NULL, &count);
	user->groups = calloc((size_t)count + 1, sizeof(gid_t));
	if (!user->groups || getgrouplist(entry->pw_name, entry->pw_gid, user->groups, &count) < 0)
		return -1;
	user->group_count = count;
	return 0;
}

int clean_up_job(spank_t sp, int ac, char **av)
{
	cleanup(request_free) struct request request = { 0 };
	const char *directory = runtime_path(ac, av);
	char home[PATH_MAX];
	spank_err_t rc;

	if ((rc = spank_get_item(sp, S_JOB_UID, &step.job.uid)) != ESPANK_SUCCESS ||
	    (rc = spank_get_item(sp, S_JOB_ID, &step.job_id)) != ESPANK_SUCCESS)
		return fail("cannot learn about the job: %s", spank_strerror(rc));
	if (!anything_left(directory, step.job.uid, step.job_id))
		return 0;
	if (get_user(directory, &step.job, home, sizeof(home)) < 0)
		return fail("cannot learn about user %u", (unsigned int)step.job.uid);
	if (begin(&request, "epilog", "epilog", ac, av, "/") < 0)
		return fail("out of memory");
	request_add(&request, "environ", home);
	request_add_number(&request, "jobid", step.job_id);
	request_add_number(&request, "uid", step.job.uid);
	if (request_finish(&request) < 0)
		return fail("cannot write a message: %s", strerror(errno));
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;
	if (engage(&process, "epilog", in_milliseconds(EPILOG_WAIT)) < 0)
		return -1;
	return consult(&process, "epilog", &request);
}
