/* The end of a job, as root: in slurmd, where nothing that goes wrong may reach it, as it would drain the node, and in
 * the slurmstepd of the extern step. */
#include "plugin.h"

#include <dirent.h>
#include <grp.h>
#include <pwd.h>

/* How long root waits for the user's process, in milliseconds: less than Slurm's patience. */
enum { EPILOG_WAIT = 5000 };

/* Where there are more the user's process looks. */
enum { NAMES_LIMIT = 100000 };

/* Whether the job has left something: what may stay is noted in RUNTIME_PATH/UID under its name. */
static bool anything_left(struct step *step)
{
	char prefix[32];
	struct statx info;
	size_t length = (size_t)snprintf(prefix, sizeof(prefix), "pyxis_%u", step->job_id);
	bool found = false;
	unsigned int read = 0;

	cleanup(close_fd) int path = open_user_directory(step, &info);
	cleanup(close_fd) int fd = path < 0 ? -1 : openat(path, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *directory = fd < 0 ? NULL : fdopendir(fd);
	if (!directory)
		return false;
	(void)keep_fd(&fd); /* it is the directory's now */
	for (struct dirent *entry; !found && (entry = readdir(directory));) {
		const char *name = entry->d_name;
		bool its = strncmp(name, prefix, length) == 0 && (name[length] == '.' || name[length] == '_');
		found = its || ++read > NAMES_LIMIT;
	}
	(void)closedir(directory);
	return found;
}

/* Who the user is: of the job itself, only the number is known here. Whoever has left the site since has the
 * group to which his directory was given. */
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
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;
	spank_err_t rc;

	if ((rc = get_item(step, S_JOB_UID, &step->job.uid)) != ESPANK_SUCCESS ||
	    (rc = get_item(step, S_JOB_ID, &step->job_id)) != ESPANK_SUCCESS)
		return fail(step, "cannot learn about the job: %s", spank_strerror(rc));
	if (!anything_left(step))
		return 0;
	begin_request(step, &request, "epilog", spank_context() == S_CTX_REMOTE ? "stepd" : "epilog", "/");
	if (get_user(step, &request) < 0)
		return fail(step, "cannot learn about user %u", (unsigned int)step->job.uid);
	request_add(&request, "jobid", "%u", step->job_id);
	request_add(&request, "uid", "%u", (unsigned int)step->job.uid);
	if (start_as_user(step, &process, "epilog", in_milliseconds(EPILOG_WAIT)) < 0)
		return -1;
	return consult(step, &process, "epilog", &request);
}
