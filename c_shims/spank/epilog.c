/* Clean up at the end of a job, as root: in slurmd, or in the slurmstepd of the extern step. In slurmd, the plugin must not return a
 * failure, which would drain the node. */
#include "plugin.h"

#include <dirent.h>
#include <grp.h>
#include <pwd.h>

/* How long root waits for the user's process: less than Slurm waits. */
enum { EPILOG_WAIT_MS = 5000 };

/* If the directory has more names, root stops reading, and leaves the search for the job's names to the user's process. */
enum { MAX_NAMES = 100000 };

/* Check whether the job may have left a container: for each container of a job, RUNTIME_PATH/UID has a name with the job id. */
static bool has_left_containers(struct step *step)
{
	char prefix[32];
	struct statx info;
	size_t length = (size_t)snprintf(prefix, sizeof(prefix), "pyxis_%u", step->job_id);
	bool is_found = false;
	unsigned int count = 0;

	cleanup(close_fd) int path = open_user_directory(step, &info);
	cleanup(close_fd) int fd = path < 0 ? -1 : openat(path, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *directory = fd < 0 ? NULL : fdopendir(fd);
	if (!directory)
		return false;
	(void)release_fd(&fd); /* closedir() closes it */
	for (struct dirent *entry; !is_found && (entry = readdir(directory));) {
		const char *name = entry->d_name;
		bool is_of_job = has_prefix(name, prefix) && (name[length] == '.' || name[length] == '_');
		is_found = is_of_job || ++count > MAX_NAMES;
	}
	(void)closedir(directory);
	return is_found;
}

/* Look up the user: Slurm gives only the user id here. For a user who is no longer known, use the group of the user's
 * directory. */
static int get_user(struct step *step, struct request *request)
{
	struct credentials *user = &step->job;
	const struct passwd *entry = getpwuid(user->uid);
	struct statx info;

	request_add(request, "environ", "HOME=%s", entry ? entry->pw_dir : "/");
	if (!entry) {
		cleanup(close_fd) int fd = open_user_directory(step, &info);
		user->gid = info.stx_gid;
		return fd < 0 || info.stx_uid != user->uid ? -1 : 0;
	}
	user->gid = entry->pw_gid;
	(void)getgrouplist(entry->pw_name, entry->pw_gid, NULL, &user->group_count);
	user->groups = calloc((size_t)user->group_count + 1, sizeof(gid_t));
	if (!user->groups)
		return -1;
	return getgrouplist(entry->pw_name, entry->pw_gid, user->groups, &user->group_count) < 0 ? -1 : 0;
}

int clean_up_job(struct step *step)
{
	cleanup(request_free) struct request request = { 0 };
	cleanup(helper_free) struct helper process = HELPER_NONE;
	spank_err_t rc;

	if ((rc = get_item(step, S_JOB_UID, &step->job.uid)) != ESPANK_SUCCESS ||
	    (rc = get_item(step, S_JOB_ID, &step->job_id)) != ESPANK_SUCCESS)
		return fail(step, "cannot get the job from Slurm: %s", spank_strerror(rc));
	if (!has_left_containers(step))
		return 0;
	begin_request(step, &request, "epilog", spank_context() == S_CTX_REMOTE ? "stepd" : "epilog", "/");
	if (get_user(step, &request) < 0)
		return fail(step, "cannot look up user %u", (unsigned int)step->job.uid);
	request_add(&request, "jobid", "%u", step->job_id);
	request_add(&request, "uid", "%u", (unsigned int)step->job.uid);
	if (start_as_user(step, &process, "epilog", deadline_in_ms(EPILOG_WAIT_MS)) < 0)
		return -1;
	return ask_and_wait(step, &process, "epilog", &request);
}
