"""A container on a fake host gets NVIDIA GPUs and the driver's files."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from enroot_py.base import ldcache
from enroot_py.base.errors import HookError
from enroot_py.features.devices.nvidia import driver
from enroot_py.runtime.edits import Edits, Host
from tests import fakehost
from tests.fakehost import MINORS, TRIPLET, VERSION, FakeHost, cap_number, mig_uuid, uuid

HOOK = fakehost.hook("98-nvidia.py")
LIB = f"/usr/lib/{TRIPLET}"


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> FakeHost:
    return fakehost.dgx_a100(tmp_path_factory.mktemp("dgx"))


def planned(
    host: FakeHost, box: pathlib.Path, caller: dict[str, str] | None = None, image: dict[str, str] | None = None
) -> Edits:
    context = fakehost.context(host, box, caller or {}, image or {})
    visible, allocated = HOOK["wanted"](context)
    if not visible and not allocated:
        return Edits("nothing")
    edits: Any = HOOK["plan"](context, visible, allocated)
    assert isinstance(edits, Edits)
    return edits


def gpus(edits: Edits) -> set[int]:
    """Return the minor numbers of the GPU nodes in a plan."""
    names = (path.removeprefix("/dev/nvidia") for path in edits.nodes)
    return {int(name) for name in names if name.isdecimal()}


def caps(edits: Edits) -> set[int]:
    prefix = "/dev/nvidia-caps/nvidia-cap"
    return {int(path.removeprefix(prefix)) for path in edits.nodes if path.startswith(prefix)}


def libraries(edits: Edits) -> set[str]:
    return {path.rpartition("/")[2].partition(".so")[0] for path in edits.files if ".so" in path}


EVERY_LIBRARY = {*fakehost.LIBRARIES, *fakehost.INTERNAL, *fakehost.OWN}
EVERY_CAP = {cap_number(MINORS[i], gi, c) for i in fakehost.MIG_GPUS for gi, ci in fakehost.MIGS for c in (None, ci)}


@pytest.mark.parity("98-nvidia: NVIDIA_VISIBLE_DEVICES")
@pytest.mark.parametrize(
    ("visible", "minors", "instances"),
    [
        ("all", set(MINORS), EVERY_CAP),
        ("0", {2}, set()),
        ("0,3", {2, 1}, set()),
        (uuid(4), {6}, set()),
        (f"{uuid(4)},{uuid(0)}", {6, 2}, set()),
        (f" 0, GPU-{uuid(4)[4:].upper()} ", {2, 6}, set()),
        ("GPU-00000003", {1}, set()),
        ("0000:0f:00.0", {3}, set()),
        ("00000000:0F:00.0", {3}, set()),
        ("0:0f:00.0", {3}, set()),
        ("none", set(), set()),
        (mig_uuid(6, 1), {4}, {cap_number(4, 2), cap_number(4, 2, 0)}),
        ("6:2", {4}, {cap_number(4, 5), cap_number(4, 5, 1)}),
        (f"MIG-{uuid(7)}/1/0", {5}, {cap_number(5, 1), cap_number(5, 1, 0)}),
        ("0,7:0", {2, 5}, {cap_number(5, 1), cap_number(5, 1, 0)}),
    ],
)
def test_selection(dgx: FakeHost, box: pathlib.Path, visible: str, minors: set[int], instances: set[int]) -> None:
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": visible})
    assert gpus(edits) == minors
    assert caps(edits) == instances
    others = {f"/dev/nvidia{minor}" for minor in set(MINORS) - minors}
    assert {path for path in edits.hidden if "caps" not in path} == others
    assert len([path for path in edits.hidden if "caps" in path]) == len(EVERY_CAP - instances)
    if visible != "none":
        assert {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"} <= set(edits.nodes)
    assert {"libcuda", "libnvidia-ml"} <= libraries(edits)


@pytest.mark.parity("98-nvidia: NVIDIA_VISIBLE_DEVICES")
@pytest.mark.parametrize("visible", ["void", ""])
def test_void_is_nothing(dgx: FakeHost, box: pathlib.Path, visible: str) -> None:
    assert planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": visible}).describe() == []
    assert planned(dgx, box).describe() == []


@pytest.mark.parametrize(
    "visible",
    ["8", "GPU-0000000", "GPU-ffffffff", "x", "x0000:0f:00.0", "0:0", "6:3", mig_uuid(0, 0), "MIG-GPU-x/1/0", "GPU-"],
)
def test_missing_device_is_an_error_with_a_hint(dgx: FakeHost, box: pathlib.Path, visible: str) -> None:
    with pytest.raises(HookError) as caught:
        planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": visible})
    assert f"NVIDIA_VISIBLE_DEVICES={visible}" in str(caught.value)
    assert caught.value.hint


def test_caller_takes_precedence_over_the_image(dgx: FakeHost, box: pathlib.Path) -> None:
    assert gpus(planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "1"}, {"NVIDIA_VISIBLE_DEVICES": "all"})) == {3}
    assert planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "void"}, {"NVIDIA_VISIBLE_DEVICES": "all"}).describe() == []


@pytest.mark.parity("98-nvidia: NVIDIA_DRIVER_CAPABILITIES")
@pytest.mark.parametrize(
    ("capabilities", "present", "absent"),
    [
        ("utility", {"libnvidia-ml", "libnvidia-cfg"}, {"libcuda", "libnvcuvid"}),
        ("compute", {"libcuda", "libnvidia-gpucomp", "libnvidia-nvvm", "libnvidia-nvvm70"}, {"libnvidia-ml"}),
        ("video", {"libnvcuvid", "libnvidia-encode", "libcuda"}, {"libnvidia-ml"}),
        ("graphics,utility", {"libGLX_nvidia", "libnvidia-eglcore", "libnvidia-ml"}, {"libcuda"}),
        ("", {"libcuda", "libnvidia-ml"}, {"libnvcuvid"}),
        ("all", EVERY_LIBRARY, set()),
    ],
)
def test_libraries_by_capability(
    dgx: FakeHost, box: pathlib.Path, capabilities: str, present: set[str], absent: set[str]
) -> None:
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": capabilities})
    assert present <= libraries(edits)
    assert not absent & libraries(edits)
    assert ("/usr/bin/nvidia-smi" in edits.files) == (capabilities in ("", "all") or "utility" in capabilities)


@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="only a compiler for x86_64 makes 32-bit libraries, with -m32"
)
def test_libraries_of_32_bit(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = fakehost.consumer(tmp_path / "host")
    for directory, options in (("/usr/lib/i386-linux-gnu", ["-m32"]), ("/usr/lib64", [])):
        for name in ("libcuda", "libnvidia-ml"):
            host.library(f"{directory}/{name}.so.{VERSION}", f"{name}.so.1", *options)
    host.ldconfig("", "/usr/lib/i386-linux-gnu\n/usr/lib64")
    caller = {"NVIDIA_VISIBLE_DEVICES": "0"}
    assert not [path for path in planned(host, box, caller).files if "i386" in path or path.startswith("/usr/lib/lib")]
    edits = planned(host, box, {**caller, "NVIDIA_DRIVER_CAPABILITIES": "compute,compat32"})
    assert edits.files[f"/usr/lib/libcuda.so.{VERSION}"][0].endswith(f"/usr/lib/i386-linux-gnu/libcuda.so.{VERSION}")
    assert edits.files[f"{LIB}/libcuda.so.{VERSION}"][0].endswith(f"/usr/lib64/libcuda.so.{VERSION}")
    assert f"/usr/lib/libnvidia-ml.so.{VERSION}" not in edits.files
    (box / "usr/lib/i386-linux-gnu").mkdir()
    edits = planned(host, box, {**caller, "NVIDIA_DRIVER_CAPABILITIES": "compute,compat32"})
    assert f"/usr/lib/i386-linux-gnu/libcuda.so.{VERSION}" in edits.files


def test_unknown_capability(dgx: FakeHost, box: pathlib.Path) -> None:
    with pytest.raises(HookError, match="'cuda'"):
        planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,cuda"})


def test_names_and_links_equal_those_of_ldconfig(dgx: FakeHost, box: pathlib.Path) -> None:
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all"})
    assert edits.links[f"{LIB}/libcuda.so.1"] == f"libcuda.so.{VERSION}"
    assert edits.links[f"{LIB}/libcuda.so"] == "libcuda.so.1"
    assert edits.links[f"{LIB}/libGLX_indirect.so.0"] == "libGLX_nvidia.so.0"
    assert edits.links[f"{LIB}/libnvidia-nvvm.so.4"] == f"libnvidia-nvvm.so.{VERSION}"
    assert f"{LIB}/libnvidia-tls.so.{VERSION}" not in edits.links
    assert (ldcache.NATIVE, "libcuda.so.1", f"{LIB}/libcuda.so.1") in edits.libraries


def test_image_that_is_not_debian(dgx: FakeHost, tmp_path: pathlib.Path) -> None:
    (tmp_path / "usr/lib64").mkdir(parents=True)
    edits = planned(dgx, tmp_path, {"NVIDIA_VISIBLE_DEVICES": "all"})
    assert f"/usr/lib64/libcuda.so.{VERSION}" in edits.files


@pytest.mark.parity("98-nvidia: adds gdrdrv")
def test_gpudirect_devices_and_files(dgx: FakeHost, box: pathlib.Path) -> None:
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0"})
    assert {"/dev/gdrdrv", "/dev/nvidia-fs0", "/dev/nvidia-caps-imex-channels/channel0"} <= set(edits.nodes)
    assert "/etc/cufile.json" in edits.files
    assert "/var/run/nvidia-persistenced/socket" in edits.files
    assert f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin" in edits.files
    assert not [path for path in edits.nodes if "nvswitch" in path]
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "all"})
    assert len([path for path in edits.nodes if "nvswitch" in path]) == 7


def test_udev_for_gpudirect_storage(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = fakehost.consumer(tmp_path / "host")
    host.directory("run/udev")
    assert "/run/udev" not in planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0"}).files
    host.node("/dev/nvidia-fs0", 235, 0)
    assert "/run/udev" in planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0"}).files


@pytest.mark.parametrize("share", ["/usr/share", "/etc", "/usr/local/nvidia/share"])
def test_files_of_graphics_loaders(tmp_path: pathlib.Path, box: pathlib.Path, share: str) -> None:
    """The files are in the loaders' directories of the container, wherever they are on the host."""
    host = fakehost.consumer(tmp_path / "host")
    for name in ("vulkan/icd.d/nvidia_icd.json", "egl/egl_external_platform.d/20_nvidia_xcb.json"):
        host.file(f"{share}/{name}")
    host.library(f"{host.libraries}/vdpau/libvdpau_nvidia.so.{VERSION}", "libvdpau_nvidia.so.1")
    (host.root / host.libraries.lstrip("/") / "vdpau/libvdpau_nvidia.so.1").symlink_to(f"libvdpau_nvidia.so.{VERSION}")
    (host.root / host.libraries.lstrip("/") / "libvdpau_nvidia.so.1").unlink()
    caller = {"NVIDIA_VISIBLE_DEVICES": "0"}
    edits = planned(host, box, {**caller, "NVIDIA_DRIVER_CAPABILITIES": "graphics,video"})
    icd = "/vulkan/icd.d/nvidia_icd.json"
    assert edits.files[f"/usr/share{icd}"][0] == f"{host.root}{share}{icd}"
    assert "/usr/share/egl/egl_external_platform.d/20_nvidia_xcb.json" in edits.files
    assert edits.links[f"{LIB}/gbm/nvidia-drm_gbm.so"] == "../libnvidia-allocator.so.1"
    assert edits.files[f"{LIB}/libvdpau_nvidia.so.{VERSION}"][0].endswith(f"/vdpau/libvdpau_nvidia.so.{VERSION}")
    assert "/etc/OpenCL/vendors/nvidia.icd" not in edits.files
    edits = planned(host, box, caller)
    assert "/etc/OpenCL/vendors/nvidia.icd" in edits.files
    assert not [path for path in (*edits.files, *edits.links) if "vulkan" in path or "gbm" in path or "vdpau" in path]


