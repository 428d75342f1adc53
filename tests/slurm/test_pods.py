"""slurmd runs in a pod, as in docs/howto/pods.md. tests/pod.py makes the pod."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import pod
from tests.installation import LIBRARY, PREFIX
from tests.slurm.lab import Lab
from tests.slurm.lab.cluster import DAEMONS
from tests.slurm.steps import IMAGE, refused, sh, srun

CHECK = f"{PREFIX}/bin/pyxis-py check || true"
VOLUMES = ("/etc", "/home", "/run", "/tmp", "/var/tmp", "/var/spool", "/var/log", PREFIX)


@contextmanager
def slurmd_in_pod(lab: Lab, *options: str, conf: Mapping[str, str] = {}) -> Iterator[None]:
    """Run the slurmd of n1 in a pod with the node's files and network, and with changes to slurm.conf."""
    gpus = [f"--device=tty{number}" for number in range(4)]  # the GPUs of the lab's gres.conf
    words = (*options, *gpus, "--host-network", *(f"--volume={place}" for place in VOLUMES), "--", "slurmd", "-D")
    program = Path(lab.root, "home/pod.py")  # nodes have their own /tmp, which may hide this checkout
    program.write_text(Path(pod.__file__).read_text())
    script = f'PYTHONPATH={LIBRARY} /usr/bin/python3 /home/pod.py "$@" &'
    before = Path(lab.root, "etc/slurm/slurm.conf").read_text()
    text = before
    for old, new in conf.items():
        assert old in text
        text = text.replace(old, new)
    lab.stop_daemon("n1", "slurmd")
    lab.configure("slurm.conf", text)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(DAEMONS, "slurmd", ["sh", "-c", script, "sh", *words])
            lab.restart_daemon("n1", "slurmd")
        if conf:
            lab.restart_daemon("ctl", "slurmctld")
        yield
    finally:
        program.unlink()
        lab.configure("slurm.conf", before)
        lab.restart_daemon("n1", "slurmd")
        if conf:
            lab.restart_daemon("ctl", "slurmctld")


@pytest.mark.parity("steps of a slurmd in a pod, privileged")
def test_steps_of_a_privileged_pod(lab: Lab) -> None:
    with slurmd_in_pod(lab, "--privileged", "--device", "fuse"):
        assert srun(lab, "cat", "/proc/1/comm") == "slurmd\n"
        assert srun(lab, IMAGE, *sh("echo $IMAGE_NAME")) == "minimal\n"


# Changes to slurm.conf for a pod that has no CAP_SYS_ADMIN, no CAP_SYS_NICE and no writable cgroups.
ORDINARY = {"proctrack/cgroup": "proctrack/linuxproc", "task/affinity,task/cgroup": "task/none"}


@pytest.mark.parity("steps of a slurmd in a pod without CAP_SYS_ADMIN")
def test_steps_of_an_ordinary_pod(lab: Lab) -> None:
    """The pod has read-only cgroups and no /dev/fuse, and root of the pod has no CAP_SYS_ADMIN."""
    with slurmd_in_pod(lab, conf=ORDINARY):
        assert srun(lab, "grep", "CapBnd", "/proc/self/status").split()[1] == "00000000a80425fb"
        assert srun(lab, IMAGE, *sh("echo $IMAGE_NAME")) == "minimal\n"
        assert srun(lab, IMAGE, "-n2", "--container-writable", *sh("echo x > /x; cat /x")) == "x\nx\n"
        assert srun(lab, IMAGE, "--container-remap-root", "id", "-u") == "0\n"
        assert srun(lab, IMAGE, "--container-unshare=net", "ls", "/sys/class/net")
        report = srun(lab, "sh", "-c", CHECK)
        assert "bad " not in report
        assert "warn ProctrackType=proctrack/linuxproc does not track the helper of a step" in report
        assert "fix: make control groups writable in this pod (privileged: true), then set proctrack/cgroup" in report


@pytest.mark.parity("pyxis-py check reports the same as a step in that pod")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--seccomp", "cannot create a user namespace: Operation not permitted"),
        ("--apparmor", "in a user namespace: Permission denied"),
    ],
)
def test_step_and_check_name_what_a_pod_forbids(lab: Lab, option: str, message: str) -> None:
    with slurmd_in_pod(lab, option, conf=ORDINARY):
        report = srun(lab, "sh", "-c", CHECK)
        [line] = [line for line in report.splitlines() if "an ordinary user cannot start a container" in line]
        assert line.startswith("bad ")
        assert line.endswith(message)
        assert message in refused(lab, IMAGE, "true")
