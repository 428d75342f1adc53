"""Find the file system of a path, list the network file systems, and explain errors such as a full disk."""

from __future__ import annotations

import errno
import os

from enroot_py.base import mountinfo

# Types in /proc/self/mountinfo. On these file systems, flock(2) may be local to a node, and each file operation is a
# round trip. overlayfs cannot write to these file systems.
NETWORK = frozenset(
    "nfs nfs4 lustre gpfs beegfs cifs smb3 ceph afs 9p pvfs2 orangefs panfs wekafs gfs2 ocfs2 glusterfs "
    "fuse.glusterfs fuse.sshfs fuse.juicefs fuse.ceph-fuse fuse.cvmfs2 fuse.s3fs fuse.gcsfuse fuse.daosfs".split()
)

# Hints for limits of a process or the machine. Another directory would not help.
OF_PROCESS = {
    errno.EAGAIN: "raise the process limit of this user or job: ulimit -u, pids.max of the control group",
    errno.ENOMEM: "out of memory: raise ulimit -v, or --mem of the job",
    errno.EMFILE: "raise the limit of open files: ulimit -n",
    errno.ENFILE: "raise the limit of open files on this machine: sysctl fs.file-max",
}


def kind(path: str) -> str:
    """Return the type of the file system of ``path`` or of its nearest existing parent, or "" if unknown."""
    number = os.stat(existing(path)).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    return next((mount.fstype for mount in mountinfo.read() if mount.device == device), "")


def hint_for(error: OSError, place: str, setting: str = "") -> str:
    """Return a hint for an error of writing to ``place``.

    ``setting`` is the setting by which the user can choose another directory.
    """
    if error.errno in OF_PROCESS:
        return OF_PROCESS[error.errno]
    other = f"set {setting} to another place" if setting else "choose another place"
    if error.errno == errno.ENOSPC:
        free = os.statvfs(existing(place))
        # File systems that allocate inodes on demand report 0 for their number.
        inodes = free.f_files and not free.f_favail and free.f_bavail
        full = "has space, but no inode left (df -i)" if inodes else "is full (df, df -i)"
        return f"the file system of {place} {full}: remove some files there, or {other}"
    if error.errno == errno.EDQUOT:
        return f"your quota on the file system of {place} is used up (quota -s): remove some files there, or {other}"
    if error.errno == errno.EROFS:
        return f"the file system of {place} is read-only: {other}"
    if error.errno == errno.ENAMETOOLONG:
        return "use a shorter name: at most 255 bytes, and 4095 for the whole path"
    return f"check mode and owner of {place} (ls -ld), which must be your own directory, or {other}"


def no_process() -> tuple[str, str]:
    """Return the reason why no process or thread can be started, and a hint."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    number = "no limit" if limit == resource.RLIM_INFINITY else str(limit)
    return f"the limit of processes is reached (ulimit -u: {number})", OF_PROCESS[errno.EAGAIN]


def in_words(error: OSError) -> tuple[str, str]:
    """Return a message for an error that no caller handles, and a hint or ""."""
    hint = ""
    if error.filename is not None:
        place = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            hint = hint_for(error, place)
    elif isinstance(error, FileNotFoundError) and _is_gone("."):
        place, hint = "the working directory is gone", "cd to an existing directory"
    elif error.errno in OF_PROCESS:
        # fork(2) is the usual source of EAGAIN. The other limits also affect calls such as pipe(2) and socket(2).
        place = "cannot start a process" if error.errno == errno.EAGAIN else "a system call failed"
        hint = OF_PROCESS[error.errno]
    else:
        place = "a system call failed"
    return f"{place}: {error.strerror or error}", hint


def place(error: BaseException) -> str:
    """Return the file and the line that raised ``error``."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else ""


def _is_gone(directory: str) -> bool:
    try:
        return os.stat(directory).st_nlink == 0
    except OSError:
        return False


def existing(path: str) -> str:
    """Return ``path`` or its nearest existing parent."""
    while not os.path.exists(path):
        path = os.path.dirname(path) or "."
    return path
