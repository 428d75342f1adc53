/* Why execve(2) fails for a file: it or the interpreter that its #! line or its ELF header names cannot run.
 *
 * For a start after a failure, and for a task of Slurm before slurmstepd executes its program. Other
 * formats and architectures give no message, as the kernel may know another way to run them.
 * Sources: execve(2), elf(5), the kernel's binfmt_script.c and binfmt_elf.c, proc_pid_mountinfo(5).
 */
#ifndef PENROOT_INTERPRETER_H
#define PENROOT_INTERPRETER_H

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { PENROOT_MACHINE = EM_X86_64, PENROOT_MACHINE32 = EM_386 };
#elif defined(__aarch64__)
enum { PENROOT_MACHINE = EM_AARCH64, PENROOT_MACHINE32 = EM_ARM };
#else
enum { PENROOT_MACHINE = -1, PENROOT_MACHINE32 = -1 };
#endif

enum { PENROOT_WHY = 6 * PATH_MAX, PENROOT_LINE = 256, PENROOT_HEADERS = 64, PENROOT_LINKS = 40, PENROOT_SCRIPTS = 5 };

/* The interpreter of a script; false if the line names none that the kernel would use. */
static inline bool penroot_interpreter_of_script(const char *line, size_t length, char name[PATH_MAX])
{
	size_t start = 2, end;

	while (start < length && (line[start] == ' ' || line[start] == '\t'))
		start++;
	for (end = start; end < length && !strchr(" \t\n", line[end]);) /* strchr finds a NUL too */
		end++;
	if (end == length || end == start)
		return false;
	memcpy(name, line + start, end - start);
	name[end - start] = '\0';
	return true;
}

/* The loader of an ELF program of this machine; false if it needs none. */
static inline bool penroot_interpreter_of_elf(int fd, const char *head, size_t length, char name[PATH_MAX])
{
	union {
		Elf64_Ehdr wide;
		Elf32_Ehdr narrow;
	} elf;
	if (length < sizeof(elf))
		return false;
	memcpy(&elf, head, sizeof(elf));
	bool wide = head[EI_CLASS] == ELFCLASS64;
	if ((wide ? elf.wide.e_machine : elf.narrow.e_machine) != (wide ? PENROOT_MACHINE : PENROOT_MACHINE32))
		return false;
	size_t count = wide ? elf.wide.e_phnum : elf.narrow.e_phnum;
	off_t at = wide ? (off_t)elf.wide.e_phoff : (off_t)elf.narrow.e_phoff;
	for (size_t i = 0; i < count && i < PENROOT_HEADERS; i++) {
		union {
			Elf64_Phdr wide;
			Elf32_Phdr narrow;
		} part;
		size_t size = wide ? sizeof(part.wide) : sizeof(part.narrow);
		if (pread(fd, &part, size, at + (off_t)(i * size)) != (ssize_t)size)
			return false;
		if ((wide ? part.wide.p_type : part.narrow.p_type) != PT_INTERP)
			continue;
		size_t bytes = wide ? part.wide.p_filesz : part.narrow.p_filesz;
		off_t place = wide ? (off_t)part.wide.p_offset : (off_t)part.narrow.p_offset;
		return bytes > 1 && bytes <= PATH_MAX && pread(fd, name, bytes, place) == (ssize_t)bytes && !name[bytes - 1] && *name;
	}
	return false;
}

static inline bool penroot_interpreter(const char *path, char name[PATH_MAX])
{
	char head[PENROOT_LINE];
	struct stat info;

	if (stat(path, &info) < 0 || !S_ISREG(info.st_mode))
		return false;
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0)
		return false;
	ssize_t length = pread(fd, head, sizeof(head), 0);
	bool found = false;
	if (length > 2 && memcmp(head, "#!", 2) == 0)
		found = penroot_interpreter_of_script(head, (size_t)length, name);
	else if (length > SELFMAG && memcmp(head, ELFMAG, SELFMAG) == 0)
		found = penroot_interpreter_of_elf(fd, head, (size_t)length, name);
	(void)close(fd);
	return found;
}

