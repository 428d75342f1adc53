"""A container on a fake host gets AMD GPUs, Intel GPUs or Gaudis, and their libraries."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from enroot_py.base.errors import HookError
from enroot_py.runtime.edits import Edits
from tests import fakehost
from tests.fakeaccelerators import gaudi, mi300x, ponte_vecchio, uuid
from tests.fakehost import TRIPLET, FakeHost

HOOK = fakehost.hook("98-accelerators.py")
LIB = f"/usr/lib/{TRIPLET}"


@pytest.fixture(scope="module")
def amd(tmp_path_factory: pytest.TempPathFactory) -> FakeHost:
    return mi300x(tmp_path_factory.mktemp("amd"))


@pytest.fixture(scope="module")
def intel(tmp_path_factory: pytest.TempPathFactory) -> FakeHost:
    return ponte_vecchio(tmp_path_factory.mktemp("intel"))


@pytest.fixture(scope="module")
def habana(tmp_path_factory: pytest.TempPathFactory) -> FakeHost:
    return gaudi(tmp_path_factory.mktemp("gaudi"))


def planned(
    host: FakeHost, box: pathlib.Path, caller: dict[str, str] | None = None, image: dict[str, str] | None = None
) -> Edits:
    """Return the plan for the host's only vendor, or an empty plan if the hook makes none."""
    plans = HOOK["plans"](fakehost.context(host, box, caller or {}, {} if image is None else image))
    assert len(plans) < 2
    edits = plans[0] if plans else Edits("nothing")
    assert isinstance(edits, Edits)
    return edits


def renders(edits: Edits) -> set[int]:
    """Return the indices of the render nodes in a plan."""
    prefix = "/dev/dri/renderD"
    return {int(path.removeprefix(prefix)) - 128 for path in edits.nodes if path.startswith(prefix)}


@pytest.mark.parametrize(
    ("caller", "allocated"),
    [
        ({"SLURM_STEP_GPUS": "2,3"}, {2, 3}),
        ({"SLURM_JOB_GPUS": "7"}, {7}),
        ({"SLURM_STEP_GPUS": "130,131"}, {2, 3}),  # before 21.08, Slurm used the numbers of the device nodes
        ({"SLURM_STEP_ID": "0", "SLURM_GPUS_ON_NODE": "2"}, set(range(8))),  # --gpu-bind=none
        ({"SLURM_STEP_GPUS": "9"}, set(range(8))),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_GPUS": "1", "SLURMD_TRES_BIND": "gres/gpu:single:1",
          "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "1,4", "SLURM_JOB_NUM_NODES": "1"}, {1, 4}),
    ],
)  # fmt: skip
def test_allocated_gpus_of_amd(amd: FakeHost, box: pathlib.Path, caller: dict[str, str], allocated: set[int]) -> None:
    edits = planned(amd, box, caller)
    assert renders(edits) == allocated
    assert "/dev/kfd" in edits.nodes
    assert {f"/dev/dri/card{number + 1}" for number in allocated} <= set(edits.nodes)


def test_nodes_of_other_gpus_are_absent(amd: FakeHost, box: pathlib.Path) -> None:
    """ROCm fails if it cannot open a device node, so the nodes of other GPUs are absent.

    The card of the BMC, and udev's links to the remaining nodes, stay.
    """
    edits = planned(amd, box, {"SLURM_STEP_GPUS": "0"})
    assert edits.emptied == ["/dev/dri"] and not edits.hidden
    assert set(edits.nodes) == {"/dev/kfd", "/dev/dri/card0", "/dev/dri/card1", "/dev/dri/renderD128"}
    links = {path: target for path, target in edits.links.items() if path.startswith("/dev/")}
    assert links == {
        "/dev/dri/by-path/pci-0000:05:00.0-card": "../card1",
        "/dev/dri/by-path/pci-0000:05:00.0-render": "../renderD128",
    }


def test_all_keeps_dev_and_none_hides_each_gpu(amd: FakeHost, box: pathlib.Path) -> None:
    """With all GPUs, /dev/dri stays as it is. With "none", it has only the card of the BMC."""
    assert planned(amd, box, {"SLURM_STEP_GPUS": "0,1,2,3,4,5,6,7"}).emptied == []
    edits = planned(amd, box, {"AMD_VISIBLE_DEVICES": "none"})
    assert set(edits.nodes) == {"/dev/dri/card0"} and edits.emptied == ["/dev/dri"]


