"""Run a program in a child process, forward signals to the child, and let the program keep capabilities."""

from __future__ import annotations

import errno
import os
from _signal import (
    SIG_BLOCK,
    SIG_DFL,
    SIG_SETMASK,
    SIG_UNBLOCK,
    SIGCHLD,
    SIGKILL,
    SIGSTOP,
    pthread_sigmask,
    signal,
    sigwaitinfo,
)

from enroot_py import LIBRARY
from enroot_py.base import linux, signals
from enroot_py.base.fds import Fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_SI_KERNEL = 0x80  # sigaction(2)
of_child: list[int] = []  # descriptors that the parent closes after fork()
_GUARD = f"{LIBRARY}/libexec/penroot-guard"
_INIT = f"{LIBRARY}/libexec/penroot-init"
_MFD_EXEC = 0x10  # memfd_create(2)
_MAX_CHECKS = 200  # checks of a running program, a millisecond apart


def fork() -> int:
    """Fork a child for wait(). The parent blocks the signals that wait() forwards. The child ends with the parent."""
    mask, child = pthread_sigmask(SIG_BLOCK, signals.CATCHABLE), 0
    lifetime, held = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # only the parent keeps ``held`` open
    try:
        child = os.fork()
    finally:
        if not child:
            pthread_sigmask(SIG_SETMASK, mask)
    if not child:
        _end_with_parent(lifetime, held)
    for fd in (lifetime, *(of_child if child else ())):
        os.close(fd)
    return child


def _end_with_parent(lifetime: int, held: int) -> None:
    """Let this child end with its parent. The parent holds the other end of the pipe ``lifetime``.

    The parent may have ended before prctl(2). getppid(2) does not show this: in a new PID namespace it returns 0.
    """
    os.close(held)
    linux.prctl(linux.PR_SET_PDEATHSIG, SIGKILL)
    try:
        os.read(lifetime, 1)
    except BlockingIOError:
        return
    os._exit(128 + SIGKILL)


def wait(child: int) -> int:
    """Wait for the ``child`` of fork(), and forward all signals to it. Return its exit status as a shell does.

    If the child stops, stop too: the caller's shell then sees a stopped job. SIGCONT continues both.
    """
    signals.restore()  # the kernel would drop ignored signals, and nobody could forward them
    while True:
        pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if pid and not os.WIFSTOPPED(status):
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if pid:
            os.kill(os.getpid(), SIGSTOP)
        caught = sigwaitinfo(signals.CATCHABLE)
        if caught.si_signo != SIGCHLD or caught.si_code <= 0:  # forward SIGCHLD only if a process has sent it
            _forward(child, caught.si_signo, from_kernel=caught.si_code == _SI_KERNEL)


def guard(timeout_s: float | None) -> int:
    """Start a child and a grandchild. Return 0 in the grandchild, and the PID of the child in this process, for wait().

    The grandchild is a fork of this process. The child runs penroot-guard: when this process has ended, or after
    ``timeout_s`` seconds, it kills the grandchild and all processes that the grandchild has started. Raises OSError.
    """
    mask = pthread_sigmask(SIG_BLOCK, signals.CATCHABLE)
    lifetime, held = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # only this process keeps ``held`` open
    child = -1
    try:
        child = linux.fork_below(_GUARD, "penroot-guard", str(int((timeout_s or 0) * 1000)), lifetime)
    finally:
        if child <= 0:
            pthread_sigmask(SIG_SETMASK, mask)
    if not child:
        _end_with_parent(lifetime, held)
    os.close(lifetime)
    return child


def _memfd(flags: int) -> int:
    try:
        return os.memfd_create("penroot-init", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    except OSError as e:
        if not flags or e.errno != errno.EINVAL:
            raise
        return _memfd(0)  # before Linux 6.3


def open_init() -> int:
    """Return a descriptor of a sealed copy of penroot-init, to which no container can write.

    If the kernel refuses an executable copy, return a descriptor of the file. Raises OSError if the user owns the file.
    """
    with Fd(os.open(_INIT, os.O_RDONLY | os.O_CLOEXEC)) as file:
        try:
            sealed = _memfd(_MFD_EXEC)
        except PermissionError:  # sysctl vm.memfd_noexec forbids it
            if 0 != os.fstat(file).st_uid == os.geteuid():
                raise  # the container could write to the file: it belongs to the user
            return file.keep()
        os.write(sealed, file.content())
    import fcntl

    fcntl.fcntl(
        sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
    )
    return sealed


def end(status: int) -> NoReturn:
    """End this process with the child's ``status``, by the same signal if a signal ended the child."""
    if status > 128:
        number = status - 128
        if number in signals.CATCHABLE:
            signal(number, SIG_DFL)
            pthread_sigmask(SIG_UNBLOCK, (number,))
        os.kill(os.getpid(), number)
    os._exit(status)


def _forward(child: int, number: int, *, from_kernel: bool) -> None:
    """Send a signal to ``child``, unless the terminal has sent it to both processes already.

    Send SIGSTOP in place of a stop signal that the kernel would drop.
    """
    if number in signals.STOPPING and ignores_default(child, number):
        os.kill(child, SIGSTOP)
    elif not (from_kernel and number in signals.OF_TERMINALS and os.getpgid(child) == os.getpgrp()):
        os.kill(child, number)


def ignores_default(child: int, number: int) -> bool:
    """Return whether ``child`` has the default action for a signal and is the first process of its PID namespace.

    The kernel then drops the signal, unless it is SIGSTOP or SIGKILL from the parent namespace: pid_namespaces(7).
    """
    from time import sleep

    for _ in range(_MAX_CHECKS):
        try:
            os.readlink("/proc/self")  # fails if /proc belongs to the child's PID namespace
            with open(f"/proc/{child}/status") as f:
                status = dict(line.split(":\t", 1) for line in f if ":\t" in line)
            with open(f"/proc/{child}/wchan") as f:
                wchan = f.read()
        except OSError:
            return False
        if status["NSpid"].split()[1:][-1:] != ["1"]:
            return False
        if any(int(status[name], 16) & 1 << number - 1 for name in ("SigBlk", "SigIgn", "SigCgt")):
            return False
        if wchan != "0":  # the child sleeps; in sigtimedwait(2), SigBlk lacks the signals that it waits for
            return "sigtimedwait" not in wchan
        sleep(0.001)
    return True


def keep_capabilities() -> None:
    """Pass this process's capabilities on to the program that it executes (ambient set, capabilities(7))."""
    permitted = linux.capget_permitted()
    linux.capset(permitted, permitted, permitted)
    for capability in range(permitted.bit_length()):
        if permitted >> capability & 1:
            linux.prctl(linux.PR_CAP_AMBIENT, linux.PR_CAP_AMBIENT_RAISE, capability)
