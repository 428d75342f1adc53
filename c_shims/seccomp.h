/* Take privileges from a process that will execute the program of an image: for Python, the SPANK plugin and helpers.
 *
 * The system call filter, seccomp(2), has two parts and allows everything else: it is no sandbox.
 * - A container has one user, so chown(2), setuid(2) and their relatives cannot work, and package managers stop when
 *   they fail. The filter makes them do nothing and report success.
 * - ioctl(2) TIOCSTI and TIOCLINUX fail with EPERM. They push characters into the terminal, and the caller's shell
 *   would read and run these after the container has ended.
 */
#ifndef PENROOT_SECCOMP_H
#define PENROOT_SECCOMP_H

#include "linux.h"

#include <asm/ioctls.h>
#include <dirent.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/keyctl.h>
#include <linux/magic.h>
#include <linux/seccomp.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/vfs.h>

enum { PENROOT_ARCHITECTURES = 4, PENROOT_CALLS = 20 };

static const uint32_t penroot_architectures[PENROOT_ARCHITECTURES] = { AUDIT_ARCH_X86_64, AUDIT_ARCH_I386, AUDIT_ARCH_AARCH64,
								       AUDIT_ARCH_ARM };

/* The number of ioctl(2) on each. x32 has a number of its own; its other calls have those of x86_64 and a bit. */
static const uint16_t penroot_ioctl[PENROOT_ARCHITECTURES] = { 16, 54, 29, 54 };
enum { PENROOT_X32_BIT = 0x40000000, PENROOT_X32_IOCTL = 514 };

/* Numbers, not SYS_ names: one object serves the 32-bit calls of its architecture too. 0: there is none. For 32-bit ARM
 * the filter checks ioctl(2) only. */
static const uint16_t penroot_calls[PENROOT_CALLS][PENROOT_ARCHITECTURES] = {
	{ 92, 182, 0 },    /* chown */
	{ 0, 212, 0 },     /* chown32 */
	{ 93, 95, 55 },    /* fchown */
	{ 0, 207, 0 },     /* fchown32 */
	{ 94, 16, 0 },     /* lchown */
	{ 0, 198, 0 },     /* lchown32 */
	{ 260, 298, 54 },  /* fchownat */
	{ 105, 23, 146 },  /* setuid */
	{ 0, 213, 0 },     /* setuid32 */
	{ 106, 46, 144 },  /* setgid */
	{ 0, 214, 0 },     /* setgid32 */
	{ 113, 70, 145 },  /* setreuid */
	{ 0, 203, 0 },     /* setreuid32 */
	{ 114, 71, 143 },  /* setregid */
	{ 0, 204, 0 },     /* setregid32 */
	{ 116, 206, 159 }, /* setgroups, of i386 setgroups32 */
	{ 117, 164, 147 }, /* setresuid */
	{ 0, 208, 0 },     /* setresuid32 */
	{ 119, 170, 149 }, /* setresgid */
	{ 0, 210, 0 },     /* setresgid32 */
};

#define PENROOT_LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define PENROOT_UNLESS(value, skip) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), 0, (skip))
#define PENROOT_IF(value, skip) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), (skip), 0)
#define PENROOT_RETURN(action) BPF_STMT(BPF_RET | BPF_K, (action))

/* The kernel takes the low 32 bits of a request. */
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define PENROOT_REQUEST (offsetof(struct seccomp_data, args[1]) + 4)
#else
#define PENROOT_REQUEST offsetof(struct seccomp_data, args[1])
#endif

/* ioctl(2): refuse TIOCSTI and TIOCLINUX, allow all other requests. */
#define PENROOT_IOCTL_RULES 5
static inline void penroot_add_ioctl_rules(struct sock_fprog *program)
{
	const struct sock_filter rules[PENROOT_IOCTL_RULES] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, PENROOT_REQUEST),
		PENROOT_IF(TIOCSTI, 2),
		PENROOT_IF(TIOCLINUX, 1),
		PENROOT_RETURN(SECCOMP_RET_ALLOW),
		PENROOT_RETURN(SECCOMP_RET_ERRNO | EPERM),
	};

	for (int i = 0; i < PENROOT_IOCTL_RULES; i++)
		program->filter[program->len++] = rules[i];
}

#define PENROOT_ADD(program, ...) ((program).filter[(program).len++] = (struct sock_filter)__VA_ARGS__)

