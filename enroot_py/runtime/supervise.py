"""Run a program in a child process, forward signals to it, or let it keep capabilities."""

from __future__ import annotations

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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_SI_KERNEL = 0x80  # sigaction(2)
of_child: list[int] = []  # descriptors that the parent closes when it has forked
_GUARD = f"{LIBRARY}/libexec/penroot-guard"
_MAX_CHECKS = 200  # of a running program, a millisecond apart


def fork() -> int:
    """fork(2) a child for wait(). No signal ends the parent from here on, and the child ends with the parent."""
    mask, child = pthread_sigmask(SIG_BLOCK, signals.CATCHABLE), 0
    lifetime, held = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # the parent keeps ``held`` open until it ends
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
    """In a child: end with the parent, which keeps ``held``, the other end of the pipe ``lifetime``, until it ends.

    The parent may have ended before. In a new PID namespace getppid(2) is 0 in any case.
    """
    os.close(held)
    linux.prctl(linux.PR_SET_PDEATHSIG, SIGKILL)
    try:
        os.read(lifetime, 1)
    except BlockingIOError:
        return
    os._exit(128 + SIGKILL)


def wait(child: int) -> int:
    """Wait for the ``child`` of fork() and forward all signals to it; return its exit status as a shell reports it.

    If the child stops, stop too: the caller's shell then sees a stopped job. SIGCONT continues both.
    """
    signals.restore()  # the kernel drops a signal that is ignored
    while True:
        pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if pid and not os.WIFSTOPPED(status):
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if pid:
            os.kill(os.getpid(), SIGSTOP)
        caught = sigwaitinfo(signals.CATCHABLE)
        if caught.si_signo != SIGCHLD or caught.si_code <= 0:  # not the kernel's: somebody has sent it
            _forward(child, caught.si_signo, from_kernel=caught.si_code == _SI_KERNEL)


def guard(timeout_s: float | None) -> int:
    """Continue this process in a grandchild, and return the child between them for wait(). Returns 0 in the grandchild.

    The child is c_shims/programs/guard.c: it kills the grandchild and all that it has started when this process has
    ended, or after ``timeout_s`` seconds. Raises OSError.
    """
    mask = pthread_sigmask(SIG_BLOCK, signals.CATCHABLE)
    lifetime, held = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # this process keeps ``held`` open until it ends
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


def end(status: int) -> NoReturn:
    """End as the child has ended, by the same signal if there was one."""
    if status > 128:
        number = status - 128
        if number in signals.CATCHABLE:
            signal(number, SIG_DFL)
            pthread_sigmask(SIG_UNBLOCK, (number,))
        os.kill(os.getpid(), number)
    os._exit(status)


def _forward(child: int, number: int, *, from_kernel: bool) -> None:
    """Send a signal to ``child``, unless the terminal has sent it to the process group of both."""
    if number in signals.STOPPING and ignores_default(child, number):
        os.kill(child, SIGSTOP)
    elif not (from_kernel and number in signals.OF_TERMINALS and os.getpgid(child) == os.getpgrp()):
        os.kill(child, number)


def ignores_default(child: int, number: int) -> bool:
    """Return whether ``child`` has the default action for a signal and is the first process of its PID namespace.

    The kernel then drops the signal, unless it is SIGSTOP or SIGKILL of the parent namespace: pid_namespaces(7).
    """
    from time import sleep

    for _ in range(_MAX_CHECKS):
        try:
            os.readlink("/proc/self")  # fails if /proc is the child's, with other numbers
            with open(f"/proc/{child}/status") as f:
                status = dict(line.split(":\t", 1) for line in f if ":\t" in line)
            with open(f"/proc/{child}/wchan") as f:
                place = f.read()
        except OSError:
            return False
        if status["NSpid"].split()[1:][-1:] != ["1"]:
            return False
        if any(int(status[name], 16) & 1 << number - 1 for name in ("SigBlk", "SigIgn", "SigCgt")):
            return False
        if place != "0":  # it sleeps: sigtimedwait(2) meanwhile does not block what it waits for
            return "sigtimedwait" not in place
        sleep(0.001)
    return True


def keep_capabilities() -> None:
    """Let a program that this process executes have its capabilities, capabilities(7) "ambient"."""
    permitted = linux.capget_permitted()
    linux.capset(permitted, permitted, permitted)
    for capability in range(permitted.bit_length()):
        if permitted >> capability & 1:
            linux.prctl(linux.PR_CAP_AMBIENT, linux.PR_CAP_AMBIENT_RAISE, capability)
