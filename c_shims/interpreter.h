/* Why execve(2) fails for a file that exists: the interpreter that its #! line or its ELF header names cannot run.
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
 * part that exists. */
static inline bool penroot_follow(const char *path, char there[PATH_MAX], size_t *parent)
{
	char rest[PATH_MAX], link[PATH_MAX], next[PATH_MAX];
	int links = 0;
	size_t length = 0;

	if (*path != '/' || snprintf(rest, sizeof(rest), "%s", path) >= (int)sizeof(rest))
		return false;
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
			return false;
		there[length] = '/';
		memcpy(there + length + 1, at, name);
		there[length + 1 + name] = '\0';
		ssize_t size = readlink(there, link, sizeof(link) - 1);
		if (size > 0 && ++links <= PENROOT_LINKS) {
			link[size] = '\0';
			if (snprintf(next, sizeof(next), "%s%s", link, at + name) >= (int)sizeof(next))
				return false;
			memcpy(rest, next, sizeof(rest));
			if (*rest == '/')
				length = 0;
			there[length] = '\0';
			at = rest;
			continue;
		}
		if (size > 0 || errno != EINVAL) { /* too many links, or it does not exist */
			*parent = length;
			return snprintf(there + length, PATH_MAX - length, "/%s", at) < (int)(PATH_MAX - length);
		}
		length += 1 + name;
		at += name;
	}
	return false;
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

/* What is wrong with an interpreter; false if it can run. */
static inline bool penroot_is_broken(const char *script, const char *name, char *why, size_t size)
{
	char there[PATH_MAX];
	struct stat info;
	size_t parent = 0, length = strlen(name);

	if (access(name, X_OK) == 0 && stat(name, &info) == 0 && S_ISREG(info.st_mode))
		return false;
	if (stat(name, &info) == 0) {
		const char *what = !S_ISREG(info.st_mode) ? "is not a regular file" :
				   info.st_mode & 0111	  ? "cannot be executed by this user, or is mounted noexec" :
							    "is not executable";
		return snprintf(why, size, "its interpreter %s %s", name, what) > 0;
	}
	if (errno == EACCES)
		return snprintf(why, size, "its interpreter %s cannot be reached: %s", name, strerror(EACCES)) > 0;
	if (errno != ENOENT && errno != ENOTDIR && errno != ELOOP)
		return false;
	if (name[length - 1] == '\r')
		return snprintf(why, size, "its first line ends in CR LF, so that its interpreter is '%.*s\\r': convert it: "
				"sed -i 's/\\r$//' %s", (int)length - 1, name, script) > 0;
	bool leads = penroot_follow(name, there, &parent);
	if (leads && strcmp(there, name) != 0)
		(void)snprintf(why, size, "its interpreter %s leads to %s, which does not exist in the container", name, there);
	else
		(void)snprintf(why, size, "its interpreter %s does not exist in the container", name);
	if (leads)
		penroot_name_mount(there, parent, why, size);
	return true;
}

/* Why the kernel cannot execute `path`, in `why`, if it is the fault of an interpreter. Returns whether it is. */
static inline int penroot_explain(const char *path, char *why, size_t size)
{
	char name[PATH_MAX], script[PATH_MAX];
	const char *at = path;

	for (int depth = 0; depth < PENROOT_SCRIPTS && penroot_interpreter(at, name); depth++) {
		if (penroot_is_broken(at, name, why, size))
			return 1;
		memcpy(script, name, sizeof(script)); /* an interpreter may be a script */
		at = script;
	}
	return 0;
}
#endif
