/* Inspect all processes that root of a container can inspect, to find processes outside of the container.
 *
 * spy SECONDS prints each line once: the programs of the inspected processes, and the content of the file $MARK if it is
 * beneath their root directory, their working directory, or a directory that they have open.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static void print_once(const char *line)
{
	static char printed[256][300];

	for (size_t i = 0; i < 256; i++) {
		if (strcmp(printed[i], line) == 0)
			return;
		if (!printed[i][0]) {
			snprintf(printed[i], sizeof(printed[i]), "%s", line);
			printf("%s\n", line);
			fflush(stdout);
			return;
		}
	}
}

static void try(const char *pid, const char *entry)
{
	const char *mark = getenv("MARK");
	char path[600], text[256], line[300];
	int fd;
	ssize_t n;

	if (!mark)
		return;
	snprintf(path, sizeof(path), "/proc/%s/%s%s", pid, entry, mark);
	fd = open(path, O_RDONLY | O_NONBLOCK);
	if (fd < 0)
		return;
	n = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (n > 0) {
		snprintf(line, sizeof(line), "%.*s", (int)n, text);
		print_once(line);
	}
}

static void look_at(const char *pid)
{
	char path[300], program[256], line[300];
	ssize_t n;
	DIR *fds;

	snprintf(path, sizeof(path), "/proc/%s/exe", pid);
	n = readlink(path, program, sizeof(program) - 1);
	if (n < 0)
		return;
	program[n] = '\0';
	snprintf(line, sizeof(line), "sees %s", program);
	print_once(line);
	try(pid, "root");
	try(pid, "cwd");
	snprintf(path, sizeof(path), "/proc/%s/fd", pid);
	fds = opendir(path);
	for (struct dirent *fd; fds && (fd = readdir(fds));) {
		snprintf(path, sizeof(path), "fd/%s", fd->d_name);
		if (fd->d_name[0] != '.')
			try(pid, path);
	}
	if (fds)
		closedir(fds);
}

int main(int argc, char **argv)
{
	struct timespec now, began;
	double seconds = argc > 1 ? atof(argv[1]) : 0;
	char self[32];

	snprintf(self, sizeof(self), "%d", getpid());
	clock_gettime(CLOCK_MONOTONIC, &began);
	printf("looking\n");
	fflush(stdout);
	do {
		DIR *processes = opendir("/proc");

		for (struct dirent *one; processes && (one = readdir(processes));) {
			if (one->d_name[0] >= '0' && one->d_name[0] <= '9' && strcmp(one->d_name, self))
				look_at(one->d_name);
		}
		if (processes)
			closedir(processes);
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while ((double)(now.tv_sec - began.tv_sec) + (double)(now.tv_nsec - began.tv_nsec) / 1e9 < seconds);
	return 0;
}
