"""Generate the system call filter of containers, seccomp(2), as C for the SPANK plugin and the cffi module.

The filter has two parts, and allows all other calls: it is no sandbox.

- A container has one user, so chown(2), setuid(2) and similar calls cannot work, and package managers stop if such a
  call fails. The filter makes these calls do nothing and report success.
- ioctl(2) TIOCSTI and TIOCLINUX fail with EPERM. They insert characters into the terminal's input, which the
  caller's shell would read and run after the container has ended.

A row of ``_CALLS`` has the numbers of one call by architecture, or 0 if an architecture lacks the call. SYS_ names
are not enough, because one filter serves the 32-bit calls of its architecture too. For 32-bit ARM the filter
checks ioctl(2) only.
"""

from __future__ import annotations

_ARCHITECTURES = ("AUDIT_ARCH_X86_64", "AUDIT_ARCH_I386", "AUDIT_ARCH_AARCH64", "AUDIT_ARCH_ARM")
_IOCTL = (16, 54, 29, 54)
# x32 has a separate number for ioctl(2). Other calls have the numbers of x86_64, plus this bit.
_X32_BIT, _X32_IOCTL = 0x40000000, 514
_CALLS = {
    "chown": (92, 182, 0, 0),
    "chown32": (0, 212, 0, 0),
    "fchown": (93, 95, 55, 0),
    "fchown32": (0, 207, 0, 0),
    "lchown": (94, 16, 0, 0),
    "lchown32": (0, 198, 0, 0),
    "fchownat": (260, 298, 54, 0),
    "setuid": (105, 23, 146, 0),
    "setuid32": (0, 213, 0, 0),
    "setgid": (106, 46, 144, 0),
    "setgid32": (0, 214, 0, 0),
    "setreuid": (113, 70, 145, 0),
    "setreuid32": (0, 203, 0, 0),
    "setregid": (114, 71, 143, 0),
    "setregid32": (0, 204, 0, 0),
    "setgroups": (116, 206, 159, 0),  # on i386: setgroups32
    "setresuid": (117, 164, 147, 0),
    "setresuid32": (0, 208, 0, 0),
    "setresgid": (119, 170, 149, 0),
    "setresgid32": (0, 210, 0, 0),
}
_ALLOW = "BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)"
_SUCCEED = "BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO)"
_LOAD_NUMBER = "BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))"


def c_filter() -> str:
    """Return the definition of PENROOT_FILTER for c_shims/seccomp.h, with the macros of linux/filter.h."""
    rules = ["BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch))"]
    for i, architecture in enumerate(_ARCHITECTURES):
        filter_rules = _of_architecture([numbers[i] for numbers in _CALLS.values() if numbers[i]], _IOCTL[i])
        rules += [_jump(architecture, unequal=len(filter_rules)), *filter_rules]
    # For other architectures, use the number of ioctl(2) on the machine that compiles the filter.
    rules += [_LOAD_NUMBER, _jump("SYS_ioctl", equal=1), _ALLOW, *_of_ioctl()]
    lines = "".join(f"\t{rule}, \\\n" for rule in rules)
    return f"#define PENROOT_FILTER {{ \\\n{lines}}}\n"


def _of_architecture(calls: list[int], ioctl: int) -> list[str]:
    ioctl_rules = [_jump(ioctl, equal=2), _jump(_X32_IOCTL, equal=1), _ALLOW, *_of_ioctl()]
    jumps = [_jump(call, equal=len(calls) - i - 1 + len(ioctl_rules)) for i, call in enumerate(calls)]
    mask = f"BPF_STMT(BPF_ALU | BPF_AND | BPF_K, {0xFFFFFFFF ^ _X32_BIT:#x})"
    return [_LOAD_NUMBER, mask, *jumps, *ioctl_rules, _SUCCEED]


def _of_ioctl() -> list[str]:
    """Refuse TIOCSTI and TIOCLINUX, allow all other requests."""
    # The kernel uses the low 32 bits of a request.
    low = "offsetof(struct seccomp_data, args[1]) + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? 4 : 0)"
    load = f"BPF_STMT(BPF_LD | BPF_W | BPF_ABS, {low})"
    refuse = "BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)"
    return [load, _jump("TIOCSTI", equal=2), _jump("TIOCLINUX", equal=1), _ALLOW, refuse]


def _jump(value: str | int, *, equal: int = 0, unequal: int = 0) -> str:
    """Skip ``equal`` instructions if the loaded word equals ``value``, else ``unequal`` instructions."""
    return f"BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, {value}, {equal}, {unequal})"