@pytest.mark.parity("98-nvidia: NVIDIA_MIG_CONFIG_DEVICES")
def test_mig_capabilities_on_request(dgx: FakeHost, box: pathlib.Path) -> None:
    caller = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_MIG_CONFIG_DEVICES": "all", "NVIDIA_MIG_MONITOR_DEVICES": "all"}
    assert caps(planned(dgx, box, caller)) == {1, 2}


@pytest.mark.parity("98-nvidia: NVIDIA_REQUIRE_*")
@pytest.mark.parametrize(
    ("requirement", "met"),
    [
        ("cuda>=12.2", True),
        ("cuda>=12.3", False),
        ("cuda>=12.6 brand=tesla,driver>=535,driver<536", True),
        ("cuda>=12.6 brand=geforce,driver>=535,driver<536", False),
        ("driver>=535.104.05", True),
        ("driver>535.104.05", False),
        ("driver!=535.104.5", False),
        ("arch>=12.0", True),
        # Since driver 450, NVML reports the brand "nvidia" for this model.
        ("cuda>=12.6 brand=nvidia,driver>=535,driver<536", True),
    ],
)
def test_requirements_of_an_image(dgx: FakeHost, box: pathlib.Path, requirement: str, met: bool) -> None:
    image = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_REQUIRE_CUDA": requirement}
    if met:
        assert gpus(planned(dgx, box, {}, image))
        return
    with pytest.raises(HookError, match="535.104.05") as caught:
        planned(dgx, box, {}, image)
    assert "NVIDIA_DISABLE_REQUIRE" in caught.value.hint
    assert gpus(planned(dgx, box, {"NVIDIA_DISABLE_REQUIRE": "1"}, image))


