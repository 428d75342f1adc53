"""Containers in the background: ``start --detach``, ``logs``, ``wait`` and ``stop``."""

from __future__ import annotations

import _signal
import os
import select
import sys
from time import monotonic, sleep

from enroot_py.base import log, proc
from enroot_py.base.errors import OWN_ERROR, ContainerError, PenrootError, UsageError, with_status
from enroot_py.base.fds import Fd
from enroot_py.cli import running
from enroot_py.config.settings import load
from enroot_py.runtime import detached, namespaces, processes, supervise
from enroot_py.store import containers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from enroot_py.config.settings import Settings
    from enroot_py.runtime.rootfs import Source

    Ready = Callable[[], None]

_TICK_S = 0.1
_TIMEOUT_S = 10  # as docker stop
_CHUNK_BYTES = 1 << 16
_MAX_STOPPED_AT_ONCE = 500  # containers; each needs a descriptor
_HINT = "penroot list shows your containers"


def start(
    name: str, target: str, settings: Settings, find: Callable[[], Source], run: Callable[[Source, Ready], NoReturn]
) -> None:
    """Start a container in the background and print its name.

    ``find`` returns the root file system of ``target``. ``run`` starts the container, and calls its second argument
    just before it executes the program. Raises PenrootError. An error has the exit status 125, unless the class of the
    error defines a status.
    """
    try:
        _check_name(name)
        source = find()
        record = detached.claim(name or _invent(target), settings)
        launched = detached.launch(record)
        if launched is None:
            spaces = os.open("/proc/self/ns", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            # The monitor finds orphans of the program by their user namespace. With --pid there are no orphans, because
            # the kernel ends a PID namespace with its first process. With superuser rights there is no user namespace.
            may_leave_orphans = not (namespaces.privileged(settings) or settings.unshare_pid)

            def ready() -> None:
                if may_leave_orphans:
                    detached.note_namespace(record, spaces)
                detached.report(0)

            run(source, ready)
    except PenrootError as e:
        error = with_status(e, OWN_ERROR)
        detached.report(error.exit_code)
        raise
    except OSError:
        detached.report(OWN_ERROR)
        raise
    _finish(record, *launched)


def _finish(record: detached.Record, messages: list[tuple[str, str]], status: int) -> None:
    """Print the messages of a start, then the container's name. After a failed start, print the log, and exit."""
    for level, text in messages:
        log.sink(level, text)
    if not status:
        sys.stdout.write(record.name + "\n")
        return
    with record.open_log(os.O_RDONLY) as written:
        sys.stderr.write(os.fsdecode(written.content(_CHUNK_BYTES)))
    record.remove()
    if not messages:
        log.error(f"the start of {record.name} was killed")
    sys.exit(status)


def _check_name(name: str) -> None:
    if name:
        containers.check_name(name)
    if name.isdecimal():
        raise UsageError(f"--name {name}: a number would be taken for a PID", hint=f"add a letter: --name job{name}")


def _invent(target: str) -> str:
    """Return a new name for a container of ``target``."""
    base = os.path.basename(target.partition("@")[0].rstrip("/")).removesuffix(".sqsh")
    base = "".join(c if c.isalnum() or c in "._-" else "-" for c in base).strip(".-")[:100]
    return f"{base or 'container'}-{os.urandom(3).hex()}"


def _find(name: str, settings: Settings) -> detached.Record:
    """Open the record of a detached container. Raises ContainerError."""
    record = detached.find(name, settings)
    if record is None:
        hint = "penroot start --detach runs a container in the background; penroot list shows your containers"
        raise ContainerError(f"no detached container: {name}", hint=hint)
    return record


def logs(name: str, follow: bool) -> int:
    """Print the output of a detached container; with ``follow``, until it ends. Raises PenrootError."""
    with _find(name, load()) as record, record.open_log(os.O_RDONLY) as output:
        ended = False
        while True:
            while data := os.read(output, _CHUNK_BYTES):
                _write(data)
            if ended or not follow:
                return 0
            ended = not _runs_after(record, _TICK_S)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def _runs_after(record: detached.Record, seconds: float | None) -> bool:
    """Wait at most ``seconds`` for the end of a container. Return whether it still runs."""
    if not record.is_running:
        return False
    try:
        with Fd(os.pidfd_open(record.monitor)) as monitor:
            if record.is_running:
                _ends(monitor, seconds)
    except (OSError, ValueError):  # the container has just ended, or is being started
        sleep(_TICK_S / 10)
    return record.is_running


def wait(names: tuple[str, ...]) -> int:
    """Wait until detached containers have ended, and print the exit status of each. Raises PenrootError."""
    settings = load()
    for name in names:
        with _find(name, settings) as record:
            while _runs_after(record, None):
                pass
            sys.stdout.write(f"{record.status}\n")
            sys.stdout.flush()
    return 0


def stop(names: tuple[str, ...], signal: str | None, timeout: str | None) -> int:
    """End containers: send a signal, and SIGKILL after a timeout. Raises PenrootError."""
    settings, number = load(), _signal_number(signal or "TERM")
    seconds = running.seconds(timeout, "--timeout")
    wait_s, failed = _TIMEOUT_S if seconds is None else seconds, False
    for at in range(0, len(names), _MAX_STOPPED_AT_ONCE):
        failed |= not _stop(names[at : at + _MAX_STOPPED_AT_ONCE], number, wait_s, settings)
    if failed:
        raise PenrootError("not every container was stopped", hint=_HINT)
    return 0


def _stop(names: tuple[str, ...], number: int, wait_s: float, settings: Settings) -> bool:
    """End containers. Return False if a container could not be ended."""
    deadline, stopping, failed = monotonic() + wait_s, [], False
    for name in names:
        try:
            stopping.append(_Stopping(name, settings))
            stopping[-1].send(number)
        except ContainerError as e:
            log.error(str(e))
            log.hint(e.hint)
            failed = True
    for each in stopping:
        each.await_end(deadline)
    running.kill_in([each.space for each in stopping if each.space])
    return not failed


class _Stopping:
    """A running container to stop: its first process, its mount namespace, and the process to wait for."""

    def __init__(self, name: str, settings: Settings) -> None:
        """Find the container. Raises ContainerError."""
        self._name = name
        record = detached.find(name, settings)
        if record is None:
            program = waited = running.find(name, settings)
        else:
            with record:
                while record.is_running and not record.monitor:
                    sleep(_TICK_S)  # the container is starting
                program, waited = record.program, record.monitor
        self._program, self._waited = _Process(program), _Process(waited)
        self._inside = processes.inside(program, settings)
        self.space = running.open_space(self._inside)

    def send(self, number: int) -> None:
        """Send a signal to the first process. Also send SIGCONT, because a stopped process handles no signal.

        The kernel drops a signal for which process 1 of a PID namespace has no handler: send SIGKILL instead.
        """
        if self._inside and supervise.ignores_default(self._inside, number):
            number = _signal.SIGKILL
        with self._program.open() as process:
            try:
                if process >= 0:
                    _signal.pidfd_send_signal(process, number)
                    _signal.pidfd_send_signal(process, _signal.SIGCONT)
            except ProcessLookupError:
                return
            except PermissionError as e:
                raise ContainerError(f"cannot stop {self._name}: {e.strerror}", hint=_HINT) from e

    def await_end(self, deadline: float) -> None:
        """Wait for the container's end. After the deadline, kill its first process and wait again."""
        with self._waited.open() as process:
            if process < 0 or _ends(process, max(0, deadline - monotonic())):
                return
            log.info(f"{self._name} has not ended in time: killing it")
            self.send(_signal.SIGKILL)
            _ends(process, None)


class _Process:
    """A process, identified by its PID and start time. PID 0 means no process."""

    def __init__(self, pid: int) -> None:
        stat = proc.look(pid) if pid else None
        self._pid, self._started = (pid, stat.started) if stat else (0, 0)

    def open(self) -> Fd:
        """Open a pidfd. Return -1 if the process has ended."""
        try:
            fd = Fd(os.pidfd_open(self._pid)) if self._pid else Fd(-1).keep()
        except ProcessLookupError:
            return Fd(-1).keep()
        stat = proc.look(self._pid)
        if stat and stat.started == self._started:
            return fd
        with fd:
            return Fd(-1).keep()


def _ends(process: int, seconds: float | None) -> bool:
    """Wait for the end of a process that is open as a pidfd. Return whether it has ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _signal_number(text: str) -> int:
    """Return the number of a signal given as TERM, SIGTERM or 15. Raises UsageError."""
    name = text.upper()
    value = int(text) if text.isdecimal() else getattr(_signal, name if name.startswith("SIG") else f"SIG{name}", 0)
    if not isinstance(value, int) or value not in _signal.valid_signals():
        raise UsageError(f"--signal {text}: no such signal", hint="kill -l lists the signals")
    return value
