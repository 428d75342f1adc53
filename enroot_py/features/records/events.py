"""Event records: one line of JSON for each pull, create, start and step.

penroot itself writes the records, with the user's rights (not root's), to the destination in ENROOT_EVENTS: a file,
journald or syslog. If writing fails, penroot only prints a warning. Writing to a socket never blocks, but writing to a
file can wait, for example for an NFS server. docs/reference/events.md has the schema.
Sources: systemd's Native Journal Protocol; RFC 3164 as used by syslog(3).
"""

from __future__ import annotations

import _socket
import errno
import os
import time

# Use json's C function: importing json takes longer than starting a container.
from _json import encode_basestring_ascii as _quoted

from enroot_py.base import log, trusted
from enroot_py.base.errors import PenrootError

SOCKETS = {"journald": "/run/systemd/journal/socket", "syslog": "/dev/log"}
KINDS = {
    "pull": "an image is looked up, and missing layers are downloaded",
    "create": "a container is created from an image",
    "start": "`penroot start` or `batch` enters a container",
    "step": "a Slurm step gets its container on a node",
}
PHASES = ("resolve", "fetch", "compose", "wait", "attach", "image", "rootfs", "mounts", "hooks")
FIELDS = {
    "version": "number of this schema: 1",
    "event": ", ".join(KINDS),
    "time": "start time, UTC",
    "seconds": "duration in seconds",
    "phases": "seconds by phase: " + ", ".join(PHASES),
    "result": "ok or error",
    "error": "first line of the error message",
    "user": "name of the user, or the user ID",
    "uid": "user ID",
    "node": "host name",
    "job": "job ID",
    "step": "JOB.STEP",
    "image": "reference or path of the image",
    "digest": "digest of the image's manifest",
    "container": "name of the container, if any",
    "cache": "hit: nothing was downloaded; part: some layers; miss: all layers",
    "layers": "number of downloaded layers",
    "bytes": "compressed size of these layers in bytes",
}
_MAX_TEXT_CHARS = 400
_MAX_JOB_DIGITS = 10  # a job's number has 32 bits
_PRIORITY = 14  # user.info, RFC 3164
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Facts that an inner event, such as the pull within a start, passes to the outer event when the inner event ends.
_FROM_WITHIN = ("image", "digest", "cache", "layers", "bytes")
# Facts that an inner event takes from the outer event.
_FROM_AROUND = ("user", "uid", "node", "job", "step")


