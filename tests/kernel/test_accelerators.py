"""Containers on hosts with AMD GPUs, Intel GPUs or Gaudis have exactly the allocated devices."""

from __future__ import annotations

import pathlib

import pytest

from tests.fakeaccelerators import gaudi, mi300x, ponte_vecchio
from tests.kernel.conftest import User
from tests.kernel.test_devices import LIB, become, box, require_nodes

__all__ = ["box"]

STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_GPUS": "2,3"}


def nodes(user: User, *directories: str, **environ: str) -> list[str]:
    """Open each device node in a container. Return its path if only the driver is missing, or else the error."""
    script = 'find "$@" -type c | sort | while read n; do said=$( (exec 3< $n) 2>&1); case "$said" in '
    script += '""|*"No such device"*|*"Input/output"*) echo $n;; *) echo "$said";; esac; done'
    return user.start("box", "sh", "-c", script, "sh", *directories, env=environ).split("\n")[:-1]


@pytest.mark.parity("a step has the GPUs that Slurm allocated", "98-accelerators")
@pytest.mark.parametrize("restricted", ["no", "yes"])
def test_gpus_of_a_step_on_mi300x(user: User, box: pathlib.Path, restricted: str) -> None:
    """The container has no node of other GPUs, neither with the host's /dev nor with a private /dev."""
    require_nodes()
    become(user, mi300x(user.home / "amd"))
    allocated = ["/dev/dri/card0", *(f"/dev/dri/{name}" for name in ("card3", "card4", "renderD130", "renderD131"))]
    environ = {**STEP, "ENROOT_RESTRICT_DEV": restricted, "ROCR_VISIBLE_DEVICES": "0,1"}
    assert nodes(user, "/dev/dri", "/dev/kfd", **environ) == [*allocated, "/dev/kfd"]
    links = user.start("box", "sh", "-c", "cd /dev/dri/by-path && ls", env=environ).split()
    assert links == [f"pci-0000:{bus}:00.0-{kind}" for bus in ("65", "75") for kind in ("card", "render")]


def test_host_keeps_its_nodes(user: User, box: pathlib.Path) -> None:
    """Device nodes are hidden only in the container."""
    require_nodes()
    host = become(user, mi300x(user.home / "amd"))
    before = sorted(path.name for path in (host.root / "dev/dri").iterdir())
    user.start("box", "true", env=STEP)
    assert sorted(path.name for path in (host.root / "dev/dri").iterdir()) == before


@pytest.mark.parity("a step has the GPUs that Slurm allocated", "98-accelerators")
def test_gpus_of_a_step_on_ponte_vecchio(user: User, box: pathlib.Path) -> None:
    require_nodes()
    become(user, ponte_vecchio(user.home / "intel"))
    allocated = [f"/dev/dri/{name}" for name in ("card0", "card3", "card4", "renderD130", "renderD131")]
    assert nodes(user, "/dev/dri", **STEP) == allocated


@pytest.mark.parity("a step has the GPUs that Slurm allocated", "98-accelerators")
def test_gaudis_of_a_step(user: User, box: pathlib.Path) -> None:
    require_nodes()
    become(user, gaudi(user.home / "gaudi"))
    allocated = [*(f"/dev/accel/accel{n}" for n in (2, 3, 8)), *(f"/dev/accel/accel_controlD{n}" for n in (2, 3))]
    assert nodes(user, "/dev/accel", **STEP) == allocated


@pytest.mark.parity("the host's ROCm")
def test_libraries_of_rocm_load(user: User, box: pathlib.Path) -> None:
    require_nodes()
    become(user, mi300x(user.home / "amd"))
    names = ("libhsa-runtime64.so.1", "libamdhip64.so.6", "libamd_comgr.so.2")
    assert user.start("box", "loader", *names, env=STEP) == "".join(f"{name} loaded\n" for name in names)
    listed = user.start("box", "ls", f"{LIB}/libhsa-runtime64.so.1.14.0", env=STEP)
    assert listed == f"{LIB}/libhsa-runtime64.so.1.14.0\n"


def test_explain_shows_only_allocated_devices(user: User, box: pathlib.Path) -> None:
    require_nodes()
    host = become(user, mi300x(user.home / "amd"))
    out = user.start("--explain", "box", "true", env=STEP)
    assert "empty    /dev/dri" in out
    assert f"device   /dev/dri/renderD130 from {host.root}/dev/dri/renderD130" in out
    assert "renderD128" not in out


def test_all_gpus_stay_visible_without_slurm(user: User, box: pathlib.Path) -> None:
    require_nodes()
    host = become(user, mi300x(user.home / "amd"))
    assert len(nodes(user, "/dev/dri")) == len([p for p in (host.root / "dev/dri").iterdir() if p.name != "by-path"])
    chosen = nodes(user, "/dev/dri", AMD_VISIBLE_DEVICES="7")
    assert chosen == ["/dev/dri/card0", "/dev/dri/card8", "/dev/dri/renderD135"]