@pytest.mark.parity("with ConstrainDevices")
def test_gpu_numbers_are_the_nodes_with_a_device_cgroup(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    """With ConstrainDevices, KFD lists only the step's GPUs. Slurm still numbers them 4 and 5, as on the node."""
    host = mi300x(tmp_path / "host", readable=(4, 5))
    assert renders(planned(host, box, {"SLURM_STEP_GPUS": "4,5", "ROCR_VISIBLE_DEVICES": "0,1"})) == {4, 5}


@pytest.mark.parametrize(
    ("masks", "gpus"), [("2,3", "2,3"), ("0,1", "0,1")], ids=["without ConstrainDevices", "with ConstrainDevices"]
)
def test_tasks_get_the_gpu_numbers_of_the_step(amd: FakeHost, box: pathlib.Path, masks: str, gpus: str) -> None:
    image: dict[str, str] = {}
    planned(amd, box, {"SLURM_STEP_GPUS": "2,3", "ROCR_VISIBLE_DEVICES": masks}, image)
    assert image == {"PENROOT_GPUS": gpus, "PENROOT_GPU_KIND": "amd.com/gpu"}


def test_step_with_bound_tasks_gets_all_gpus(amd: FakeHost, box: pathlib.Path) -> None:
    """The variables do not tell which GPUs the other tasks have, so the container gets all GPUs."""
    image: dict[str, str] = {}
    caller = {"SLURM_STEP_ID": "0", "SLURM_STEP_GPUS": "2", "SLURM_GPUS_ON_NODE": "2", "ROCR_VISIBLE_DEVICES": "2"}
    edits = planned(amd, box, {**caller, "SLURMD_TRES_BIND": "gpu:single:1"}, image)
    assert renders(edits) == set(range(8))
    assert image["PENROOT_GPUS"] == "0,1,2,3,4,5,6,7"


def test_image_with_its_own_mask_gets_all_gpus(amd: FakeHost, box: pathlib.Path) -> None:
    """The mask in the image counts the GPUs of the node, so the container needs all of them."""
    caller = {"SLURM_STEP_GPUS": "2,3", "ROCR_VISIBLE_DEVICES": "2,3"}
    image = {"ROCR_VISIBLE_DEVICES": "2"}
    assert renders(planned(amd, box, caller, image)) == set(range(8))
    assert image == {"ROCR_VISIBLE_DEVICES": "2"}


def test_masks_of_intel(intel: FakeHost, box: pathlib.Path) -> None:
    image: dict[str, str] = {}
    edits = planned(intel, box, {"SLURM_STEP_GPUS": "4,5", "ZE_AFFINITY_MASK": "4,5"}, image)
    assert renders(edits) == {4, 5} and "/dev/kfd" not in edits.nodes
    assert image == {"PENROOT_GPUS": "4,5", "PENROOT_GPU_KIND": "intel.com/gpu"}
    image = {}
    planned(intel, box, {"SLURM_STEP_GPUS": "4,5", "ZE_AFFINITY_MASK": "0,1"}, image)
    assert image == {}


@pytest.mark.parity("AMD_VISIBLE_DEVICES")
def test_allocated_gaudis(habana: FakeHost, box: pathlib.Path) -> None:
    edits = planned(habana, box, {"SLURM_STEP_GPUS": "2,3"})
    allocated = {f"/dev/accel/{name}{number}" for number in (2, 3) for name in ("accel", "accel_controlD")}
    assert set(edits.nodes) == {*allocated, "/dev/accel/accel8"}  # accel8 is an Intel NPU, which is never hidden
    assert edits.emptied == ["/dev/accel"]
    chosen = planned(habana, box, {"HABANA_VISIBLE_DEVICES": "0,7"}).nodes
    assert {f"/dev/accel/accel{number}" for number in (0, 1, 7)} & set(chosen) == {
        "/dev/accel/accel0",
        "/dev/accel/accel7",
    }


@pytest.mark.parity("AMD_VISIBLE_DEVICES")
@pytest.mark.parametrize(
    ("words", "selected"),
    [("all", set(range(8))), ("0", {0}), ("1,3-5", {1, 3, 4, 5}), (uuid(6), {6}), (uuid(6).upper(), {6})],
)
@pytest.mark.parametrize("source", ["caller", "image"])
def test_variable_of_amd(amd: FakeHost, box: pathlib.Path, words: str, selected: set[int], source: str) -> None:
    variable = {"AMD_VISIBLE_DEVICES": words}
    edits = planned(amd, box, variable) if source == "caller" else planned(amd, box, {}, variable)
    assert renders(edits) == selected


@pytest.mark.parity("a requested device that is missing")
@pytest.mark.parametrize(
    "words", ["8", "3-9", "GPU-0", "5-2", "-1", "2-", "0-" + "9" * 40, "9" * 5000, "0\x1b[2J", "x" * 5000]
)
def test_missing_device_is_an_error(amd: FakeHost, box: pathlib.Path, words: str) -> None:
    with pytest.raises(HookError, match="AMD_VISIBLE_DEVICES=.*: no device ") as caught:
        planned(amd, box, {"AMD_VISIBLE_DEVICES": words})
    assert f"0 ({uuid(0)})" in caught.value.hint
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


@pytest.mark.parity("a requested device that is missing")
def test_selection_on_a_host_without_devices(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    """A missing device is an error if the caller selects it. An image's selection is ignored, as in other runtimes."""
    host = FakeHost(tmp_path / "host")
    host.standard_nodes()
    with pytest.raises(HookError, match="has no such device"):
        planned(host, box, {"AMD_VISIBLE_DEVICES": "0"})
    assert not planned(host, box, {}, {"AMD_VISIBLE_DEVICES": "0"}).describe()
    assert not planned(host, box, {"SLURM_STEP_GPUS": "0"}).describe()


def test_stale_variable_is_reported(amd: FakeHost, box: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    edits = planned(amd, box, {"SLURM_STEP_GPUS": "1", "AMD_VISIBLE_DEVICES": "5"})
    assert renders(edits) == {1}
    assert "AMD_VISIBLE_DEVICES=5 is ignored: the devices of the step are 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "caller",
    [
        {"SLURM_STEP_GPUS": "1", "PENROOT_SLURM_GPUS": "no"},
        {"SLURM_STEP_GPUS": "1", "AMD_VISIBLE_DEVICES": "void"},
        {"SLURM_STEP_ID": "0", "SLURM_JOB_GPUS": "1"},  # a step without GPUs
        {"SLURM_STEP_GPUS": "1", "ENROOT_DEVICES": "/dev/kfd,/dev/dri"},  # --device takes precedence
        {"SLURM_STEP_GPUS": "1", "ENROOT_DEVICES": "amd.com/gpu=all"},
    ],
)
def test_cases_without_changes(amd: FakeHost, box: pathlib.Path, caller: dict[str, str]) -> None:
    """The hook adds nothing if the caller refuses GPUs, the step has none, or --device selects devices."""
    assert not planned(amd, box, caller).describe()


def test_gpu_numbers_select_nvidia_gpus_if_there_are_any(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    """The node may also have an Intel processor with graphics, which Slurm does not number."""
    host = ponte_vecchio(tmp_path / "host")
    host.gpu(0, "c1", 0)
    assert not planned(host, box, {"SLURM_STEP_GPUS": "0"}).describe()


@pytest.mark.parity("the host's ROCm")
@pytest.mark.parametrize(
    ("make", "main", "directory"),
    [
        (mi300x, "libhsa-runtime64.so.1", "opt/rocm/lib"),
        (ponte_vecchio, "libze_intel_gpu.so.1", LIB.strip("/")),
        (gaudi, "libSynapse.so", "usr/lib/habanalabs"),
    ],
)
def test_libraries_are_added_if_the_image_lacks_them(
    tmp_path: pathlib.Path, box: pathlib.Path, make: Callable[[pathlib.Path], FakeHost], main: str, directory: str
) -> None:
    host = make(tmp_path / "host")
    edits = planned(host, box, {"SLURM_STEP_GPUS": "0"})
    names = {name for _, name, _ in edits.libraries}
    assert main in names and len(names) > 1
    assert all(path.startswith(LIB) for _, _, path in edits.libraries)
    (box / directory).mkdir(parents=True, exist_ok=True)
    (box / directory / main).touch()
    assert not planned(host, box, {"SLURM_STEP_GPUS": "0"}).libraries


def test_an_image_with_another_rocm_keeps_it(amd: FakeHost, box: pathlib.Path) -> None:
    (box / "etc").mkdir()
    (box / "etc/ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1" + b"\xff" * 100)  # a damaged cache is ignored
    assert planned(amd, box, {"SLURM_STEP_GPUS": "0"}).libraries
    (box / "opt/rocm-5.7.1/lib").mkdir(parents=True)
    (box / "opt/rocm-5.7.1/lib/libhsa-runtime64.so.1").touch()
    assert not planned(amd, box, {"SLURM_STEP_GPUS": "0"}).libraries
