/* Functions of the SPANK plugin and the static programs: close descriptors at the end of a block, read small files of /proc. */
#ifndef PENROOT_PROC_H
#define PENROOT_PROC_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define cleanup(f) __attribute__((cleanup(f)))

static inline void close_fd(int *fd)
{
	if (*fd >= 0)
		(void)close(*fd);
	*fd = -1;
}

/* Read at most `size` - 1 bytes of a file into `text`, and add a NUL. Returns 0, or -1 with errno. */
static inline int read_file(const char *path, char *text, size_t size)
{
	size_t length = 0;
	ssize_t n;
	cleanup(close_fd) int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return -1;
	while (length < size - 1 && (n = read(fd, text + length, size - 1 - length)) != 0) {
		if (n > 0)
			length += (size_t)n;
		else if (errno != EINTR)
			return -1;
	}
	text[length] = '\0';
	return 0;
}

/* Fields of proc_pid_stat(5). `started` is in ticks after the boot. */
struct process_stat {
	char state;
	unsigned int flags;
	unsigned long long started;
};

/* Read /proc/PID/stat. Returns false if the process is gone, or hidden by the mount options of /proc. */
static inline bool read_stat(int pid, struct process_stat *stat)
{
	char path[32], text[1024];

	*stat = (struct process_stat){ 0 };
	(void)snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	/* The program name, in parentheses, may contain anything. Fields 3, 9 and 22 follow it. */
	const char *rest = read_file(path, text, sizeof(text)) < 0 ? NULL : strrchr(text, ')');
	return rest && sscanf(rest, ") %c %*d %*d %*d %*d %*d %u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &stat->state,
			      &stat->flags, &stat->started) == 3;
}

#endif
