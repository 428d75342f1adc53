"""Share the FUSE server of a squashfs image among the containers of a user. enter.share() imports this module.

The server of an image runs in a user namespace below the user's, and the containers run in namespaces below that. A
later start of the same image enters the server's user namespace, and mounts the file system once more through the
server's descriptor of /dev/fuse. The kernel then returns the existing file system, with its caches: fuse_get_tree(),
since Linux 5.15.

- No process counts the containers. When the last mount is gone, the kernel ends the FUSE connection, and then the
  server ends. A start that comes too late gets an error from mount(2), and starts its own server.
- Each image has an entry in a table: a file RUNTIME_PATH/servers/NNN. The only lock is flock(2) of this file. A start
  that takes the lock passes the descriptor to its server and closes its own copy: the kernel releases the lock when the
  server ends. Another start waits for the server for at most _SERVER_TIMEOUT_S.
- The entry holds a PID. The server has this PID or one of the PIDs after it. The PID is only a hint, because programs
  in a container may have the directory mounted and can change the file: _device() checks that a process is the server.
- A server is killed with its control group, which is charged for its memory and processor time. So containers share a
  server only within a control group: in Slurm, within a step.
"""

from __future__ import annotations

import os
from _imp import source_hash
from _signal import pidfd_send_signal

from enroot_py.base import linux, paths, proc
from enroot_py.base.fds import Fd

_MAX_FILES = 4096  # entries in the table of a user: files of 7 bytes, which later images reuse
_MAX_PID_DISTANCE = 64  # libfuse forks the server, so the server's PID follows the PID of the started process
_SERVER_TIMEOUT_S = 2.0  # for a server that another start starts, which takes 0.2 s on a busy node
_TICK_S = 0.001
_PID_DIGITS = 7
_NO_PID = 0  # in an entry whose server was not found
_NS_GET_PARENT = 0xB702  # ioctl_ns(2)
_FUSE_DEVICE = os.makedev(10, 229)


class Entry:
    """The entry of an image in the table: its running server, or the lock for a new server.

    ``pidfd`` is the running server. ``lock`` is the descriptor that a new server must inherit. Each may be -1.
    """

    __slots__ = ("key", "lock", "pid", "pidfd", "_device")

    def __init__(self, key: str) -> None:
        self.key = key
        self.lock = self.pid = self.pidfd = self._device = -1

    def set_server(self, pid: int, pidfd: int, device: int) -> None:
        """Set the running server, and the number of its descriptor of /dev/fuse."""
        self.pid, self.pidfd, self._device = pid, pidfd, device

    def enter(self) -> bool:
        """Enter the user namespace of the server. Return False if no server runs."""
        try:
            if self.pidfd >= 0:
                linux.setns(self.pidfd, linux.CLONE_NEWUSER)
                return True
        except OSError:
            self.forget()
        return False

    def forget(self) -> None:
        """Close the descriptor of the server."""
        os.close(self.pidfd)
        self.pidfd = -1

    def open_device(self) -> Fd:
        """Return a copy of the server's /dev/fuse, which keeps the connection while it is open. Raises OSError."""
        return linux.pidfd_getfd(self.pidfd, self._device)

    def note(self, pid: int) -> None:
        """Write the first PID that the new server can have into the entry, and leave the lock to the server."""
        with Fd(self.lock) as lock:
            self.lock = -1
            try:
                _write(lock, pid)
            except OSError:  # the disk is full, or the entry is no regular file: the server is not shared
                return


def find(image: str, offset: int, scratch: str) -> Entry | None:
    """Return the entry of the image at ``offset`` of the file ``image``, or None if its server cannot be shared.

    Call this before this process enters a namespace.
    """
    try:
        state = os.stat(image)
        entry = Entry(_key(state, offset))
        with _open(f"{scratch}/servers", entry.key) as file:
            for _ in range(int(_SERVER_TIMEOUT_S / _TICK_S)):
                if linux.flock(file, linux.LOCK_EX | linux.LOCK_NB):
                    os.ftruncate(file, 0)  # the earlier server has ended
                    entry.lock = file.keep()
                    return entry
                if not _find_server(entry, file, state):
                    return entry if entry.pidfd >= 0 else None
                import time

                time.sleep(_TICK_S)
            _write(file, _NO_PID)  # the next start does not wait for this server
    except (OSError, ValueError):
        pass  # no descriptors left, or the entry is damaged: start without sharing
    return None


def _key(state: os.stat_result, offset: int) -> str:
    """Return a key for a version of a file, and for the limits and control group that a server inherits."""
    facts = *paths.version(state), offset
    limits = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))
    text = f"{facts} {limits}\n{_group()}\n{_read('/proc/self/limits')}"
    return f"penroot.{source_hash(0, os.fsencode(text)).hex()}"


def _group() -> str:
    """Return the control groups of this process. In a Slurm step, all tasks get the same text."""
    lines = []
    for line in _read("/proc/self/cgroup").splitlines():
        before, step, after = line.partition("/step_")
        lines.append(before + step + after.partition("/")[0])
    return "\n".join(lines)


def _read(path: str) -> str:
    with Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        return os.fsdecode(fd.content())


def _open(directory: str, key: str) -> Fd:
    path = f"{directory}/{int(key[-8:], 16) % _MAX_FILES:03x}"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return Fd(os.open(path, flags, 0o600))
    except FileNotFoundError:
        os.makedirs(directory, 0o700, exist_ok=True)  # another start may be quicker
        return Fd(os.open(path, flags, 0o600))


def _write(file: int, pid: int) -> None:
    os.pwrite(file, b"%-*d" % (_PID_DIGITS, pid), 0)


def _find_server(entry: Entry, file: int, state: os.stat_result) -> bool:
    """Look for the server that locked an entry. Return True to look again: the server may not be recorded yet."""
    text = os.pread(file, _PID_DIGITS, 0)
    if not text:
        return True
    first = int(text)
    if first == _NO_PID:
        return False
    for pid in range(first, first + _MAX_PID_DISTANCE):
        try:
            with Fd(os.pidfd_open(pid)) as pidfd:
                if f"fsname={entry.key}" not in _read(f"/proc/{pid}/cmdline").split("\0"):
                    continue
                stat = proc.Stat(pid)
                if stat.session != pid:
                    continue  # the parent of the server
                if pid != first:
                    _write(file, pid)
                device = -1 if stat.is_stopped else _device(pid, state)
                pidfd_send_signal(pidfd, 0)  # raises if the PID now belongs to a later process
                if device >= 0:
                    entry.set_server(pid, pidfd.keep(), device)
                return False
        except OSError:  # the process has ended, or belongs to another user
            continue
    return True


def _device(pid: int, state: os.stat_result) -> int:
    """Return the descriptor of /dev/fuse in ``pid``, or -1 if ``pid`` is not the server of the file. Raises OSError.

    The server has the file open. It is root of a user namespace directly below this process's user namespace. No
    program in a container is root of such a namespace (see namespaces.nest()).
    """
    from fcntl import ioctl

    if _read(f"/proc/{pid}/uid_map").split() != ["0", str(os.geteuid()), "1"]:
        return -1
    path = f"/proc/{pid}/ns/user"
    with Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as space, Fd(ioctl(space, _NS_GET_PARENT)) as parent:
        if not os.path.samestat(os.fstat(parent), os.stat("/proc/self/ns/user")):
            return -1
    opened = {int(fd): os.stat(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    if not any(os.path.samestat(file, state) for file in opened.values()):
        return -1
    return next((fd for fd, file in opened.items() if file.st_rdev == _FUSE_DEVICE), -1)
