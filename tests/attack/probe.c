/* A static program that tries what an image can do: test_capabilities.py prints the table.
 *
 *   probe call DIRECTORY PROGRAM [ARG...]  be the caller: put a key into a new session keyring, open DIRECTORY as
 *                                          descriptors 7 and 8 (O_PATH), a file in it as 9, and namespaces as 10
 *                                          and 11, then run PROGRAM
 *   probe session                          print the ID and the description of the session keyring
 *   probe                                  be the image: try everything, print a line "NAME RESULT" for each
 *
 * Each attempt is harmless: it writes the old content back, or only opens a file.
 */
#define _GNU_SOURCE
#include <asm/ioctls.h>
#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/keyctl.h>
#include <linux/nsfs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static const char KEY[] = "penroot-probe";

/* -- the caller ------------------------------------------------------------------------------------------------ */

static void open_as(int number, const char *path, int flags)
{
	int fd = open(path, flags, 0600);

	if (fd < 0 || dup2(fd, number) < 0)
		err(1, "%s", path);
	if (fd != number)
		close(fd);
}

static void be_caller(char **argv)
{
	if (syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL) < 0 ||
	    syscall(SYS_add_key, "user", KEY, "secret", 6, KEY_SPEC_SESSION_KEYRING) < 0)
		err(1, "session keyring");
	if (chdir(argv[0]) < 0)
		err(1, "%s", argv[0]);
	open_as(7, ".", O_RDONLY | O_DIRECTORY);
	open_as(8, ".", O_PATH);
	open_as(9, "file", O_RDWR | O_CREAT);
	open_as(10, "/proc/self/ns/mnt", O_RDONLY);
	open_as(11, "/proc/self/ns/user", O_RDONLY);
	execvp(argv[1], argv + 1);
	err(1, "%s", argv[1]);
}

/* -- the image ------------------------------------------------------------------------------------------------- */

static char findings[4096];

static void note(const char *what)
{
	snprintf(findings + strlen(findings), sizeof(findings) - strlen(findings), "%s%s", *findings ? "," : "", what);
}

static void report(const char *name)
{
	printf("%s %s\n", name, *findings ? findings : "no");
	fflush(stdout);
	*findings = '\0';
}

static long ioctl_native(int fd, unsigned long request, char *c)
{
	return syscall(SYS_ioctl, fd, request, c);
}

static long ioctl_high(int fd, unsigned long request, char *c)
{
	return syscall(SYS_ioctl, fd, request | 1UL << 40, c);
}

#ifdef __x86_64__
static long ioctl_x32(int fd, unsigned long request, char *c)
{
	return syscall(0x40000000 + 514, fd, request, c);
}

static long ioctl_i386(int fd, unsigned long request, char *c)
{
	char *low = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
	long result;

	*low = *c;
	__asm__ volatile("int $0x80" : "=a"(result) : "a"(54), "b"(fd), "c"(request), "d"(low) : "memory", "r8", "r9", "r10", "r11");
	if (result >= 0)
		return result;
	errno = (int)-result;
	return -1;
}
#endif

static const struct {
	const char *name;
	long (*call)(int fd, unsigned long request, char *c);
} calls[] = {
	{ "native", ioctl_native },
	{ "high", ioctl_high },
#ifdef __x86_64__
	{ "x32", ioctl_x32 },
	{ "i386", ioctl_i386 },
#endif
};

/* Make each call in a child, because a kernel without i386 system calls kills the caller. Note each call that neither fails
 * with EPERM nor kills the child. */
static void terminal(void)
{
	static const unsigned long requests[] = { TIOCSTI, TIOCLINUX };
	int fd = open("/dev/tty", O_RDWR | O_NONBLOCK);

	if (fd < 0)
		fd = 0;
	if (!isatty(fd))
		note("without");
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		for (size_t j = 0; j < 2; j++) {
			pid_t child = fork();
			int status;
			char c = '#', name[64];

			if (child == 0)
				_exit(calls[i].call(fd, requests[j], &c) < 0 && errno == EPERM ? 0 : 1);
			if (waitpid(child, &status, 0) < 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0) || WIFSIGNALED(status))
				continue;
			snprintf(name, sizeof(name), "%s-%s", calls[i].name, j ? "linux" : "sti");
			note(name);
		}
	}
	report("terminal");
}

