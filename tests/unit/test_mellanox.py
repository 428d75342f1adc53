"""A container on a fake host gets InfiniBand devices."""

from __future__ import annotations

import os
import pathlib

import pytest

from enroot_py.base.errors import HookError
from enroot_py.features.fabric import mellanox
from enroot_py.runtime.edits import Edits, Host
from tests import fakehost
from tests.fakehost import FakeHost

SHARING: tuple[str, ...] = fakehost.hook("99-mellanox.py")["SHARING"]


@pytest.fixture
def dgx(tmp_path: pathlib.Path) -> FakeHost:
    host = FakeHost(tmp_path / "dgx")
    host.fabric()
    return host


@pytest.fixture
def box(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return the root of a container with a private /dev."""
    (tmp_path / "box/dev").mkdir(parents=True)
    return tmp_path / "box"


def planned(host: FakeHost, box: pathlib.Path, visible: str, **caller: str) -> Edits:
    return mellanox.plan(fakehost.context(host, box, caller, {}), visible, SHARING)


def verbs(edits: Edits) -> set[str]:
    return {path.rpartition("/")[2] for path in edits.nodes if "uverbs" in path}


@pytest.mark.parity("99-mellanox: MELLANOX_VISIBLE_DEVICES")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("all", {f"uverbs{n}" for n in range(10)}),
        ("0", {"uverbs0"}),
        ("1,9", {"uverbs1", "uverbs9"}),
        ("mlx5_3,uverbs4", {"uverbs3", "uverbs4"}),
    ],
)
def test_selection(dgx: FakeHost, box: pathlib.Path, visible: str, expected: set[str]) -> None:
    edits = planned(dgx, box, visible)
    assert verbs(edits) == expected
    assert "/dev/infiniband/rdma_cm" in edits.nodes
    assert not [path for path in edits.nodes if "umad" in path or "issm" in path]
    if visible == "all":
        assert not edits.tmpfs
        return
    names = {path.rpartition("/")[2] for path in edits.links if path.startswith("/sys/class/infiniband_verbs/")}
    assert names == expected
    assert set(edits.tmpfs) == {"/sys/class/infiniband", "/sys/class/infiniband_verbs", "/sys/class/infiniband_mad"}
    assert {"/sys/class/infiniband_verbs/abi_version", "/sys/class/infiniband_mad/abi_version"} <= set(edits.files)
    for path, target in edits.links.items():
        assert (dgx.root / target.lstrip("/")).is_dir(), path


@pytest.mark.parity("99-mellanox: MELLANOX_VISIBLE_DEVICES")
@pytest.mark.parametrize("visible", ["10", "mlx4_0", "-1", "0,x"])
def test_missing_device(dgx: FakeHost, box: pathlib.Path, visible: str) -> None:
    with pytest.raises(HookError, match="MELLANOX_VISIBLE_DEVICES") as caught:
        planned(dgx, box, visible)
    assert "mlx5_9" in caught.value.hint


def test_device_that_is_named_and_has_no_node(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = FakeHost(tmp_path / "host")
    host.fabric(2)
    (host.root / "dev/infiniband/uverbs1").unlink()
    with pytest.raises(HookError, match=r"mlx5_1 has no node .*/dev/infiniband/uverbs1") as caught:
        planned(host, box, "1")
    assert "ib_uverbs" in caught.value.hint
    assert verbs(planned(host, box, "0")) == verbs(planned(host, box, "all")) == {"uverbs0"}


@pytest.mark.parity("99-mellanox: adds uverbs, rdma_cm, umad and issm")
def test_adapters_have_the_order_of_enroot(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    """Adapters are ordered by driver and then by address, and not by node number. Other vendors come last."""
    host = FakeHost(tmp_path / "host")
    drivers = (("05", "irdma"), ("90", "mlx5_core"), ("10", "mlx5_core"), ("99", "mlx4_core"))
    for number, (bus, driver) in enumerate(drivers):
        host.hca(number, bus, driver, mad=False)
    assert [hca.verbs for hca in mellanox.hcas(Host(str(host.root)))] == ["uverbs3", "uverbs2", "uverbs1", "uverbs0"]
    assert verbs(planned(host, box, "0,3")) == {"uverbs3", "uverbs0"}


def test_virtual_functions_are_devices_too(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    """Virtual functions follow their physical function by address, whatever the order of their creation is."""
    host = FakeHost(tmp_path / "host")
    for number, bus in ((0, "c1:00.0"), (1, "41:00.0"), (2, "41:00.2"), (3, "41:00.1")):
        host.hca(number, bus, mad=not bus.endswith((".1", ".2")))
    assert [hca.verbs for hca in mellanox.hcas(Host(str(host.root)))] == ["uverbs1", "uverbs3", "uverbs2", "uverbs0"]
    edits = planned(host, box, "mlx5_2")
    assert verbs(edits) == {"uverbs2"}
    assert edits.links["/sys/class/infiniband/mlx5_2"].endswith("/0000:41:00.2/infiniband/mlx5_2")


def test_shared_dev_with_all_needs_no_edits(dgx: FakeHost) -> None:
    # The container's root is the host's tree, so the container has the host's /dev.
    edits = planned(dgx, dgx.root, "all")
    assert edits.describe() == []
    edits = planned(dgx, dgx.root, "2")
    assert "/dev/infiniband/uverbs2" not in edits.hidden
    assert {"/dev/infiniband/uverbs1", "/dev/infiniband/umad1", "/dev/infiniband/issm1"} <= set(edits.hidden)


@pytest.mark.parity("a host may lack some InfiniBand files in /dev and /sys")
@pytest.mark.parametrize(
    "missing", ["sys/class/infiniband_mad", "sys/class/infiniband_verbs/abi_version", "dev/infiniband/rdma_cm"]
)
def test_trees_may_be_missing(dgx: FakeHost, box: pathlib.Path, missing: str) -> None:
    path = dgx.root / missing
    if path.is_dir():
        os.rename(path, dgx.root / "away")
    else:
        path.unlink()
    edits = planned(dgx, box, "0,1")
    assert verbs(edits) == {"uverbs0", "uverbs1"}
    assert f"/{missing}" not in [*edits.tmpfs, *edits.nodes]


def test_host_without_hcas(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = FakeHost(tmp_path / "host")
    assert planned(host, box, "all").describe() == []
    with pytest.raises(HookError) as caught:
        planned(host, box, "0")
    assert "/sys/class/infiniband" in caught.value.hint


def test_shared_memory_between_processes(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = FakeHost(tmp_path / "host")
    host.node("/dev/knem", 10, 60)
    host.node("/dev/xpmem", 10, 61)
    assert set(planned(host, box, "").nodes) == {"/dev/knem", "/dev/xpmem"}


def test_providers_of_the_host_on_request(dgx: FakeHost, box: pathlib.Path) -> None:
    lib = f"/usr/lib/{fakehost.TRIPLET}"
    for name in ("libibverbs.so.1", "libmlx5.so.1", "librdmacm.so.1"):
        dgx.library(f"{lib}/{name}.25", name)
    dgx.file(f"{lib}/libibverbs/libmlx5-rdmav34.so")
    dgx.file(f"{lib}/libibverbs/libirdma-rdmav34.so")
    dgx.file("/etc/libibverbs.d/mlx5.driver", "driver mlx5\n")
    dgx.ldconfig("", lib)
    assert not planned(dgx, box, "0").files.keys() & {"/etc/libibverbs.d/mlx5.driver"}
    edits = planned(dgx, box, "0", MELLANOX_MOUNT_DRIVER="1")
    assert "/etc/libibverbs.d/mlx5.driver" in edits.files
    assert {name for _, name, _ in edits.libraries} == {"libibverbs.so.1", "libmlx5.so.1", "librdmacm.so.1"}
    (provider,) = (path for path in edits.files if "/libibverbs/" in path)
    assert provider.removeprefix("/usr/lib64").removeprefix("/usr/lib") == "/libibverbs/libmlx5-rdmav34.so"


@pytest.mark.parity("50-sharp")
@pytest.mark.parametrize(
    ("caller", "expected"),
    [
        ({}, {}),
        ({"SLURM_NETWORK": "sharp"}, {}),
        (
            {"SLURM_NETWORK": "sharp", "MELLANOX_VISIBLE_DEVICES": "all", "SLURM_STEP_NUM_NODES": "4"},
            {
                "SHARP_COLL_LOCK_ON_COMM_INIT": "1",
                "SHARP_COLL_NUM_COLL_GROUP_RESOURCE_ALLOC_THRESHOLD": "0",
                "NCCL_COLLNET_ENABLE": "0",
                "NCCL_SHARP_GROUP_SIZE_THRESH": "4",
            },
        ),
    ],
)
def test_sharp(dgx: FakeHost, box: pathlib.Path, caller: dict[str, str], expected: dict[str, str]) -> None:
    image = {"NCCL_COLLNET_ENABLE": "0"}
    context = fakehost.context(dgx, box, caller, dict(image))
    fakehost.hook("extra/50-sharp.py")["run"](context)
    assert context.environ == {**image, **expected}
