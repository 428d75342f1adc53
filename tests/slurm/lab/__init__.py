"""A real Slurm cluster of N nodes on this one machine.

From the repository's root, as root:

    .venv/bin/python -m tests.slurm.lab up [--nodes 2] [--prefix /opt/penroot | --plugin LINE] [--slurm LINE]...
    .venv/bin/python -m tests.slurm.lab run [--user alice] [--node ctl] -- srun -N2 hostname
    .venv/bin/python -m tests.slurm.lab status
    .venv/bin/python -m tests.slurm.lab residue
    .venv/bin/python -m tests.slurm.lab down

The nodes: ctl (slurmctld; submit here), registry, n1 .. nN (slurmd). Each has
its own PID, mount, network, UTS, IPC and cgroup namespaces, and its own /run,
/tmp, /var/tmp, /var/spool, /var/log and /dev/shm. All nodes share /home,
/etc/slurm and /etc/enroot. The users are alice (2001, also in group science,
3001) and bob (2002). None of this exists on the machine outside the lab. The
lab's files are under $PENROOT_LAB (/srv/penroot-lab): nodes/n1/tmp is n1's
/tmp, and so on. Labs with different $PENROOT_LAB do not touch each other.

The registry answers at registry:5000 (HTTP), and at registry.lab and
registry-1.docker.io (HTTPS, with a CA that the nodes trust). images.py lists
its images. The lab builds them once, and keeps them in $PENROOT_LAB_CACHE
(/var/cache/penroot-lab).

tests/prerequisites installs the programs that the lab needs. Tests use the
fixture ``lab``.
"""

from __future__ import annotations

from .cluster import CommandFailed, Lab, LabError, PrerequisiteError
from .etc import slurm_version

__all__ = ["CommandFailed", "Lab", "LabError", "PrerequisiteError", "slurm_version"]
