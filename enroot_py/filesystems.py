"""On what file system a path is, and which of them are shared between nodes."""

import os

# Types as /proc/self/mountinfo has them. On these, flock(2) may be local to a node, file
# operations are round trips, and overlayfs cannot write.
NETWORK = frozenset(
    "nfs nfs4 lustre gpfs beegfs cifs smb3 ceph afs 9p pvfs2 orangefs panfs wekafs gfs2 ocfs2 glusterfs "
    "fuse.glusterfs fuse.sshfs fuse.juicefs fuse.ceph-fuse fuse.cvmfs2 fuse.s3fs fuse.gcsfuse fuse.daosfs".split()
)


def kind(path: str) -> str:
    """The type of the file system that holds ``path``, or its nearest parent that exists; "" if unknown.

    Source: proc(5), /proc/PID/mountinfo.
    """
    while not os.path.exists(path):
        path = os.path.dirname(path) or "/"
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}".encode()
    with open("/proc/self/mountinfo", "rb") as f:
        for line in f:
            words = line.split()
            if words[2] == wanted:
                return os.fsdecode(words[words.index(b"-", 6) + 1])
    return ""
