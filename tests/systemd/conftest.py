"""This machine as a cluster of one node, run by systemd from the units of Debian's packages.

The fixture configures the machine permanently, so it touches only a machine that `make matrix-vm` has made.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from tests.installation import PREFIX
from tests.slurm.lab import images
from tests.waiting import until

REGISTRY = "localhost:5000"
IMAGE = f"--container-image={REGISTRY}#minimal:1"
SCOPE = Path("/sys/fs/cgroup/system.slice/node1_slurmstepd.scope")
# Every user may open this device (/dev/kmsg's number), unless the job's cgroup denies it.
DEVICE = "/dev/accelerator0"

FILES = {
    "/etc/slurm/slurm.conf": f"""\
ClusterName=vm
SlurmctldHost=node1(127.0.0.1)
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup
JobAcctGatherType=jobacct_gather/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
PrologFlags=Contain
KillWait=3
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node1 NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=3000 Gres=gpu:1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:8
""",
    "/etc/slurm/gres.conf": f"Name=gpu File={DEVICE}\n",
    "/etc/slurm/cgroup.conf": "ConstrainCores=yes\nConstrainRAMSpace=yes\nConstrainDevices=yes\n",
    "/etc/slurm/plugstack.conf": "include /etc/slurm/plugstack.conf.d/*.conf\n",
    "/etc/enroot/enroot.conf": "ENROOT_ALLOW_HTTP yes\n",
    "/etc/penroot-registry.yml": f"""\
version: 0.1
storage: {{filesystem: {{rootdirectory: /var/lib/penroot-registry}}}}
http: {{addr: "{REGISTRY}", secret: vm}}
""",
}


class Node:
    """The machine, on which ``alice`` runs commands."""

    def run(self, *command: str, check: bool = True, user: str = "alice") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.command(*command, user=user), capture_output=True, text=True, timeout=1800)
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def popen(self, *command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command(*command), stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def command(self, *command: str, user: str = "alice") -> list[str]:
        path = f"PATH={PREFIX}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return ["runuser", "-u", user, "--", "env", "-i", "-C", "/tmp", path, f"HOME=/home/{user}", *command]

    def srun(self, *arguments: str) -> str:
        return self.run("srun", *arguments).stdout

    def is_idle(self) -> bool:
        return self.run("sinfo", "--noheader", "--format=%T", check=False).stdout.strip() == "idle"

    def left(self) -> list[str]:
        """Return the leftovers of jobs: processes of the user, cgroups of jobs, mounts."""
        processes = self.run("ps", "-u", "alice", "-o", "pid=,args=", check=False, user="root").stdout.splitlines()
        theirs = [line.strip() for line in processes if not any(word in line for word in ("systemd", "(sd-pam)"))]
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return theirs + [str(job) for job in SCOPE.glob("job_*")] + [line for line in mounts if "enroot" in line]


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    if "penroot.vm" not in Path("/proc/cmdline").read_text().split():
        pytest.skip("this is not a machine of `make matrix-vm`: its Slurm must not be reconfigured")
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    shutil.copytree(images.build(), "/var/lib/penroot-registry", dirs_exist_ok=True)
    key = Path("/etc/munge/munge.key")
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    shutil.chown(key, "munge", "munge")
    with IPRoute() as network:  # Slurm does not listen if loopback is the only interface
        network.link("add", ifname="vm0", kind="dummy")
        (vm0,) = network.link_lookup(ifname="vm0")
        network.addr("add", index=vm0, address="10.0.0.1", prefixlen=24)
        network.link("set", index=vm0, state="up")
    as_root("mknod", "--mode=666", DEVICE, "c", "1", "11")
    as_root("useradd", "--create-home", "alice")
    as_root(f"{PREFIX}/bin/pyxis-py", "install")
    as_root("systemd-run", "--unit=registry", "docker-registry", "serve", "/etc/penroot-registry.yml")
    node = Node()
    try:
        as_root("systemctl", "start", "munge", "slurmctld", "slurmd")
        until(node.is_idle, "a node that is idle", 600)
    finally:
        as_root("journalctl", "--no-pager", "--boot", "--unit=munge", "--unit=slurm*")
    yield node
    as_root("systemctl", "stop", "slurmd", "slurmctld", "munge", "registry")


@pytest.fixture(autouse=True)
def nothing_left(node: Node) -> Iterator[None]:
    yield
    until(lambda: not node.left(), "a node on which jobs have left nothing", 120)


def as_root(*command: str) -> None:
    subprocess.run(command, check=True, timeout=1800)
