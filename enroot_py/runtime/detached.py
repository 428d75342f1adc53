"""Start detached containers, and keep their records in ENROOT_RUNTIME_PATH/detached/NAME.

A record is a directory with these files: ``processes`` has PID and start time of the monitor and of the program,
``log`` has the output of the program, ``userns`` has the inode of the program's user namespace, and ``status`` has the
program's exit status once the program has ended. The monitor, c_shims/programs/monitor.c, is the parent of the program
and keeps the directory locked. A name is free if no process has locked its directory. The kernel kills the program if
the monitor is killed.
"""

from __future__ import annotations

import os
from _signal import SIG_BLOCK, SIG_SETMASK, SIGKILL, pthread_sigmask

from enroot_py import LIBRARY
from enroot_py.base import linux, locks, log, proc, signals
from enroot_py.base.errors import ContainerError
from enroot_py.base.fds import Fd
from enroot_py.config.settings import Settings
from enroot_py.runtime import rootfs, supervise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_MONITOR = f"{LIBRARY}/libexec/penroot-monitor"
_RECORD_FD = 3  # the monitor's descriptor of the record
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILES = ("processes", "log", "userns", "status", ".status")
_MAX_BYTES = 128
_MAX_CLAIMS = 10
LOST_STATUS = 128 + SIGKILL  # reported for a container whose monitor was killed


def records_path(settings: Settings) -> str:
    """Return the directory of the records. Raises ContainerError."""
    return f"{rootfs.make_scratch(settings)}/detached"


def names(settings: Settings) -> list[str]:
    """Return the names of all detached containers, running or not, sorted."""
    try:
        return sorted(os.listdir(records_path(settings)))
    except FileNotFoundError:
        return []