class Event:
    """One event, perhaps within the outer event ``around``. end() writes the record."""

    def __init__(self, kind: str, where: str, facts: dict[str, str | int], around: Event | None) -> None:
        self.facts: dict[str, str | int] = {"event": kind}
        self.phases: dict[str, float] = {}
        self._around = around
        # Look up the user and open the file before a start enters the container: inside, files and user names differ.
        known = around.facts if around is not None else {**who(), **_job()}
        self.facts.update({key: known[key] for key in _FROM_AROUND if key in known})
        self.facts.update({key: value for key, value in facts.items() if value != ""})
        self._sink = _Sink.open(where) if where else None
        self._time, self._began = time.time(), time.monotonic()
        self._marked = self._began

    def end(self, error: BaseException | None) -> None:
        """End the event, with or without an error, and write the record."""
        self.seconds = time.monotonic() - self._began
        if error is None and self.facts["event"] == "pull":
            self.facts.setdefault("cache", "hit")
        if self._around is not None:
            self._around.facts.update({key: self.facts[key] for key in _FROM_WITHIN if key in self.facts})
        if self._sink is not None:
            self._sink.write(self.line(error))

    def phase(self, name: str) -> None:
        """End the phase ``name``. It began when the previous phase ended, or else when the event began."""
        now = time.monotonic()
        self.add(name, now - self._marked)

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` to the phase ``name``; another process may have measured them. The next phase begins now."""
        self.phases[name] = self.phases.get(name, 0.0) + seconds
        self._marked = time.monotonic()

    def again(self) -> None:
        """In a child process, clear the phases of the parent."""
        self.phases.clear()
        self._marked = time.monotonic()

    def line(self, error: BaseException | None) -> str:
        """Return the record as a line of JSON."""
        second, fraction = divmod(int(self._time * 1000), 1000)
        began = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)) + f".{fraction:03}Z"
        record: dict[str, object] = {"version": 1, **self.facts, "time": began, "seconds": round(self.seconds, 6)}
        record["phases"] = {name: round(seconds, 6) for name, seconds in self.phases.items()}
        record["result"] = "error" if error is not None else "ok"
        if error is not None:
            is_ours = isinstance(error, PenrootError)
            # An error that srun or another node has printed has the text "" here, and its cause has the printed text.
            text = str(error) or str(error.__cause__ or "")
            record["error"] = text.partition("\n")[0] if is_ours else type(error).__name__
        return _json({key: record[key] for key in FIELDS if key in record})

    def words(self) -> str:
        """Return the duration and the phases as text."""
        fetched = log.size(int(self.facts["bytes"])) + " fetched" if self.facts.get("bytes") else "stored"
        more = {"image": f" ({fetched})" if "cache" in self.facts else ""}
        parts = [f"{name} {seconds:.2f} s{more.get(name, '')}" for name, seconds in self.phases.items()]
        return f"{self.seconds:.2f} s: " + ", ".join(parts)


class _Sink:
    """The destination of records: an open file, or a daemon's socket."""

    _warned = False

    def __init__(self, where: str) -> None:
        """Raises OSError."""
        self._where = where
        self._file = -1
        if where in SOCKETS:
            self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            self._socket.connect(SOCKETS[where])
        else:
            self._file = _open_file(where)

    @classmethod
    def open(cls, where: str) -> _Sink | None:
        """Open the destination, or print a warning and return None."""
        try:
            return cls(where)
        except OSError as e:
            cls._warn(where, e)
            return None

    @classmethod
    def _warn(cls, where: str, error: OSError) -> None:
        if not cls._warned:
            cls._warned = True
            destination = SOCKETS.get(where) or error.filename or where
            hint = "to use another file, journald or syslog, set ENROOT_EVENTS, or events= in plugstack.conf"
            log.warn(f"events are not recorded: {destination}: {error.strerror}: {hint}")

    def write(self, line: str) -> None:
        """Write one record."""
        try:
            if self._file < 0:
                self._socket.send(self._framed(line))
                self._socket.close()
            else:
                data = f"{line}\n".encode()
                while data:  # write(2) to a full disk may write only a part of the line
                    data = data[os.write(self._file, data) :]
                os.close(self._file)
        except OSError as e:
            self._warn(self._where, e)

    def _framed(self, line: str) -> bytes:
        if self._where == "journald":
            return f"MESSAGE={line}\nPRIORITY=6\nSYSLOG_IDENTIFIER=penroot\n".encode()
        return f"<{_PRIORITY}>{time.strftime('%b %e %H:%M:%S')} penroot[{os.getpid()}]: {line}".encode()


def file_of(where: str) -> str:
    """Return the caller's file: ``where``, or UID.jsonl in the directory ``where``."""
    return f"{where.rstrip('/')}/{os.geteuid()}.jsonl" if os.path.isdir(where) else where


def _open_file(where: str) -> int:
    """Open the file of records for appending. Raises OSError for a link, or an owner other than the caller or root."""
    path = file_of(where)
    trusted.place(os.path.dirname(path), closed_to=0)
    fd = opened(path, _FLAGS)
    state = os.fstat(fd)
    if state.st_uid not in (os.geteuid(), 0) or state.st_nlink != 1:
        os.close(fd)
        why = "has several hard links" if state.st_nlink != 1 else f"belongs to uid {state.st_uid}"
        raise PermissionError(errno.EPERM, why, path)
    os.set_blocking(fd, True)
    return fd


def opened(path: str, flags: int) -> int:
    """Open a regular file of records. Raises OSError for anything else."""
    try:
        return trusted.regular(os.open(path, flags | _OPEN, 0o600), path)
    except OSError as e:
        why = {errno.ELOOP: "is a symbolic link", errno.ENXIO: trusted.IRREGULAR}.get(e.errno or 0)
        raise OSError(e.errno, why, path) if why else e from None


def who() -> dict[str, str | int]:
    """Return user and node."""
    import pwd

    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return {"user": name, "uid": uid, "node": os.uname().nodename}


def _job() -> dict[str, str | int]:
    """Return job and step, if the command runs in one."""
    job, step = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", "")
    if not job.isdecimal() or len(job) > _MAX_JOB_DIGITS:
        return {}
    return {"job": int(job), **({"step": f"{job}.{step}"} if step.isdecimal() else {})}


def _json(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(key)}: {_json(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (int, float)):
        return repr(value)
    return _quoted(os.fsencode(str(value)).decode(errors="replace")[:_MAX_TEXT_CHARS])