/* Follow the links of a path that leads to no file. `there` gets the path without links, `parent` the length of the
 * part that exists. Returns the number of links, or -1. */
static inline int penroot_follow(const char *path, char there[PATH_MAX], size_t *parent)
{
	char rest[PATH_MAX], link[PATH_MAX], next[PATH_MAX];
	int links = 0;
	size_t length = 0;

	if (*path != '/' || snprintf(rest, sizeof(rest), "%s", path) >= (int)sizeof(rest))
		return -1;
	there[0] = '\0';
	for (char *at = rest + strspn(rest, "/"); *at; at += strspn(at, "/")) {
		size_t name = strcspn(at, "/");
		if ((name == 1 && *at == '.') || (name == 2 && memcmp(at, "..", 2) == 0)) {
			if (name == 2)
				while (length && there[--length] != '/')
					;
			there[length] = '\0';
			at += name;
			continue;
		}
		if (length + name + 2 > PATH_MAX)
			return -1;
		there[length] = '/';
		memcpy(there + length + 1, at, name);
		there[length + 1 + name] = '\0';
		ssize_t size = readlink(there, link, sizeof(link) - 1);
		if (size > 0 && ++links <= PENROOT_LINKS) {
			link[size] = '\0';
			if (snprintf(next, sizeof(next), "%s%s", link, at + name) >= (int)sizeof(next))
				return -1;
			memcpy(rest, next, sizeof(rest));
			if (*rest == '/')
				length = 0;
			there[length] = '\0';
			at = rest;
			continue;
		}
		if (size > 0 || errno != EINVAL) { /* too many links, or it does not exist */
			*parent = length;
			return snprintf(there + length, PATH_MAX - length, "/%s", at) < (int)(PATH_MAX - length) ? links : -1;
		}
		length += 1 + name;
		at += name;
	}
	return -1;
}

/* Add to `text` which mount shows the directory that is the first `length` bytes of `path`, if it is not the root. */
static inline void penroot_name_mount(const char *path, size_t length, char *text, size_t size)
{
	char *line = NULL, place[PATH_MAX] = "", found[2 * PATH_MAX] = "";
	size_t room = 0, longest = 1;
	FILE *mounts = fopen("/proc/self/mountinfo", "re");

	while (mounts && getline(&line, &room, mounts) > 0) {
		char root[PATH_MAX], source[PATH_MAX];
		const char *tail = strstr(line, " - ");
		if (sscanf(line, "%*s %*s %*s %4095s %4095s", root, place) != 2 || !tail || sscanf(tail, " - %*s %4095s", source) != 1)
			continue;
		size_t n = strlen(place);
		if (n < longest || n > length || memcmp(path, place, n) != 0 || (path[n] && path[n] != '/') || strcmp(place, "/") == 0)
			continue;
		longest = n;
		(void)snprintf(found, sizeof(found), "%.*s[%.*s]", PATH_MAX - 8, source, PATH_MAX - 8, root);
	}
	if (*found) {
		size_t used = strlen(text);
		(void)snprintf(text + used, size - used, "; %.*s is mounted from %s", (int)longest, path, found);
	}
	free(line);
	if (mounts)
		(void)fclose(mounts);
}

/* Add `path` to `text`, quoted as a shell needs it. */
static inline void penroot_add_quoted(const char *path, char *text, size_t size)
{
	const char *plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
	const char *quote = path[strspn(path, plain)] ? "'" : "";
	size_t used = strlen(text);

	used += (size_t)snprintf(text + used, size - used, "%s", quote);
	for (; *path && used + sizeof("'\\'''") < size; path++)
		used += (size_t)snprintf(text + used, size - used, *path == '\'' ? "'\\''" : "%c", *path);
	(void)snprintf(text + used, size - used, "%s", quote);
}

