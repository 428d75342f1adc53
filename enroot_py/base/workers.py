"""Run tasks in forked processes, several at a time. The first failure ends all of them.

Processes, not threads: hashing and unpacking use every CPU, and one process can enter namespaces or be killed while the
others go on.
"""

from __future__ import annotations

import errno
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NoReturn

from enroot_py.base import filesystems, linux, log, proc
from enroot_py.base.errors import PenrootError

_TICK_S = 0.2
_CHECK_INTERVAL_S = 1.0
_STOPPED_AFTER_S = 60.0
_PIPE_BYTES = 1 << 16  # capacity of a pipe: pipe(7)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Request a signal when the parent ends. Entering a user namespace cancels the request: prctl(2)."""
    linux.prctl(linux.PR_SET_PDEATHSIG, number)


def processors(most: int = 0) -> int:
    """Return ``most``, or if it is 0 the number of CPUs on which this process may run."""
    return most or len(os.sched_getaffinity(0))


def run(tasks: Sequence[Callable[[], None]], parallel: int, tick: Callable[[int], None] | None = None) -> None:
    """Call each task in its own process, in order, ``parallel`` at a time.

    Calls ``tick`` several times a second with the number of ended tasks. If a task fails, kills all tasks. Raises
    the task's PenrootError or OSError, or RuntimeError for any other error. SIGINT or SIGTERM kills all tasks, and
    raises KeyboardInterrupt or SystemExit. The caller removes the files of killed tasks. Warns if a task's process is
    stopped, and raises PenrootError if it stays stopped for a minute.
    """
    waiting = list(tasks)
    running: dict[int, int] = {}  # by PID: the pipe from which to read the error
    failure: BaseException | None = None
    stops = _Stops()
    with _Interrupts() as interrupts:
        try:
            while failure is None and (waiting or running):
                while waiting and len(running) < max(1, parallel):
                    _start(waiting.pop(0), running)
                # The pipe of an ended process is closed, or has its error.
                watched = select.poll()
                for pipe in (interrupts.pipe, *running.values()):
                    watched.register(pipe, select.POLLIN)
                ended = [pipe for pipe, _ in watched.poll((_TICK_S if tick else _CHECK_INTERVAL_S) * 1000)]
                interrupts.check()
                stops.look(running)
                for pid in [pid for pid, pipe in running.items() if pipe in ended]:
                    _, status = os.waitpid(pid, 0)
                    failure = _outcome(running.pop(pid), status) or failure
                if tick:
                    tick(len(tasks) - len(waiting) - len(running))
        finally:
            _end(running)
    if failure is not None:
        raise failure


class _Stops:
    """Detect processes that are stopped while this process, their parent, runs."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._looks = 0  # consecutive checks that found a stopped process

    def look(self, pids: Iterable[int]) -> None:
        """Warn of a stopped process. Raises PenrootError if a process stays stopped."""
        now = time.monotonic()
        if now - self._looked < _CHECK_INTERVAL_S:
            return
        self._looked = now
        from enroot_py.base import waits

        stopped = next((pid for pid in waits.families(pids) if (stat := proc.look(pid)) and stat.is_stopped), 0)
        # Count checks, not seconds: in a resumed job, this process may continue before its children.
        self._looks = self._looks + 1 if stopped else 0
        if self._looks == 2:
            log.warn(f"waiting for {waits.described(stopped)}: resume it with kill -CONT {stopped}")
        if self._looks * _CHECK_INTERVAL_S >= _STOPPED_AFTER_S:
            seconds = int(_STOPPED_AFTER_S)
            raise PenrootError(f"the worker process {stopped} was stopped for {seconds} s", hint="try again")


class _Interrupts:
    """Within the ``with``, record SIGINT and SIGTERM, and raise only in check().

    A signal handler can run between any two instructions. If it raised an exception in a destructor, Python would drop
    the exception, and the interrupt would be lost. ``pipe`` becomes readable at the first signal. Signals that the
    caller ignores or handles stay as they are.
    """

    def __enter__(self) -> _Interrupts:
        self.number = 0
        self.pipe, self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before: dict[int, Any] = {}
        for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            if signal.getsignal(number) == usual:
                self._before[number] = usual
                signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.pipe)
        os.close(self._wakeup)
        if kind is None:
            self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        os.write(self._wakeup, b"!")

    def check(self) -> None:
        """Raise KeyboardInterrupt or SystemExit for the last recorded signal."""
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.number:
            raise SystemExit(128 + self.number)


def _start(task: Callable[[], None], running: dict[int, int]) -> None:
    result, answer = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    # Block signals until the child is in ``running``. An interrupt before that would leave the child behind.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as e:
        os.close(result)
        os.close(answer)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if e.errno != errno.EAGAIN:
            raise
        why, hint = filesystems.no_process()
        raise PenrootError(f"cannot start a process: {why}", hint=hint) from e
    if pid == 0:
        _child(task, answer, parent, blocked)
    os.setpgid(pid, pid)  # both parent and child do this, because either may run first
    running[pid] = result
    os.close(answer)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _child(task: Callable[[], None], answer: int, parent: int, mask: set[int]) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, _kill_group)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with_parent()
        if os.getppid() == parent:
            task()
            status = 0
    except (PenrootError, OSError) as e:
        failure = pickle.dumps(e)
        os.write(answer, failure if len(failure) <= _PIPE_BYTES else pickle.dumps(PenrootError(f"{str(e)[:1000]}…")))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _kill_group(number: int, frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)  # this process and the program that it runs


def _outcome(pipe: int, status: int) -> BaseException | None:
    with open(pipe, "rb") as f:
        failure = f.read()
    if failure:
        error = pickle.loads(failure)
        assert isinstance(error, (PenrootError, OSError))
        return error
    if status == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        name = signal.Signals(-code).name
        return PenrootError(
            f"a worker process was killed by {name}",
            hint="out of memory? see --mem and dmesg" if code == -signal.SIGKILL else "",
        )
    return RuntimeError("a worker process failed, see above")


def _end(running: dict[int, int]) -> None:
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
    for pid, pipe in running.items():
        os.waitpid(pid, 0)
        os.close(pipe)
    running.clear()
