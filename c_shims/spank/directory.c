/* RUNTIME_PATH/UID, where the steps of a user on a node find each other. Root creates this directory. Later root only lists it. */
#include "plugin.h"

/* Check that only root can add entries to a directory. With `is_parent`, the sticky bit is enough: then only root can replace the
 * next directory of the path, which belongs to root. */
static bool is_owned_by_root(const char *path, bool is_parent)
{
	struct stat link, info;

	if (lstat(path, &link) < 0 || stat(path, &info) < 0 || !S_ISDIR(info.st_mode))
		return false;
	bool is_closed = !(info.st_mode & (S_IWGRP | S_IWOTH)) || (is_parent && info.st_mode & S_ISVTX);
	return link.st_uid == 0 && info.st_uid == 0 && is_closed;
}

/* Create a directory and its missing parents with mode 755, whatever the umask is. For root, existing directories must belong to
 * root. */
int make_directories(const char *path)
{
	char part[PATH_MAX];

	for (const char *end = path; *end;) {
		end += 1 + strcspn(end + 1, "/");
		(void)snprintf(part, sizeof(part), "%.*s", (int)(end - path), path);
		if (mkdir(part, 0755) == 0) {
			if (chmod(part, 0755) < 0)
				return -1;
		} else if (errno != EEXIST) {
			return -1;
		} else if (geteuid() == 0 && !is_owned_by_root(part, *end)) {
			return set_errno(EPERM);
		}
	}
	return 0;
}

static int get_path(struct step *step, char path[PATH_MAX])
{
	int length = snprintf(path, PATH_MAX, "%s/%u", runtime_path(step), (unsigned int)step->job.uid);

	return length < PATH_MAX ? 0 : set_errno(ENAMETOOLONG);
}

/* Open the directory with O_PATH. Fails with EXDEV if the user has mounted a file system over it. Such a file system is not
 * accessed: it may be a FUSE that never answers. */
int open_user_directory(struct step *step, struct statx *info)
{
	char path[PATH_MAX];
	struct statx parent;

	if (get_path(step, path) < 0)
		return -1;
	cleanup(close_fd) int fd = open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0 || statx(AT_FDCWD, runtime_path(step), 0, STATX_BASIC_STATS, &parent) < 0 ||
	    statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_BASIC_STATS, info) < 0)
		return -1;
	bool is_mounted_over = info->stx_dev_major != parent.stx_dev_major || info->stx_dev_minor != parent.stx_dev_minor;
	return is_mounted_over ? set_errno(EXDEV) : release_fd(&fd);
}

/* Create RUNTIME_PATH/UID with mode 0700. If it exists, root has created it, because its parent belongs to root. */
int make_user_directory(struct step *step)
{
	char path[PATH_MAX];
	struct statx info;

	if (get_path(step, path) < 0 || make_directories(runtime_path(step)) < 0 || (mkdir(path, 0700) < 0 && errno != EEXIST))
		return -1;
	cleanup(close_fd) int fd = open_user_directory(step, &info);
	if (fd < 0)
		return -1;
	/* An existing directory may still belong to root: another step may be between its mkdir and its chown. */
	bool is_changed = S_ISDIR(info.stx_mode) && info.stx_uid == 0 && lchown(path, step->job.uid, step->job.gid) == 0;
	return is_changed || (S_ISDIR(info.stx_mode) && info.stx_uid == step->job.uid) ? 0 : set_errno(EEXIST);
}
