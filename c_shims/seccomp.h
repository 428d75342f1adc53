/* What a container's process gives up last, for Python, the SPANK plugin and the static helpers.
 *
 * The system call filter: a container has one user: chown(2), setuid(2) and their relatives cannot
 * work, and package managers stop where they fail. So they do nothing and
 * report success. Everything else is allowed: the filter is no sandbox.
 * See seccomp(2).
 */
#ifndef PENROOT_SECCOMP_H
#define PENROOT_SECCOMP_H

#include "linux.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>

enum { PENROOT_ARCHITECTURES = 3, PENROOT_CALLS = 20 };

static const uint32_t penroot_architectures[PENROOT_ARCHITECTURES] = {AUDIT_ARCH_X86_64, AUDIT_ARCH_I386, AUDIT_ARCH_AARCH64};

/* Numbers, not SYS_ names: one object serves the 32-bit calls of its architecture too. 0: there is none. */
static const uint16_t penroot_calls[PENROOT_CALLS][PENROOT_ARCHITECTURES] = {
	{92, 182, 0},    /* chown */
	{0, 212, 0},     /* chown32 */
	{93, 95, 55},    /* fchown */
	{0, 207, 0},     /* fchown32 */
	{94, 16, 0},     /* lchown */
	{0, 198, 0},     /* lchown32 */
	{260, 298, 54},  /* fchownat */
	{105, 23, 146},  /* setuid */
	{0, 213, 0},     /* setuid32 */
	{106, 46, 144},  /* setgid */
	{0, 214, 0},     /* setgid32 */
	{113, 70, 145},  /* setreuid */
	{0, 203, 0},     /* setreuid32 */
	{114, 71, 143},  /* setregid */
	{0, 204, 0},     /* setregid32 */
	{116, 206, 159}, /* setgroups, of i386 setgroups32 */
	{117, 164, 147}, /* setresuid */
	{0, 208, 0},     /* setresuid32 */
	{119, 170, 149}, /* setresgid */
	{0, 210, 0},     /* setresgid32 */
};

#define PENROOT_LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define PENROOT_UNLESS(value, skip) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), 0, (skip))
#define PENROOT_IF(value, skip) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), (skip), 0)
#define PENROOT_RETURN(action) BPF_STMT(BPF_RET | BPF_K, (action))

/* Returns 0, or -1 with errno. The caller has set PR_SET_NO_NEW_PRIVS. */
static inline int penroot_install_filter(void)
{
	struct sock_filter filter[PENROOT_ARCHITECTURES * (PENROOT_CALLS + 4) + 2];
	struct sock_fprog program = {.filter = filter};

	filter[program.len++] = (struct sock_filter)PENROOT_LOAD(arch);
	for (int arch = 0; arch < PENROOT_ARCHITECTURES; arch++) {
		uint8_t left = 0;

		for (int i = 0; i < PENROOT_CALLS; i++)
			left += penroot_calls[i][arch] != 0;
		filter[program.len++] = (struct sock_filter)PENROOT_UNLESS(penroot_architectures[arch], left + 3);
		filter[program.len++] = (struct sock_filter)PENROOT_LOAD(nr);
		/* To what is behind the last call and the ALLOW. */
		for (int i = 0; i < PENROOT_CALLS; i++)
			if (penroot_calls[i][arch])
				filter[program.len++] = (struct sock_filter)PENROOT_IF(penroot_calls[i][arch], left--);
		filter[program.len++] = (struct sock_filter)PENROOT_RETURN(SECCOMP_RET_ALLOW);
		filter[program.len++] = (struct sock_filter)PENROOT_RETURN(SECCOMP_RET_ERRNO);
	}
	filter[program.len++] = (struct sock_filter)PENROOT_RETURN(SECCOMP_RET_ALLOW);
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

#endif