def programs(settings: Settings) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each detached container, and the PID and start time of its program, or 0 if unknown."""
    directory = records_path(settings)
    for name in names(settings):
        try:
            with Fd(os.open(f"{directory}/{name}/processes", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
                _, _, pid, started = map(int, fd.content(_MAX_BYTES).split())
        except (OSError, ValueError):
            pid = started = 0
        yield name, pid, started


def find(name: str, settings: Settings) -> Record | None:
    """Open the record of a detached container. Return None if there is none. Raises ContainerError."""
    if not name or "/" in name or name in (".", ".."):
        return None
    path = f"{records_path(settings)}/{name}"
    try:
        return Record(name, path, Fd(os.open(path, _DIRECTORY)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise ContainerError(f"cannot open {path}: {e.strerror}") from e


class Record:
    """The record of a detached container, open at ``fd``."""

    def __init__(self, name: str, path: str, fd: Fd) -> None:
        self.name, self.path, self.fd = name, path, fd

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    @property
    def is_running(self) -> bool:
        """Return whether the container runs or is starting."""
        if self._text("processes"):
            return self.monitor > 0
        with Fd(os.open(".", _DIRECTORY, dir_fd=self.fd)) as fd:
            return not locks.flock(fd, shared=True)

    @property
    def monitor(self) -> int:
        """Return the PID of the monitor, or 0 if it has ended."""
        return self._process(0)

    @property
    def program(self) -> int:
        """Return the PID of the process that starts the container, or 0 if the process has ended.

        This process becomes the program. With a private PID namespace, it waits for the program.
        """
        return self._process(1)

    def _process(self, number: int) -> int:
        """Return the PID of process ``number`` of the file ``processes``, or 0 if it has ended."""
        words = self._text("processes").split()[2 * number :][:2]
        pid, started = map(int, words) if len(words) == 2 and all(map(str.isdecimal, words)) else (0, 0)
        stat = proc.look(pid) if pid else None
        return pid if stat and stat.started == started and stat.state not in "ZX" else 0

    @property
    def status(self) -> int | None:
        """Return the exit status of the program, None while it runs, or LOST_STATUS if the monitor was killed."""
        text = self._text("status").strip()
        if text.isdecimal():
            return int(text)
        return None if self.is_running else LOST_STATUS

    def _text(self, name: str) -> str:
        try:
            with Fd(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)) as fd:
                return os.fsdecode(fd.content(_MAX_BYTES))
        except OSError:
            return ""

    def write(self, name: str, text: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with Fd(os.open(name, flags, 0o600, dir_fd=self.fd)) as fd:
            os.write(fd, text.encode())

    def open_log(self, flags: int) -> Fd:
        """Open the log. Raises OSError."""
        return Fd(os.open("log", flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd))

    def clear(self) -> None:
        """Remove the files of a record that this process has locked."""
        for name in _FILES:
            try:
                os.unlink(name, dir_fd=self.fd)
            except FileNotFoundError:
                continue

    def remove(self) -> None:
        """Remove the record. Raises ContainerError if the container runs."""
        if not locks.flock(self.fd):
            hint = f"end it first: penroot stop {self.name}"
            raise ContainerError(f"the detached container {self.name} is running", hint=hint)
        self.clear()
        try:
            os.rmdir(self.path)
        except OSError as e:
            raise ContainerError(f"cannot remove {self.path}: {e.strerror}") from e
        try:
            os.rmdir(os.path.dirname(self.path))
        except OSError:  # there are other records
            return


def claim(name: str, settings: Settings) -> Record:
    """Claim a name for a new container, and lock its record. Raises ContainerError if the name is taken."""
    path = f"{records_path(settings)}/{name}"
    try:
        for _ in range(_MAX_CLAIMS):
            os.makedirs(path, 0o700, exist_ok=True)
            with Fd(os.open(path, _DIRECTORY)) as fd:
                if not locks.flock(fd):
                    break
                if locks.is_at(fd, path):  # another process may have removed the directory
                    record = Record(name, path, fd.keep())
                    record.clear()
                    return record
    except OSError as e:
        raise ContainerError(f"cannot write {path}: {e.strerror}", hint="see ENROOT_RUNTIME_PATH") from e
    hint = f"use another --name, or end the container: penroot stop {name}"
    raise ContainerError(f"a detached container {name} is running", hint=hint)


def launch(record: Record) -> tuple[list[tuple[str, str]], int] | None:
    """Fork a monitor, which forks a process for the start. Return None in the process that starts the container.

    In the caller, return the messages of the start and its exit status: 0 once the program runs. Raises OSError.
    """
    reader, writer = os.pipe()
    with Fd(reader), record.open_log(os.O_WRONLY | os.O_CREAT | os.O_APPEND) as output:
        monitor = os.fork()
        if not monitor:
            _fork_start(record, output, writer)
            return None
        os.close(writer)
        try:
            text = Fd(reader).content()
        except BaseException:
            os.kill(monitor, SIGKILL)  # this process is interrupted: the start ends with its monitor
            raise
    words = os.fsdecode(text).split("\0")
    messages = list(zip(words[:-1:2], words[1::2], strict=False))
    statuses = [int(status) for level, status in messages if level == _STATUS]
    if not statuses or statuses[-1]:
        os.waitpid(monitor, 0)
    return [message for message in messages if message[0] != _STATUS], statuses[-1] if statuses else LOST_STATUS


_STATUS = "status"
_pipe = -1  # writing end of a pipe to the process that waits for the start


def _fork_start(record: Record, output: int, writer: int) -> None:
    """Fork, and return in the child, which starts the container. The calling process becomes the monitor."""
    global _pipe
    os.setsid()
    with Fd(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)) as nothing:
        os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    _pipe, log.sink = writer, _send
    supervise.of_child += [writer, record.fd]
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    mask = pthread_sigmask(SIG_BLOCK, signals.CATCHABLE)
    me, child = os.getpid(), os.fork()
    if not child:
        linux.prctl(linux.PR_SET_PDEATHSIG, SIGKILL)
        if os.getppid() != me:
            os._exit(LOST_STATUS)
        pthread_sigmask(SIG_SETMASK, mask)
        return
    try:
        record.write("processes", f"{me} {proc.Stat(me).started} {child} {proc.Stat(child).started}\n")
        os.dup2(record.fd, _RECORD_FD)
        os.set_inheritable(_RECORD_FD, True)
        linux.close_range(_RECORD_FD + 1, 0xFFFFFFFF, 0)
        os.execve(_MONITOR, ["penroot-monitor", str(child), record.name], {})
    finally:
        os._exit(LOST_STATUS)


def _report(level: str, text: str) -> bool:
    """Send a message to the process that waits for the start. If it has ended, log the message and return False."""
    try:
        return os.write(_pipe, os.fsencode(f"{level}\0" + text.replace("\0", "") + "\0")) > 0
    except OSError:
        os.write(2, os.fsencode(f"[{level}] {text}\n"))
        return False


def _send(level: str, text: str) -> None:
    _report(level, text)


def note_namespace(record: Record, spaces: int) -> None:
    """Record the user namespace of this process: after the program's end, the monitor kills the orphans in it.

    ``spaces`` is a descriptor of /proc/PID/ns.
    """
    record.write("userns", f"{os.stat('user', dir_fd=spaces).st_ino}\n")


def report(status: int) -> None:
    """Report to launch() the exit status of a failed start, or 0 just before the start executes the program.

    Does nothing in a process that launch() did not fork. Ends the start if the caller of launch() was killed, because
    nobody would know that the program runs.
    """
    if _pipe >= 0 and not _report(_STATUS, str(status)) and not status:
        os._exit(LOST_STATUS)