static void descriptors(void)
{
	char name[16];
	struct stat is;

	for (int fd = 0; fd < 1024; fd++) {
		int flags = fcntl(fd, F_GETFL);

		snprintf(name, sizeof(name), "%d", fd);
		if (flags >= 0 && (flags & O_PATH || (fstat(fd, &is) == 0 && S_ISDIR(is.st_mode))))
			note(name);
	}
	report("directories");
	if (ioctl(10, NS_GET_NSTYPE) >= 0 || ioctl(11, NS_GET_NSTYPE) >= 0)
		note("yes");
	report("namespaces");
	if (write(9, "", 0) == 0)
		note("yes");
	report("files");
}

static void keyring(void)
{
	if (syscall(SYS_keyctl, KEYCTL_SEARCH, KEY_SPEC_SESSION_KEYRING, "user", KEY, 0) >= 0)
		note("yes");
	report("keyring");
}

static void show_session(void)
{
	char description[256] = "";
	long id = syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING, 0);

	syscall(SYS_keyctl, KEYCTL_DESCRIBE, id, description, sizeof(description) - 1);
	printf("session %ld %s\n", id, description);
}

static void capabilities(void)
{
	char line[256];
	FILE *status = fopen("/proc/self/status", "r");

	while (status && fgets(line, sizeof(line), status))
		if (!strncmp(line, "CapEff:", 7) && strtoull(line + 7, NULL, 16))
			note("yes");
	if (status)
		fclose(status);
	report("capabilities");
}

static int can_write(const char *path)
{
	int fd = open(path, O_WRONLY);

	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

/* The user mounts /ro read-only, and an empty directory on /cover, which hides the image's file /cover/hidden. */
static void mounts(void)
{
	if (access("/ro/file", F_OK) < 0 || access("/cover/hidden", F_OK) == 0)
		note("unmounted-before");
	if (mount(NULL, "/ro", NULL, MS_REMOUNT | MS_BIND, NULL) == 0 || can_write("/ro/file"))
		note("remount");
	if (umount2("/ro", MNT_DETACH) == 0)
		note("umount-ro");
	if (umount2("/cover", MNT_DETACH) == 0 || access("/cover/hidden", F_OK) == 0)
		note("umount-cover");
	report("mounts");
}

static int rewrite(const char *path)
{
	char text[4096];
	int fd = open(path, O_RDWR);
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text));
	int written = n > 0 && pwrite(fd, text, (size_t)n, 0) == n;

	if (fd >= 0)
		close(fd);
	return written;
}

static void sysctl(void)
{
	static const char path[] = "/proc/sys/kernel/core_pattern";

	if (rewrite(path))
		note("write");
	if (mount(NULL, "/proc/sys", NULL, MS_REMOUNT | MS_BIND, NULL) == 0 && rewrite(path))
		note("remount");
	while (umount2("/proc/sys", MNT_DETACH) == 0)
		if (rewrite(path))
			note("umount");
	if ((mkdir("/tmp/p", 0700) == 0 || errno == EEXIST) && mount("proc", "/tmp/p", "proc", 0, NULL) == 0 &&
	    rewrite("/tmp/p/sys/kernel/core_pattern"))
		note("mount");
	report("sysctl");
}

static void look_for_devices(const char *path)
{
	DIR *entries = opendir(path);
	struct dirent *entry;
	struct stat is;

	while (entries && (entry = readdir(entries))) {
		int fd;

		if (fstatat(dirfd(entries), entry->d_name, &is, AT_SYMLINK_NOFOLLOW) < 0 ||
		    (!S_ISBLK(is.st_mode) && strcmp(entry->d_name, "kmsg") && strcmp(entry->d_name, "mem")))
			continue;
		fd = openat(dirfd(entries), entry->d_name, O_WRONLY | O_NONBLOCK);
		if (fd >= 0)
			note(S_ISBLK(is.st_mode) ? "block" : entry->d_name);
		if (fd >= 0)
			break;
	}
	if (entries)
		closedir(entries);
}

static void devices(void)
{
	look_for_devices("/dev");
	umount2("/dev", MNT_DETACH);
	if (!*findings)
		look_for_devices("/dev");
	report("devices");
}

int main(int argc, char **argv)
{
	if (argc > 3 && !strcmp(argv[1], "call"))
		be_caller(argv + 2);
	if (argc == 2 && !strcmp(argv[1], "session")) {
		show_session();
		return 0;
	}
	/* Outside of a container these attempts would unmount the node's /dev. */
	if (access("/cover", F_OK) < 0 || access("/bin/probe", F_OK) < 0 || access("/lib/systemd", F_OK) == 0)
		errx(1, "this is not the image of the test");
	terminal();
	descriptors();
	keyring();
	capabilities();
	mounts();
	sysctl();
	devices();
	return 0;
}
