"""Run a program in a child process, forward signals to it, or let it keep capabilities."""

from __future__ import annotations

import os
from _signal import (
    SIG_BLOCK,
    SIG_DFL,
    SIG_SETMASK,
    SIG_UNBLOCK,
    SIGCHLD,
    SIGCONT,
    SIGKILL,
    SIGSTOP,
    SIGTERM,
    pidfd_send_signal,
    pthread_sigmask,
    signal,
    sigtimedwait,
    sigwaitinfo,
)
from time import monotonic

from enroot_py.base import linux, signals
from enroot_py.base.fds import Fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from signal import struct_siginfo
    from typing import NoReturn

_SI_KERNEL = 0x80  # sigaction(2)
TIMED_OUT = 124  # timeout(1)
_LONG_S = 1 << 30
of_child: list[int] = []  # descriptors that the parent closes when it has forked
_GRACE_S = 5  # from SIGTERM to SIGKILL
_KILL_S, _KILLS = 0.05, 1200  # a minute: a process may wait for a disk
_LOOKS = 200  # at a program that runs, a millisecond each


def fork() -> int:
    """fork(2) a child for wait(). No signal ends the parent from here on, and the child ends with the parent."""
    child, lifetime = _fork_linked(SIGKILL)
    if not child:
        os.close(lifetime)
    return child


def _fork_linked(death_signal: int) -> tuple[int, int]:
    """fork(2) a child that gets a signal when the parent ends, and whose pipe closes then. Return the child, and 0.

    The child gets 0 and the pipe. It ends at once if the parent has already ended.
    """
    mask, child = pthread_sigmask(SIG_BLOCK, signals.CATCHABLE), 0
    lifetime, held = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # the parent keeps ``held`` open until it ends
    try:
        child = os.fork()
    finally:
        if not child:
            pthread_sigmask(SIG_SETMASK, mask)
    if not child:
        os.close(held)
        linux.prctl(linux.PR_SET_PDEATHSIG, death_signal)
        # The parent may have ended before. In a new PID namespace getppid(2) is 0 in any case.
        if _is_closed(lifetime):
            os._exit(128 + SIGKILL)
        return 0, lifetime
    for fd in (lifetime, *of_child):
        os.close(fd)
    return child, 0


def _is_closed(lifetime: int) -> bool:
    """Return whether the process that holds the other end of a non-blocking pipe has ended."""
    try:
        return not os.read(lifetime, 1)
    except BlockingIOError:
        return False


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


def guard(proc: int, timeout_s: float | None) -> int | None:
    """Run the rest of this process in a grandchild, and return its exit status here. Return None in the grandchild.

    The child between them is the guard: when this process is killed, or after ``timeout_s`` seconds, it kills all its
    descendants. Orphans become its children: prctl(2) "PR_SET_CHILD_SUBREAPER". ``proc`` is the /proc of the node.
    """
    child, lifetime = _fork_linked(SIGCONT)  # which also wakes a guard that is stopped
    if child:
        os.close(proc)
        return wait(child)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    child = fork()
    if not child:
        os.close(lifetime)
        os.close(proc)
        return None
    for fd in (0, 1):  # a pipe of the caller ends with the command
        os.close(fd)
    os._exit(_Guard(child, lifetime, proc, timeout_s).watch())


class _Guard:
    """Wait for a child, and kill all descendants if the caller has gone or the time is over."""

    def __init__(self, child: int, lifetime: int, proc: int, timeout_s: float | None) -> None:
        self._child, self._lifetime, self._proc = child, lifetime, proc
        self._deadline = None if timeout_s is None else monotonic() + timeout_s
        self._status: int | None = None  # of the child

    def watch(self) -> int:
        """Return the exit status of the child, or TIMED_OUT."""
        signals.restore()
        timed_out = False
        while not self._reap() and not _is_closed(self._lifetime):
            caught = self._next_signal()
            if caught is None:
                if timed_out:
                    break
                timed_out, self._deadline = True, monotonic() + _GRACE_S
                self._send(SIGTERM)
                self._send(SIGCONT)  # a stopped process handles no signal
            elif not _is_closed(self._lifetime) and (caught.si_signo != SIGCHLD or caught.si_code <= 0):
                _forward(self._child, caught.si_signo, from_kernel=caught.si_code == _SI_KERNEL)
        if timed_out or self._status is None:
            self._kill_all()
        return TIMED_OUT if timed_out else 128 + SIGKILL if self._status is None else self._status

    def _next_signal(self) -> struct_siginfo | None:
        """Wait for a signal until the deadline. Return None at the deadline."""
        left = _LONG_S if self._deadline is None else max(0, self._deadline - monotonic())
        caught: struct_siginfo | None = sigtimedwait(signals.CATCHABLE, left)
        return caught

    def _reap(self) -> bool:
        """Reap children. If the child has stopped, stop too, unless there is a timeout. Return whether it has ended."""
        try:
            while (change := os.waitpid(-1, os.WNOHANG | os.WUNTRACED))[0]:
                pid, status = change
                if pid == self._child and os.WIFSTOPPED(status):
                    if self._deadline is None and not _is_closed(self._lifetime):
                        os.kill(os.getpid(), SIGSTOP)
                elif pid == self._child:
                    code = os.waitstatus_to_exitcode(status)
                    self._status = code if code >= 0 else 128 - code
        except ChildProcessError:
            pass
        return self._status is not None

    def _kill_all(self) -> None:
        """Kill all descendants: children, then the orphans that become children."""
        for _ in range(_KILLS):
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            self._send(SIGKILL)
            sigtimedwait((SIGCHLD,), _KILL_S)

    def _send(self, number: int) -> None:
        """Send a signal to each child. Numbers in ``proc`` are not those of this process's PID namespace."""
        me = os.readlink("self", dir_fd=self._proc)
        with Fd(os.open(f"{me}/task/{me}/children", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)) as fd:
            children = fd.content().split()
        for child in children:
            try:
                with Fd(os.open(child, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)) as process:
                    pidfd_send_signal(process, number)
            except OSError:  # it has just ended
                continue


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
    if number in signals.STOPPING and _ignores_default(child, number):
        os.kill(child, SIGSTOP)
    elif not (from_kernel and number in signals.OF_TERMINALS and os.getpgid(child) == os.getpgrp()):
        os.kill(child, number)


def _ignores_default(child: int, number: int) -> bool:
    """Return whether ``child`` has the default action for a signal and is the first process of its PID namespace.

    The kernel then drops the signal, unless it is SIGSTOP or SIGKILL of the parent namespace: pid_namespaces(7).
    """
    from time import sleep

    for _ in range(_LOOKS):
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