@pytest.mark.parametrize(
    ("model", "brand", "met"),
    [
        ("NVIDIA GeForce RTX 3090", "geforcertx", True),
        ("NVIDIA GeForce RTX 3090", "geforce", True),
        ("NVIDIA GeForce RTX 3090", "tesla", False),
        ("NVIDIA RTX A6000", "nvidiartx", True),
        ("Quadro RTX 6000", "quadrortx", True),
        ("Tesla V100-SXM2-16GB", "tesla", True),
        ("NVIDIA H200", "nvidia", True),
        ("NVIDIA H200", "geforce", False),
    ],
)
def test_brands(tmp_path: pathlib.Path, box: pathlib.Path, model: str, brand: str, met: bool) -> None:
    host = FakeHost(tmp_path / "host")
    host.gpu(0, "01", 0, model)
    host.driver()
    image = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_REQUIRE_CUDA": f"cuda>=99.0 brand={brand},driver>=535"}
    if met:
        assert gpus(planned(host, box, {}, image)) == {0}
    else:
        with pytest.raises(HookError, match="NVIDIA_REQUIRE_CUDA"):
            planned(host, box, {}, image)


def test_requirement_is_not_checked_for_an_unknown_driver(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = FakeHost(tmp_path / "host")
    host.gpu(0, "01", 0)
    host.version = "999.10"
    host.driver()
    image = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_REQUIRE_CUDA": "cuda>=99.0"}
    assert gpus(planned(host, box, {}, image)) == {0}


PER_TASK = "gpu:per_task:1"
BOUND = {"SLURMD_TRES_BIND": PER_TASK}
ALONE = {"SLURM_JOB_NUM_NODES": "1"}
NOT_BOUND = {"SLURMD_TRES_BIND": "gpu:none", "SLURM_STEP_ID": "0"}
VISIBLE = {"NVIDIA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize(
    ("caller", "minors"),
    [
        ({"SLURM_STEP_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, {0, 1}),
        ({"SLURM_STEP_GPUS": "2,5", "CUDA_VISIBLE_DEVICES": "0,1"}, {2, 5}),
        ({"SLURM_JOB_GPUS": "3"}, {3}),
        ({"SLURM_STEP_GPUS": "1", "SLURM_JOB_GPUS": "1,2", "NVIDIA_VISIBLE_DEVICES": "all"}, {1}),
        # Each task has one of the step's four GPUs. The container has all four.
        ({"SLURM_STEP_GPUS": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "2"}, {4, 5, 6, 7}),
        # With --gpus-per-task, the first task knows only its own GPU, but the container is for all tasks.
        ({"SLURM_STEP_GPUS": "4", "CUDA_VISIBLE_DEVICES": "0", **BOUND}, set(MINORS)),
        ({"SLURM_STEP_GPUS": "4", "CUDA_VISIBLE_DEVICES": "0", "SLURMD_TRES_BIND": f"gres/{PER_TASK}"}, set(MINORS)),
        # The GPUs of all tasks are known if this task has all GPUs of the step, or if the job has one node.
        ({**BOUND, "SLURM_STEP_GPUS": "4", "CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}, {4}),
        ({**BOUND, "SLURM_STEP_GPUS": "4", "CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_GPUS": "4,6", **ALONE}, {4, 6}),
        ({**BOUND, "SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "1", "SLURM_JOB_GPUS": "0,1", **ALONE}, {0, 1}),
        ({**BOUND, "SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "1", "SLURM_JOB_GPUS": "1,2", **ALONE}, {1, 2}),
        ({**BOUND, "SLURM_STEP_GPUS": "0", "CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_GPUS": "0,2", **ALONE}, set(MINORS)),
        ({**BOUND, "SLURM_STEP_GPUS": "4", "CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_GPUS": "5,6", **ALONE}, set(MINORS)),
        ({**BOUND, "SLURM_STEP_GPUS": "4", "SLURM_JOB_GPUS": "4,6", "SLURM_JOB_NUM_NODES": "2"}, set(MINORS)),
        # If tasks are not bound to GPUs, as for NCCL, Slurm reports only how many GPUs the step has.
        ({**NOT_BOUND, "SLURM_GPUS_ON_NODE": "2"}, set(MINORS)),
        ({**NOT_BOUND, "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "4,6", **ALONE}, {4, 6}),
        ({**NOT_BOUND, "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_GPUS": "4,6", **ALONE}, {4, 6}),
        ({**NOT_BOUND, "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "4,6", "SLURM_JOB_NUM_NODES": "2"}, set(MINORS)),
        ({**NOT_BOUND, "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "2,3", **ALONE, **VISIBLE}, {2}),
        ({**NOT_BOUND, "SLURM_JOB_GPUS": "4,6", **ALONE}, set()),
        # A step without GPUs inherits SLURM_JOB_GPUS of the batch script.
        ({"SLURM_JOB_GPUS": "1,2", "SLURM_STEP_ID": "0"}, set()),
        # Without ConstrainDevices, CUDA_VISIBLE_DEVICES numbers all GPUs.
        ({"SLURM_STEP_GPUS": "6,7", "CUDA_VISIBLE_DEVICES": "6,7"}, {6, 7}),
        # Slurm's number of a MIG device is not the number of a device node.
        ({"SLURM_STEP_GPUS": "12", "CUDA_VISIBLE_DEVICES": "MIG-x"}, set(MINORS)),
        ({"SLURM_STEP_GPUS": "12,13", "CUDA_VISIBLE_DEVICES": f"{mig_uuid(6, 1)},{mig_uuid(7, 0)}"}, {4, 5}),
        ({**BOUND, "SLURM_STEP_GPUS": "12", "CUDA_VISIBLE_DEVICES": mig_uuid(6, 1)}, set(MINORS)),
        # GPU 0 has the device node /dev/nvidia2.
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1", "NVIDIA_VISIBLE_DEVICES": "0"}, {2}),
        ({"SLURM_STEP_GPUS": "2,3", "NVIDIA_VISIBLE_DEVICES": "none"}, set()),
        ({"SLURM_STEP_GPUS": "2,3", "NVIDIA_VISIBLE_DEVICES": "void"}, set()),
        ({"SLURM_STEP_GPUS": "2,3", "PENROOT_SLURM_GPUS": "no"}, set()),
    ],
)
def test_allocation_of_slurm(dgx: FakeHost, box: pathlib.Path, caller: dict[str, str], minors: set[int]) -> None:
    assert gpus(planned(dgx, box, caller)) == minors


@pytest.mark.parametrize(
    ("caller", "image", "numbers"),
    [
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, {}, "2,3"),
        # The numbers have the order of CUDA, by PCI address.
        ({"SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "1,2"}, {}, "2,1"),
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "2,3", "NVIDIA_VISIBLE_DEVICES": "1"}, {}, "3"),
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, {}, None),
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, {"CUDA_VISIBLE_DEVICES": "1"}, None),
    ],
)
def test_tasks_get_the_gpu_numbers_of_the_step(
    dgx: FakeHost, box: pathlib.Path, caller: dict[str, str], image: dict[str, str], numbers: str | None
) -> None:
    context = fakehost.context(dgx, box, caller, dict(image))
    edits = HOOK["plan"](context, *HOOK["wanted"](context))
    assert context.environ.get("PENROOT_GPUS") == numbers
    assert gpus(edits) == (set(MINORS) if image else {int(n) for n in (numbers or "2,3").split(",")})


@pytest.mark.parametrize(
    ("visible", "warning"),
    [
        ("4", "/dev/nvidia6"),
        ("0,4", "/dev/nvidia6"),
        (mig_uuid(6, 1), "/dev/nvidia4"),
        ("9", "no GPU '9'"),
        ("GPU-of-another-node", "no GPU"),
        (mig_uuid(0, 0), "no MIG device"),
    ],
)
def test_stale_variable_is_reported(
    dgx: FakeHost, box: pathlib.Path, capsys: pytest.CaptureFixture[str], visible: str, warning: str
) -> None:
    caller = {"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1", "NVIDIA_VISIBLE_DEVICES": visible}
    assert gpus(planned(dgx, box, caller)) == {2, 3}
    err = capsys.readouterr().err
    assert f"NVIDIA_VISIBLE_DEVICES={visible}" in err
    assert warning in err
    assert "the GPUs of the step are 2,3" in err


def test_mig_devices_that_slurm_allocated(dgx: FakeHost, box: pathlib.Path) -> None:
    """Slurm names MIG devices by UUID in CUDA_VISIBLE_DEVICES. Slurm's numbers for MIG devices are not usable."""
    caller = {"SLURM_STEP_GPUS": "12,13", "CUDA_VISIBLE_DEVICES": f"{mig_uuid(6, 1)},{mig_uuid(7, 0)}"}
    assert caps(planned(dgx, box, caller)) == {
        cap_number(4, 2),
        cap_number(4, 2, 0),
        cap_number(5, 1),
        cap_number(5, 1, 0),
    }


def test_step_without_gpus_in_a_job_with_gpus(dgx: FakeHost, box: pathlib.Path) -> None:
    """Although CUDA images select "all", the step gets no GPU of its job."""
    image = {"NVIDIA_VISIBLE_DEVICES": "all"}
    step = {"SLURM_STEP_ID": "3", "SLURM_JOB_GPUS": "1,2"}
    assert planned(dgx, box, step, image).describe() == []
    assert gpus(planned(dgx, box, {**step, "NVIDIA_VISIBLE_DEVICES": "0"}, image)) == {2}
    assert gpus(planned(dgx, box, {**step, "SLURM_STEP_GPUS": "2"}, image)) == {2}
    # A hook sees a variable of --env as a variable of the image.
    assert gpus(planned(dgx, box, {"SLURM_STEP_GPUS": "2,3"}, {"NVIDIA_VISIBLE_DEVICES": "1"})) == {3}
    # Slurm does not manage the GPUs of this cluster.
    assert gpus(planned(dgx, box, {"SLURM_STEP_ID": "3"}, image)) == set(MINORS)


CLI = ["nvidia-container-cli", "--user"]
CONFIGURE = ["configure", "--no-cgroups"]


@pytest.mark.parity("98-nvidia: NVIDIA_DEBUG_LOG")
@pytest.mark.parametrize(
    ("caller", "arguments"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ["--device=all", "--compute", "--utility"]),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, ["--compute", "--utility"]),
        ({"NVIDIA_VISIBLE_DEVICES": "0,3"}, [f"--device={uuid(0)},{uuid(3)}", "--compute", "--utility"]),
        ({"NVIDIA_VISIBLE_DEVICES": "nvidia.com/gpu=1"}, [f"--device={uuid(1)}", "--compute", "--utility"]),
        ({"NVIDIA_VISIBLE_DEVICES": mig_uuid(6, 2)}, [f"--device={mig_uuid(6, 2)}", "--compute", "--utility"]),
        ({"NVIDIA_VISIBLE_DEVICES": "6:2"}, ["--device=6:2", "--compute", "--utility"]),
        (
            {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": "utility,video"},
            [f"--device={uuid(0)}", "--utility", "--video"],
        ),
        (
            {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_MIG_CONFIG_DEVICES": "all", "NVIDIA_MIG_MONITOR_DEVICES": "0"},
            [f"--device={uuid(0)}", "--mig-config=all", "--mig-monitor=0", "--compute", "--utility"],
        ),
        (
            {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_REQUIRE_B": "arch>=9.0", "NVIDIA_REQUIRE_A": "cuda>=99 brand=x"},
            [f"--device={uuid(0)}", "--compute", "--utility", "--require=cuda>=99 brand=x", "--require=arch>=9.0"],
        ),
        (
            {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_REQUIRE_A": "cuda>=99", "NVIDIA_DISABLE_REQUIRE": "1"},
            [f"--device={uuid(0)}", "--compute", "--utility"],
        ),
        (
            {"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"},
            [f"--device={uuid(0)},{uuid(1)}", "--compute", "--utility"],
        ),
    ],
)
def test_arguments_of_nvidias_program(
    dgx: FakeHost, box: pathlib.Path, caller: dict[str, str], arguments: list[str]
) -> None:
    edits = planned(dgx, box, {**caller, "PENROOT_NVIDIA_MODE": "nvidia-container-cli"})
    [command] = edits.programs
    ldconfig = next(path for path in ("/sbin/ldconfig.real", "/sbin/ldconfig") if pathlib.Path(path).exists())
    assert command == [*CLI, f"--root={dgx.root}", *CONFIGURE, f"--ldconfig=@{ldconfig}", *arguments]
    assert not libraries(edits)
    assert not gpus(edits)


def test_nvidias_program_with_a_driver_container(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = fakehost.driver_container(tmp_path / "host")
    caller = {"NVIDIA_VISIBLE_DEVICES": "all", "PENROOT_NVIDIA_MODE": "nvidia-container-cli", "NVIDIA_DEBUG_LOG": "1"}
    [command] = planned(host, box, caller).programs
    assert command[:4] == [*CLI, "--debug=/dev/stderr", f"--root={host.root}/run/nvidia/driver"]


def test_image_cannot_choose_the_driver_or_the_mode(dgx: FakeHost, box: pathlib.Path) -> None:
    """penroot loads NVML from the driver root outside the container, so an image must not choose the driver root."""
    image = {
        "NVIDIA_VISIBLE_DEVICES": "6:1",
        "NVIDIA_DRIVER_ROOT": "/home/somebody/image",
        "PENROOT_NVIDIA_MODE": "nvidia-container-cli",
        "PENROOT_SLURM_GPUS": "no",
    }
    edits = planned(dgx, box, {}, image)
    assert not edits.programs
    assert edits.files["/usr/bin/nvidia-smi"][0] == f"{dgx.root}/usr/bin/nvidia-smi"
    assert gpus(planned(dgx, box, {"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, image)) == {2, 3}


def test_driver_behind_a_link(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = fakehost.driver_container(tmp_path / "host")
    (host.root / "opt").mkdir()
    (host.root / "opt/driver").symlink_to("../run/nvidia/driver")
    edits = planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_ROOT": "/opt/driver/"})
    for source in (edits.files[f"{LIB}/libcuda.so.{VERSION}"][0], edits.files["/usr/bin/nvidia-smi"][0]):
        assert pathlib.Path(source).is_file()


def test_uuids_that_proc_does_not_show(dgx: FakeHost, tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    """Until a GPU is first used, its UUID in /proc is question marks. NVML knows the UUID then, and without /proc."""
    host = fakehost.dgx_a100(tmp_path / "host")
    for path in host.root.glob("proc/driver/nvidia/gpus/*/information"):
        text = path.read_text().splitlines()
        path.write_text("\n".join("GPU UUID: \t GPU-????????-????" if "UUID" in line else line for line in text))
    for _ in range(2):
        assert gpus(planned(host, box, {"NVIDIA_VISIBLE_DEVICES": uuid(4)})) == {6}
        assert gpus(planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "all"})) == set(MINORS)
        with pytest.raises(HookError):
            planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "GPU-????????"})
        shutil.rmtree(host.root / "proc/driver/nvidia/gpus", ignore_errors=True)


@pytest.mark.parametrize("damage", ["old", "garbage", "missing"])
def test_nvml_that_cannot_answer(dgx: FakeHost, box: pathlib.Path, tmp_path: pathlib.Path, damage: str) -> None:
    host = fakehost.consumer(tmp_path / "host")
    library = host.root / f"usr/local/nvidia/lib64/libnvidia-ml.so.{VERSION}"
    if damage == "old":
        host.library(str(library.relative_to(host.root)), "libnvidia-ml.so.1")
    elif damage == "garbage":
        library.write_bytes(b"no library")
    else:
        library.unlink()
    with pytest.raises(HookError, match=r"too old|cannot load|cannot find"):
        planned(host, box, {"NVIDIA_VISIBLE_DEVICES": mig_uuid(0, 0)})
    assert gpus(planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0"})) == {0}


@pytest.mark.parametrize("directory", ["/run/mps", "/run/mps/", "/run/../run/mps"])
def test_pipes_of_mps(tmp_path: pathlib.Path, box: pathlib.Path, directory: str) -> None:
    """The container gets the directory that the caller's CUDA_MPS_PIPE_DIRECTORY names."""
    host = fakehost.consumer(tmp_path / "host")
    host.directory("run/mps", "tmp/nvidia-mps")
    caller = {"NVIDIA_VISIBLE_DEVICES": "0"}
    edits = planned(host, box, {**caller, "CUDA_MPS_PIPE_DIRECTORY": directory})
    assert edits.files["/run/mps"][0] == f"{host.root}/run/mps"
    assert edits.environ == {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}
    for other in ("", "/", "mps"):
        edits = planned(host, box, {**caller, "CUDA_MPS_PIPE_DIRECTORY": other})
        assert ("/tmp/nvidia-mps" in edits.files) == (not other)
        assert not edits.environ
        assert not {"/", "mps", "."} & set(edits.files)


def test_some_gpus_of_a_machine(tmp_path: pathlib.Path, box: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Kubernetes pod has the machine's /proc, but a private /dev with some of the GPUs."""
    host = fakehost.dgx_a100(tmp_path / "host")
    for index in (0, 1, 3):
        (host.root / f"dev/nvidia{MINORS[index]}").unlink()
    assert gpus(planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "all"})) == {MINORS[i] for i in (2, 4, 5, 6, 7)}
    err = capsys.readouterr().err
    assert "ignoring GPU 0000:07:00.0" in err
    assert "has no /dev/nvidia2" in err
    assert gpus(planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0,1"})) == {MINORS[2], MINORS[4]}
    with pytest.raises(HookError, match="/dev/nvidia2") as caught:
        planned(host, box, {"NVIDIA_VISIBLE_DEVICES": uuid(0)})
    assert "nvidia-modprobe -c 2" in caught.value.hint
    with pytest.raises(HookError) as caught:
        planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "5"})
    assert "0000:07:00.0 without a node" in caught.value.hint
    for minor in MINORS:
        (host.root / f"dev/nvidia{minor}").unlink(missing_ok=True)
    with pytest.raises(HookError, match="has no node"):
        planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "all"})


def test_gpu_without_information_in_proc_is_hidden(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    """/proc has no usable information on a GPU, but its device node exists."""
    host = fakehost.dgx_a100(tmp_path / "host")
    [one, two, *_] = sorted(host.root.glob("proc/driver/nvidia/gpus/*/information"))
    one.write_bytes(b"\xff\n::\nno colon\nDevice Minor: N/A\n")
    two.write_text(two.read_text().replace("GPU Excluded:\t No", "GPU Excluded:\t Yes"))
    edits = planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0"})
    assert gpus(edits) == {MINORS[2]}
    hidden = {path for path in edits.hidden if "caps" not in path}
    assert hidden == {f"/dev/nvidia{minor}" for minor in MINORS} - {f"/dev/nvidia{MINORS[2]}"}


@pytest.mark.parametrize("ci", [None, 0])
def test_part_of_a_gpu_without_its_node(tmp_path: pathlib.Path, box: pathlib.Path, ci: int | None) -> None:
    host = fakehost.dgx_a100(tmp_path / "host")
    (host.root / f"dev/nvidia-caps/nvidia-cap{cap_number(4, 2, ci)}").unlink()
    assert gpus(planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "6:0"})) == {4}
    for visible in ("6:1", mig_uuid(6, 1)):
        with pytest.raises(HookError, match=f"the MIG device {visible} has no node") as caught:
            planned(host, box, {"NVIDIA_VISIBLE_DEVICES": visible})
        below = "gi2/access" if ci is None else "gi2/ci0/access"
        assert caught.value.hint.endswith(f"nvidia-modprobe -f /proc/driver/nvidia/capabilities/gpu4/mig/{below}")


@pytest.mark.parametrize(
    "value",
    [*("0:", ":", "*", "٣", "0\n1", "0,\x1b[31m"), *(word + "9" * 9999 for word in ("", "0:", "MIG-", "GPU-"))],
)
@pytest.mark.parametrize("nvml", [True, False])
def test_hostile_values_are_one_short_line(tmp_path: pathlib.Path, box: pathlib.Path, value: str, nvml: bool) -> None:
    host = fakehost.consumer(tmp_path / "host")
    if not nvml:
        shutil.rmtree(host.root / "usr/local/nvidia")
    limits = {"NVIDIA_REQUIRE_CUDA": f"cuda>={value}", "NVIDIA_REQUIRE_X": f"driver<{value} brand={value}"}
    for image in (
        {"NVIDIA_VISIBLE_DEVICES": value},
        {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": value},
        {"NVIDIA_VISIBLE_DEVICES": "0", **limits},
    ):
        try:
            planned(host, box, {}, image)
        except HookError as e:
            assert len(str(e)) < 1000
            assert str(e).isprintable()
    planned(host, box, {"SLURM_STEP_GPUS": value, "CUDA_VISIBLE_DEVICES": value})


def test_unknown_way_to_find_gpus(dgx: FakeHost, box: pathlib.Path) -> None:
    with pytest.raises(HookError, match="PENROOT_NVIDIA_MODE=magic"):
        planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0", "PENROOT_NVIDIA_MODE": "magic"})


def test_driver_container(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = fakehost.driver_container(tmp_path / "host")
    edits = planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "all"})
    assert edits.files[f"{LIB}/libcuda.so.{VERSION}"][0] == f"{host.root}/run/nvidia/driver{LIB}/libcuda.so.{VERSION}"
    assert edits.files["/usr/bin/nvidia-smi"][0] == f"{host.root}/run/nvidia/driver/usr/bin/nvidia-smi"
    # The driver's daemon may run in the driver container or on the host.
    for path in ("/run/nvidia/driver/var/run/nvidia-persistenced/socket", "/run/nvidia-persistenced/socket"):
        socket = host.file(path)
        edits = planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "all"})
        assert edits.files["/var/run/nvidia-persistenced/socket"][0] == str(socket)


def test_directories_that_the_loader_does_not_know(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = fakehost.consumer(tmp_path / "host")
    edits = planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0"})
    assert edits.files[f"{LIB}/libcuda.so.{VERSION}"][0].endswith(f"/usr/local/nvidia/lib64/libcuda.so.{VERSION}")
    assert edits.links[f"{LIB}/libcuda.so.1"] == f"libcuda.so.{VERSION}"
    every = planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": "all"})
    assert libraries(every) == EVERY_LIBRARY


def test_directories_that_the_caller_alone_knows(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    """The caller's variables name the directories. A usual directory may contain files of another driver."""
    host = fakehost.consumer(tmp_path / "host")
    (host.root / "opt").mkdir()
    (host.root / "usr/local/nvidia").rename(host.root / "opt/gpu")
    (host.root / "usr/bin/nvidia-smi").rename(host.root / "opt/gpu/nvidia-smi")
    host.library("/usr/lib64/libcuda.so.470.1", "libcuda.so.1")
    (host.root / "usr/lib64/libcuda.so.1").symlink_to("libcuda.so.470.1")
    caller = {"NVIDIA_VISIBLE_DEVICES": "0"}
    assert libraries(planned(host, box, caller)) <= set(fakehost.OWN)
    edits = planned(host, box, {**caller, "LD_LIBRARY_PATH": ":lib:/nowhere:/opt/gpu/lib64", "PATH": "/opt/gpu:/bin"})
    assert edits.files[f"{LIB}/libcuda.so.{VERSION}"][0] == f"{host.root}/opt/gpu/lib64/libcuda.so.{VERSION}"
    assert edits.files["/usr/bin/nvidia-smi"][0] == f"{host.root}/opt/gpu/nvidia-smi"
    assert f"{LIB}/libcuda.so.470.1" not in edits.files


def test_loader_that_knows_another_libcuda_alone(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    """A rented machine can be a CUDA image. Its loader cache lists the compatibility package, but no driver."""
    host = fakehost.consumer(tmp_path / "host")
    host.library("/usr/local/cuda/compat/libcuda.so.575.51.03", "libcuda.so.1")
    host.ldconfig("", "/usr/local/cuda/compat")
    edits = planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0"})
    assert edits.files[f"{LIB}/libcuda.so.{VERSION}"][0].endswith(f"/usr/local/nvidia/lib64/libcuda.so.{VERSION}")
    assert f"{LIB}/libcuda.so.575.51.03" not in edits.files


def test_libraries_of_an_older_driver_are_left_out(
    tmp_path: pathlib.Path, box: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = fakehost.consumer(tmp_path / "host")
    host.file(
        "/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Rel\n"
    )
    assert driver.loaded_version(Host(str(host.root))) == "550.54.15"
    edits = planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0"})
    assert libraries(edits) <= set(fakehost.OWN)
    assert gpus(edits) == {0}
    err = capsys.readouterr().err
    assert "no libcuda.so.1 for driver 550.54.15" in err
    assert "no libnvidia-ml.so.1" in err
    assert f"{host.root}/etc/ld.so.cache" in err
    assert "/usr/local/nvidia/lib64" in err


def test_image_with_newer_libcuda_keeps_it(dgx: FakeHost, box: pathlib.Path) -> None:
    compat = box / "usr/local/cuda/compat"
    compat.mkdir(parents=True)
    (compat / "libcuda.so.1").symlink_to("libcuda.so.530.30.02")
    (compat / "libcuda.so.530.30.02").touch()
    hosts = (ldcache.NATIVE, "libcuda.so.1", f"{LIB}/libcuda.so.1")
    assert hosts in planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0"}).libraries
    (compat / "libcuda.so.550.54.15").touch()
    libraries_ = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0"}).libraries
    assert (ldcache.NATIVE, "libcuda.so.1", "/usr/local/cuda/compat/libcuda.so.1") in libraries_
    assert hosts not in libraries_


def note(drivers: str) -> str:
    """Return C code for the ELF note of a compatibility libcuda that lists the supported drivers."""
    text = f'{{"Format": 1, "CUDA Version": "12.4", "Driver": [{drivers}], "Device": [1]}}'
    return f"""asm(".section .note.cuda.fwd_compatibility, \\"a\\", @note\\n.long 19, {len(text)}, 1\\n"
        ".asciz \\"NVIDIA Corporation\\"\\n.balign 4\\n.ascii {json.dumps(json.dumps(text))[1:-1]}\\n.previous");"""


@pytest.mark.parametrize(
    ("source", "model", "used"),
    [
        ("", "NVIDIA A100-SXM4-40GB", True),
        ("470, 535", "NVIDIA A100-SXM4-40GB", True),
        ("470, 525", "NVIDIA A100-SXM4-40GB", False),
        ("", "NVIDIA GeForce RTX 3090", False),
    ],
)
def test_compatibility_package_is_for_some_drivers_and_gpus(
    tmp_path: pathlib.Path, box: pathlib.Path, source: str, model: str, used: bool
) -> None:
    """CUDA fails to start if the package does not support the driver or GPU. The host's libcuda works in most cases."""
    host = FakeHost(tmp_path / "host")
    host.gpu(0, "01", 0, model)
    host.driver()
    compat = box / "usr/local/cuda/compat"
    compat.mkdir(parents=True)
    (compat / "libcuda.so.1").symlink_to("libcuda.so.550.54.15")
    library = fakehost.compiled(note(source) if source else "", "libcuda.so.1", "-nostdlib")
    (compat / "libcuda.so.550.54.15").write_bytes(library)
    (compat / "libnvidia-gpucomp.so.550.54.15").touch()
    paths = {path for _, _, path in planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0"}).libraries}
    compat_paths = {f"/usr/local/cuda/compat/{name}" for name in ("libcuda.so.1", "libnvidia-gpucomp.so.550.54.15")}
    assert (compat_paths <= paths) == used
    assert (f"{LIB}/libcuda.so.1" in paths) != used


def test_no_driver(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = FakeHost(tmp_path / "host")
    assert planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "all"}).describe() == []
    assert planned(host, box, {}, {"NVIDIA_VISIBLE_DEVICES": "0"}).describe() == []
    with pytest.raises(HookError, match="no NVIDIA driver"):
        planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0"})


@pytest.fixture
def no_uvm(tmp_path: pathlib.Path) -> Iterator[FakeHost]:
    host = fakehost.consumer(tmp_path / "host")
    for name in ("nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"):
        (host.root / "dev" / name).unlink()
    yield host


def test_optional_things_may_be_missing(
    no_uvm: FakeHost, box: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caller = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all"}
    assert gpus(planned(no_uvm, box, caller)) == {0}
    assert "/dev/nvidia-uvm" in capsys.readouterr().err
    (no_uvm.root / "dev/nvidiactl").unlink()
    with pytest.raises(HookError, match="nvidiactl") as caught:
        planned(no_uvm, box, caller)
    assert "nvidia-modprobe" in caught.value.hint


@pytest.mark.parity("50-mig-config")
def test_mig_config_hook(dgx: FakeHost, box: pathlib.Path) -> None:
    run = fakehost.hook("extra/50-mig-config.py")["run"]
    selections = {
        "0": None,
        "0,6": "all",
        "all": "all",
        "6:0": None,
        "void": None,
        "9": None,
        "nvidia.com/gpu=6": "all",
    }
    for visible, expected in selections.items():
        context = fakehost.context(dgx, box, {"NVIDIA_VISIBLE_DEVICES": visible}, {})
        run(context)
        assert context.environ.get("NVIDIA_MIG_CONFIG_DEVICES") == expected, visible
