"""--container-unshare: the container's own namespaces, set up for use."""

from __future__ import annotations

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, refused, sh, srun


@pytest.mark.parity("--container-unshare=net,ipc,uts: all tasks on a node share these new namespaces")
@pytest.mark.parametrize("kind", ["net", "ipc", "uts"])
def test_namespace_is_new_and_shared_by_the_tasks(lab: Lab, kind: str) -> None:
    show = sh(f"readlink /proc/self/ns/{kind}")
    host = lab.run(["readlink", f"/proc/self/ns/{kind}"], node="n1").stdout.strip()
    assert srun(lab, IMAGE, *show).strip() == host
    found = set(srun(lab, IMAGE, "-n3", f"--container-unshare={kind}", *show).split())
    assert len(found) == 1
    assert found != {host}


@pytest.mark.parity("--container-unshare=net,ipc,uts: all tasks on a node share these new namespaces")
@pytest.mark.security("O3")
def test_a_new_network_has_a_loopback_only(lab: Lab) -> None:
    connect = sh("exec 2>&1; bash -c 'exec < /dev/tcp/127.0.0.1/9'; bash -c 'exec < /dev/tcp/8.8.8.8/53'; true")
    out = srun(lab, IMAGE, "--container-unshare=net", *connect)
    assert "Connection refused" in out
    assert "Network is unreachable" in out


@pytest.mark.parity("--container-unshare=net,ipc,uts: all tasks on a node share these new namespaces")
@pytest.mark.security("O2")
def test_new_ipc_has_a_dev_of_its_own(lab: Lab) -> None:
    host = lab.run("stat -c %d /dev /dev/shm", node="n1").stdout.split()
    use = "echo x > /dev/null; head -c1 /dev/zero | wc -c; echo y > /dev/shm/f; cat /dev/shm/f"
    out = srun(lab, IMAGE, "--container-unshare=ipc", *sh(f"stat -c %d /dev /dev/shm; {use}")).split()
    assert out[0] != host[0]
    assert out[1] != host[1]
    assert out[2:] == ["1", "y"]


def test_variable(lab: Lab) -> None:
    host = lab.run(["readlink", "/proc/self/ns/net"], node="n1").stdout
    assert srun(lab, IMAGE, "readlink", "/proc/self/ns/net", env={"PYXIS_CONTAINER_UNSHARE": "net"}) != host


@pytest.mark.parity("--container-unshare=pid is refused")
def test_pid_is_refused(lab: Lab) -> None:
    assert "unknown namespace 'pid'" in refused(lab, IMAGE, "--container-unshare=pid", "true")