/* What keeps a file that exists from being executed, in `why`; false if nothing does. */
static inline bool penroot_is_closed(const char *what, const char *name, char *why, size_t size)
{
	char there[PATH_MAX];
	struct statvfs mount;
	struct stat info;

	if (stat(name, &info) < 0 || (S_ISREG(info.st_mode) && access(name, X_OK) == 0))
		return false;
	if (!S_ISREG(info.st_mode))
		return snprintf(why, size, "%s is not a regular file", what) > 0;
	if (!(info.st_mode & 0111))
		return snprintf(why, size, "%s is not executable", what) > 0;
	if (statvfs(name, &mount) < 0 || !(mount.f_flag & ST_NOEXEC))
		return snprintf(why, size, "%s cannot be executed by this user", what) > 0;
	(void)snprintf(why, size, "%s is on a file system that is mounted noexec", what);
	if (realpath(name, there))
		penroot_name_mount(there, strlen(there), why, size);
	return true;
}

/* Why the path `name` leads to no file, in `why`; false if nobody knows. A `plain` path is one that the user gave: that
 * it does not exist is no news, but where a link leads is, and what a mount covers. */
static inline bool penroot_is_missing(const char *what, const char *name, bool plain, char *why, size_t size)
{
	char there[PATH_MAX];
	struct stat info;
	size_t parent = 0;

	if (stat(name, &info) == 0)
		return false;
	if (errno == EACCES && !plain)
		return snprintf(why, size, "%s cannot be reached: %s", what, strerror(EACCES)) > 0;
	if (errno == ELOOP)
		return snprintf(why, size, "%s is a link that leads back to itself", what) > 0;
	if (errno != ENOENT && errno != ENOTDIR)
		return false;
	int links = penroot_follow(name, there, &parent);
	if (links > 0)
		(void)snprintf(why, size, "%s leads to %s, which does not exist in the container", what, there);
	else if (plain)
		return false;
	else
		(void)snprintf(why, size, "%s does not exist in the container", what);
	size_t length = strlen(why);
	if (links >= 0)
		penroot_name_mount(there, parent, why, size);
	return !plain || strlen(why) > length || lstat(name, &info) == 0;
}

/* What is wrong with an interpreter; false if it can run. */
static inline bool penroot_is_broken(const char *script, const char *name, char *why, size_t size)
{
	char what[PATH_MAX + 32];
	size_t length = strlen(name);
	bool missing = access(name, F_OK) < 0 && (errno == ENOENT || errno == ENOTDIR);

	if (missing && name[length - 1] == '\r') {
		(void)snprintf(why, size,
			       "its first line ends in CR LF, so that its interpreter is '%.*s\\r': convert it: "
			       "sed -i 's/\\r$//' ",
			       (int)length - 1, name);
		penroot_add_quoted(script, why, size);
		return true;
	}
	(void)snprintf(what, sizeof(what), "its interpreter %s", name);
	return penroot_is_closed(what, name, why, size) || penroot_is_missing(what, name, false, why, size);
}

/* Why the kernel cannot execute `path`, in `why`, if `path` or an interpreter is at fault. Returns whether one is. */
static inline int penroot_explain(const char *path, char *why, size_t size)
{
	char name[PATH_MAX], script[PATH_MAX], error[64];
	const char *at = path;

	(void)snprintf(error, sizeof(error), "%s: it", strerror(EACCES));
	if (penroot_is_closed(error, path, why, size))
		return 1;
	if (access(path, F_OK) < 0) {
		(void)snprintf(error, sizeof(error), "%s: it", strerror(errno));
		return penroot_is_missing(error, path, true, why, size);
	}
	for (int depth = 0; depth < PENROOT_SCRIPTS && penroot_interpreter(at, name); depth++) {
		if (penroot_is_broken(at, name, why, size))
			return 1;
		memcpy(script, name, sizeof(script)); /* an interpreter may be a script */
		at = script;
	}
	return 0;
}
#endif
