/* Read the control groups of a process, and move another process into them: cgroups(7). */
#include "plugin.h"

int cgroup_read(pid_t pid, char *text, size_t size)
{
	char path[32];

	(void)snprintf(path, sizeof(path), "/proc/%d/cgroup", (int)pid);
	if (read_file(path, text, size) < 0)
		return -1;
	/* A truncated name may be the name of another cgroup. */
	return strlen(text) == size - 1 ? set_errno(EMSGSIZE) : 0;
}

/* Check whether a comma-separated list contains a word. */
static bool has_word(const char *list, const char *word, size_t length)
{
	for (; list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL) {
		if (strncmp(list, word, length) == 0 && strchr(",\n", list[length]))
			return true;
	}
	return false;
}

/* Find the directory of the cgroup `path` in the hierarchy of `controllers` (none: version 2). A mount shows only the cgroups
 * beneath its root. If several mounts match, use the last one, which covers the others. For the fields of a line, see
 * /proc/PID/mountinfo in proc(5). */
static int find_group(const char *controllers, const char *path, char directory[PATH_MAX])
{
	FILE *mounts = fopen("/proc/self/mountinfo", "re");
	char *line = NULL;
	size_t size = 0, length = strcspn(controllers, ",");
	bool is_found = false;

	if (!mounts)
		return -1;
	while (getline(&line, &size, mounts) > 0) {
		char root[PATH_MAX], mount_point[PATH_MAX], type[32], options[1024];
		char *rest = strstr(line, " - ");
		if (!rest || sscanf(rest, " - %31s %*s %1022s", type, options) != 2 ||
		    sscanf(line, "%*s %*s %*s %4095s %4095s", root, mount_point) != 2)
			continue;
		(void)strcat(options, "\n");
		if (length ? strcmp(type, "cgroup") != 0 || !has_word(options, controllers, length) : strcmp(type, "cgroup2") != 0)
			continue;
		size_t above = strcmp(root, "/") == 0 ? 0 : strlen(root);
		if (strncmp(path, root, above) == 0 && strchr("/", path[above]) &&
		    snprintf(directory, PATH_MAX, "%s%s", mount_point, path + above) < PATH_MAX)
			is_found = true;
	}
	free(line);
	(void)fclose(mounts);
	return is_found ? 0 : set_errno(ENOENT);
}

/* Write a process id to cgroup.procs of a cgroup. If the cgroup of a task is gone, use the cgroup of the step. */
static int enter_group(pid_t pid, char *directory)
{
	char file[PATH_MAX + 16];

	for (;;) {
		(void)snprintf(file, sizeof(file), "%s/cgroup.procs", directory);
		cleanup(close_fd) int fd = open(file, O_WRONLY | O_CLOEXEC);
		if (fd >= 0)
			return dprintf(fd, "%d\n", (int)pid) < 0 ? -1 : 0;
		char *last = strrchr(directory, '/');
		if (errno != ENOENT || !last || strncmp(last, "/task_", 6) != 0)
			return -1;
		*last = '\0';
	}
}

int cgroup_move(pid_t pid, const char *text)
{
	char now[CGROUPS_SIZE], wanted[CGROUPS_SIZE], directory[PATH_MAX];
	char *rest = wanted;

	if (cgroup_read(pid, now, sizeof(now)) < 0)
		return -1;
	if (!*text)
		return set_errno(EINVAL);
	(void)snprintf(wanted, sizeof(wanted), "%s", text);
	for (char *line; (line = strsep(&rest, "\n")) && *line;) {
		const char *same = strstr(now, line);
		if (same && (same == now || same[-1] == '\n') && strchr("\n", same[strlen(line)]))
			continue;
		/* A line is ID:CONTROLLERS:PATH. A controller can be name=systemd. */
		char *controllers = strchr(line, ':');
		char *path = controllers ? strchr(++controllers, ':') : NULL;
		if (!path)
			return set_errno(EBADMSG);
		*path++ = '\0';
		if (find_group(controllers, path, directory) < 0 || enter_group(pid, directory) < 0)
			return -1;
	}
	return 0;
}

bool cgroup_holds(pid_t pid, const char *text, uid_t uid)
{
	char file[32], status[4096], now[CGROUPS_SIZE];
	unsigned int ids[4];

	(void)snprintf(file, sizeof(file), "/proc/%d/status", (int)pid);
	if (read_file(file, status, sizeof(status)) < 0 || cgroup_read(pid, now, sizeof(now)) < 0)
		return false;
	const char *line = strstr(status, "\nUid:");
	if (!line || sscanf(line, "\nUid: %u %u %u %u", &ids[0], &ids[1], &ids[2], &ids[3]) != 4)
		return false;
	for (int i = 0; i < 4; i++) {
		if (ids[i] != uid)
			return false;
	}
	return strcmp(now, text) == 0;
}