/* Returns 0, or -1 with errno. The caller has set PR_SET_NO_NEW_PRIVS. */
static inline int penroot_install_filter(void)
{
	enum { BEHIND = 3 + PENROOT_IOCTL_RULES }; /* rules between the calls and the last of an architecture */
	struct sock_filter filter[PENROOT_ARCHITECTURES * (PENROOT_CALLS + BEHIND + 4) + PENROOT_IOCTL_RULES + 4];
	struct sock_fprog program = { .filter = filter };

	PENROOT_ADD(program, PENROOT_LOAD(arch));
	for (int arch = 0; arch < PENROOT_ARCHITECTURES; arch++) {
		uint8_t left = 0;

		for (int i = 0; i < PENROOT_CALLS; i++)
			left += penroot_calls[i][arch] != 0;
		PENROOT_ADD(program, PENROOT_UNLESS(penroot_architectures[arch], left + BEHIND + 3));
		PENROOT_ADD(program, PENROOT_LOAD(nr));
		PENROOT_ADD(program, BPF_STMT(BPF_ALU | BPF_AND | BPF_K, ~(uint32_t)PENROOT_X32_BIT));
		for (int i = 0; i < PENROOT_CALLS; i++)
			if (penroot_calls[i][arch])
				PENROOT_ADD(program, PENROOT_IF(penroot_calls[i][arch], --left + BEHIND));
		PENROOT_ADD(program, PENROOT_IF(penroot_ioctl[arch], 2));
		PENROOT_ADD(program, PENROOT_IF(PENROOT_X32_IOCTL, 1));
		PENROOT_ADD(program, PENROOT_RETURN(SECCOMP_RET_ALLOW));
		penroot_add_ioctl_rules(&program);
		PENROOT_ADD(program, PENROOT_RETURN(SECCOMP_RET_ERRNO));
	}
	/* Any other architecture: take the number of ioctl(2) from the machine that this is compiled for. */
	PENROOT_ADD(program, PENROOT_LOAD(nr));
	PENROOT_ADD(program, PENROOT_IF(SYS_ioctl, 1));
	PENROOT_ADD(program, PENROOT_RETURN(SECCOMP_RET_ALLOW));
	penroot_add_ioctl_rules(&program);
	/* SPEC_ALLOW: this filter isolates nothing, so it should not cost the
	 * program its speculation (kernels before 5.16 disable it by default). */
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program);
}

static inline int penroot_drop_capabilities(void)
{
	unsigned long capability = 0;

	while (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0)
		capability++;
	return errno == EINVAL ? linux_capset(0, 0, 0) : -1; /* EINVAL: it was the last that there is */
}

/* Root of the user namespace keeps his, as that is what he asks for: --root, --container-remap-root. */
static inline int penroot_drop_capabilities_unless_root(void)
{
	return geteuid() == 0 ? 0 : penroot_drop_capabilities();
}

/* Whether a descriptor of the caller leads out of the container: openat(2) and /proc/self/fd do so through a directory or
 * an O_PATH descriptor, setns(2) through a namespace. */
static inline int penroot_leads_out(int fd, int flags)
{
	struct statfs system;
	struct stat is;

	if (flags & O_PATH)
		return 1;
	if (fstat(fd, &is) < 0)
		return 0;
	return S_ISDIR(is.st_mode) || (S_ISREG(is.st_mode) && fstatfs(fd, &system) == 0 && system.f_type == NSFS_MAGIC);
}

/* Keep from the program those descriptors of the caller that lead out of the container. Such a descriptor closes at
 * execve(2). If it is stdin, stdout or stderr, /dev/null replaces it, and reading or writing fails as before. Call this
 * while /proc is the node's. Returns 0, or -1 with errno. */
static inline int penroot_withhold_descriptors(void)
{
	DIR *entries = opendir("/proc/self/fd");
	struct dirent *entry;
	int result = entries ? 0 : -1;

	while (result == 0 && (entry = readdir(entries))) {
		int fd = atoi(entry->d_name), flags = *entry->d_name == '.' ? -1 : fcntl(fd, F_GETFL), null;

		if (flags < 0 || fd == dirfd(entries) || !penroot_leads_out(fd, flags))
			continue;
		if (fd > STDERR_FILENO) {
			result = fcntl(fd, F_SETFD, FD_CLOEXEC);
			continue;
		}
		null = open("/dev/null", (fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) | O_CLOEXEC);
		result = null < 0 || dup2(null, fd) < 0 ? -1 : close(null);
	}
	if (entries)
		closedir(entries);
	return result;
}

/* Replace the caller's session keyring, keyrings(7), by a new, empty one. Returns 0, or -1 with errno. */
static inline int penroot_renew_keyring(void)
{
	/* A kernel without keyrings has nothing to keep. */
	return syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL) < 0 && errno != ENOSYS ? -1 : 0;
}

#endif
