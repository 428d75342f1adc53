/* The system call filter of every container, shared by the cffi module and the SPANK plugin.
 *
 * A container has one user: chown(2), setuid(2) and their relatives cannot
 * work, and package managers stop where they fail. So they do nothing and
 * report success. Everything else is allowed: the filter is no sandbox.
 * See seccomp(2).
 */
#ifndef PENROOT_SECCOMP_H
#define PENROOT_SECCOMP_H

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SECCOMP_FILTER_FLAG_SPEC_ALLOW
#define SECCOMP_FILTER_FLAG_SPEC_ALLOW (1UL << 2)
#endif

#define PENROOT_FAKE(nr) \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (nr), 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO)

/* Skip a table of n system calls (two instructions each, and its last ALLOW) unless the call is of this arch. */
#define PENROOT_ARCH(arch, n) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (arch), 0, 2 + 2 * (n))
#define PENROOT_LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define PENROOT_ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

/* Returns 0, or -1 with errno. The caller has set PR_SET_NO_NEW_PRIVS. */
static int penroot_install_filter(void)
{
	/* Numbers, not SYS_ names: one object serves the 32-bit calls of its architecture too. */
	static const struct sock_filter filter[] = {
		PENROOT_LOAD(arch),
		PENROOT_ARCH(AUDIT_ARCH_X86_64, 11),
		PENROOT_LOAD(nr),
		PENROOT_FAKE(92),  /* chown */
		PENROOT_FAKE(93),  /* fchown */
		PENROOT_FAKE(94),  /* lchown */
		PENROOT_FAKE(260), /* fchownat */
		PENROOT_FAKE(105), /* setuid */
		PENROOT_FAKE(106), /* setgid */
		PENROOT_FAKE(113), /* setreuid */
		PENROOT_FAKE(114), /* setregid */
		PENROOT_FAKE(116), /* setgroups */
		PENROOT_FAKE(117), /* setresuid */
		PENROOT_FAKE(119), /* setresgid */
		PENROOT_ALLOW,
		PENROOT_ARCH(AUDIT_ARCH_I386, 20),
		PENROOT_LOAD(nr),
		PENROOT_FAKE(182), /* chown */
		PENROOT_FAKE(95),  /* fchown */
		PENROOT_FAKE(16),  /* lchown */
		PENROOT_FAKE(212), /* chown32 */
		PENROOT_FAKE(207), /* fchown32 */
		PENROOT_FAKE(198), /* lchown32 */
		PENROOT_FAKE(298), /* fchownat */
		PENROOT_FAKE(23),  /* setuid */
		PENROOT_FAKE(46),  /* setgid */
		PENROOT_FAKE(70),  /* setreuid */
		PENROOT_FAKE(71),  /* setregid */
		PENROOT_FAKE(164), /* setresuid */
		PENROOT_FAKE(170), /* setresgid */
		PENROOT_FAKE(213), /* setuid32 */
		PENROOT_FAKE(214), /* setgid32 */
		PENROOT_FAKE(203), /* setreuid32 */
		PENROOT_FAKE(204), /* setregid32 */
		PENROOT_FAKE(208), /* setresuid32 */
		PENROOT_FAKE(210), /* setresgid32 */
		PENROOT_FAKE(206), /* setgroups32 */
		PENROOT_ALLOW,
		PENROOT_ARCH(AUDIT_ARCH_AARCH64, 9),
		PENROOT_LOAD(nr),
		PENROOT_FAKE(54),  /* fchownat */
		PENROOT_FAKE(55),  /* fchown */
		PENROOT_FAKE(146), /* setuid */
		PENROOT_FAKE(144), /* setgid */
		PENROOT_FAKE(145), /* setreuid */
		PENROOT_FAKE(143), /* setregid */
		PENROOT_FAKE(147), /* setresuid */
		PENROOT_FAKE(149), /* setresgid */
		PENROOT_FAKE(159), /* setgroups */
		PENROOT_ALLOW,
		PENROOT_ALLOW,
	};
	struct sock_fprog program = {
		.len = sizeof(filter) / sizeof(filter[0]),
		.filter = (struct sock_filter *)filter,
	};

	/* SPEC_ALLOW: this filter isolates nothing, so it should not cost the
	 * program its speculation (kernels before 5.16 disable it by default). */
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program);
}

#endif
