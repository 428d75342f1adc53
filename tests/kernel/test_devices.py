"""Containers on a fake DGX: what the hooks planned is there, works, and nothing else is."""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import subprocess
import time

import pytest

from tests import fakehost
from tests.fakehost import MINORS, TRIPLET, FakeHost, cap_number, mig_uuid, uuid
from tests.kernel.conftest import User, require

LOADER = """
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		printf("%s %s\\n", argv[i], dlopen(argv[i], RTLD_NOW) ? "loaded" : dlerror());
	return 0;
}
"""
SYSTEM = """\
/proc      /proc     none   x-create=dir,rbind,rw,nosuid,nodev,noexec,rslave  0  -1
{host}/sys /sys      none   x-create=dir,rbind,ro,nosuid,nodev,noexec,rslave  0  -1
{host}/dev /dev      none   x-create=dir,rbind,rw,nosuid,noexec,rslave        0  -1
tmpfs      /tmp      tmpfs  x-create=dir,rw,nosuid,nodev,mode=755,slave       0  -1
tmpfs      /var/run  tmpfs  x-create=dir,rw,nosuid,nodev,mode=755,slave       0  -1
"""


@pytest.fixture
def dgx(user: User) -> FakeHost:
    """The host of this test's containers: its /dev and /sys are theirs."""
    require(os.geteuid() == 0, "device nodes are made by root")
    require(shutil.which("gcc"), "gcc is not installed")
    host = fakehost.dgx_a100(user.home / "dgx")
    (user.home / "etc/mounts.d").mkdir(parents=True)
    (user.home / "etc/mounts.d/10-system.fstab").write_text(SYSTEM.format(host=host.root))
    user.environ["PENROOT_HOST_ROOT"] = str(host.root)
    return host


@pytest.fixture
def box(user: User, rootfs: pathlib.Path) -> pathlib.Path:
    """The container ``box`` with the C library, a program that loads others, and ldconfig."""
    for path in (f"/lib/{TRIPLET}/libc.so.6", _interpreter(), "/sbin/ldconfig"):
        target = rootfs / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (rootfs / f"usr/lib/{TRIPLET}").mkdir(parents=True)
    source = rootfs / "loader.c"
    source.write_text(LOADER)
    subprocess.run(["gcc", "-o", rootfs / "bin/loader", source], check=True)
    for name in ("find", "sort"):
        (rootfs / "bin" / name).symlink_to("busybox")
    user.own(rootfs)
    return rootfs


def _interpreter() -> str:
    return {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}[os.uname().machine]


def explained(user: User, **environ: str) -> list[tuple[str, str]]:
    """What ``start --explain`` says of devices: kind and path."""
    done = user.penroot("start", "--explain", "box", env=environ)
    words = [line.split() for line in (done.stdout + done.stderr).splitlines()]
    return [(line[0], line[1]) for line in words if line[:1] and line[0] in ("hide", "device", "file", "link", "cover")]


CAPS = {
    f"nvidia-caps/nvidia-cap{cap_number(MINORS[i], gi, c)}"
    for i in fakehost.MIG_GPUS
    for gi, ci in fakehost.MIGS
    for c in (None, ci)
}
ALWAYS = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "gdrdrv", "nvidia-fs0", "nvidia-caps-imex-channels/channel0"}
SWITCHES = {*(f"nvidia-nvswitch{n}" for n in range(6)), "nvidia-nvswitchctl"}


def mig_nodes(index: int, number: int) -> set[str]:
    gi, ci = fakehost.MIGS[number]
    minor = MINORS[index]
    caps = {f"nvidia-caps/nvidia-cap{cap_number(minor, gi, c)}" for c in (None, ci)}
    return {f"nvidia{minor}", *caps}


@pytest.mark.parametrize("specification", [False, True], ids=["native", "cdi"])
@pytest.mark.parametrize(
    ("visible", "nodes"),
    [
        ("all", {f"nvidia{minor}" for minor in MINORS} | CAPS | SWITCHES | ALWAYS),
        ("0,3", {"nvidia2", "nvidia1"} | ALWAYS),
        (uuid(5), {"nvidia7"} | ALWAYS),
        (mig_uuid(6, 2), mig_nodes(6, 2) | ALWAYS),
        ("none", ALWAYS - {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}),
        ("void", set()),
    ],
)
def test_what_is_explained_is_there_and_nothing_else(
    user: User, dgx: FakeHost, box: pathlib.Path, visible: str, nodes: set[str], specification: bool
) -> None:
    if specification:
        dgx.cdi()
        if visible not in ("none", "void") and not visible.startswith("MIG-"):
            # What the specification names, where it names the device at all.
            nodes = nodes - CAPS - SWITCHES | {"nvidia-modeset"}
    environ = {"NVIDIA_VISIBLE_DEVICES": visible, "ENROOT_RESTRICT_DEV": "yes"}
    said = explained(user, **environ)
    assert {path for kind, path in said if kind == "device"} == {f"/dev/{name}" for name in nodes}
    out = user.start("box", "find", "/dev/", "-type", "c", "-name", "*n*", "-o", "-name", "gdrdrv", env=environ)
    found = {line.removeprefix("/dev/") for line in out.splitlines()} - {"null", "random", "urandom"}
    assert found == nodes
    out = user.start("box", "find", "/usr", "/lib", "(", "-type", "f", "-o", "-type", "l", ")", env=environ)
    before = {"/" + str(path.relative_to(box)) for path in box.rglob("*") if path.is_file()}
    new = set(out.splitlines()) - before
    expected = {path for kind, path in said if kind in ("file", "link")}
    assert new == {path for path in expected if path.startswith(("/usr", "/lib"))}


def test_loader_finds_libraries(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    environ = {"NVIDIA_VISIBLE_DEVICES": "all"}
    out = user.start("box", "loader", "libcuda.so.1", "libnvidia-ml.so.1", "libnvcuvid.so.1", env=environ)
    assert out.splitlines()[:2] == ["libcuda.so.1 loaded", "libnvidia-ml.so.1 loaded"]
    assert "cannot open" in out.splitlines()[2]
    listed = user.start("box", "/sbin/ldconfig", "-p", env=environ)
    assert f"libcuda.so.1 (libc6,x86-64) => /usr/lib/{TRIPLET}/libcuda.so.1" in listed
    # And after it is written anew inside, as every package does.
    out = user.start("--rw", "box", "sh", "-c", "/sbin/ldconfig; loader libcuda.so.1", env=environ)
    assert out == "libcuda.so.1 loaded\n"


def test_loader_prefers_the_hosts_over_a_stale_copy(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    """An image has an old driver in a directory of its own, and a cache that says so."""
    stale = FakeHost(user.home / "stale")
    stale.library("/opt/old/libcuda.so.470.1", "libcuda.so.1")
    shutil.copytree(stale.root / "opt", box / "opt", dirs_exist_ok=True)
    (box / "etc/ld.so.conf").write_text("/opt/old\n")
    subprocess.run(["/sbin/ldconfig", "-r", box], check=True, stderr=subprocess.DEVNULL)
    user.own(box)
    script = "loader libcuda.so.1; /sbin/ldconfig -p | grep -m1 libcuda.so.1"
    out = user.start("box", "sh", "-c", script, env={"NVIDIA_VISIBLE_DEVICES": "all"})
    assert out.splitlines()[1].endswith(f"/usr/lib/{TRIPLET}/libcuda.so.1")


def test_image_is_not_touched(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    def snapshot() -> list[tuple[str, float]]:
        return sorted((str(path), path.lstat().st_mtime) for path in box.rglob("*"))

    before = snapshot()
    user.start("box", "true", env={"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all"})
    assert snapshot() == before


def test_driver_files_are_read_only(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    environ = {"NVIDIA_VISIBLE_DEVICES": "all"}
    done = user.penroot(
        "start", "--rw", "--root", "box", "sh", "-c", "echo x > /usr/bin/nvidia-smi", env=environ, status=1
    )
    assert "Read-only" in done.stderr
    assert user.start("box", "nvidia-smi", env=environ) == "fake nvidia-smi\n"


def test_others_are_hidden_in_the_hosts_dev(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    """A hidden node is refused; one that is given reaches its driver, of which this machine has none."""
    environ = {"NVIDIA_VISIBLE_DEVICES": "0,3", "MELLANOX_VISIBLE_DEVICES": "mlx5_1"}
    nodes = [f"nvidia{minor}" for minor in sorted(MINORS)] + [f"infiniband/uverbs{n}" for n in range(10)]
    for options in ((), ("--root",)):
        script = "for n in " + " ".join(nodes) + '; do echo "$n" $(head -c0 /dev/$n 2>&1); done'
        out = user.start(*options, "box", "sh", "-c", script, env=environ)
        opened = {line.split()[0] for line in out.splitlines() if "No such device or address" in line}
        refused = {line.split()[0] for line in out.splitlines() if "Permission denied" in line}
        assert opened == {"nvidia1", "nvidia2", "infiniband/uverbs1"}
        assert refused == set(nodes) - opened


def test_sysfs_shows_the_chosen_hcas(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    script = "ls /sys/class/infiniband /sys/class/infiniband_mad; cat /sys/class/infiniband_verbs/uverbs*/ibdev"
    out = user.start("box", "sh", "-c", script, env={"MELLANOX_VISIBLE_DEVICES": "2,0"})
    assert out.split() == [
        "/sys/class/infiniband:", "mlx5_0", "mlx5_2", "/sys/class/infiniband_mad:", "abi_version", "mlx5_0", "mlx5_2",
    ]  # fmt: skip
    out = user.start("box", "ls", "/sys/class/infiniband", env={"MELLANOX_VISIBLE_DEVICES": "all"})
    assert len(out.split()) == 10
    environ = {"MELLANOX_VISIBLE_DEVICES": "3", "ENROOT_RESTRICT_DEV": "y"}
    assert user.start("box", "ls", "/dev/infiniband", env=environ).split() == ["rdma_cm", "uverbs3"]


def test_gpus_of_a_slurm_step(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    """The image and the caller ask for nothing; Slurm allocated two."""
    environ = {"SLURM_STEP_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0,1", "ENROOT_RESTRICT_DEV": "y"}
    script = "ls /dev | grep '^nvidia[0-9]'; loader libcuda.so.1"
    assert user.start("box", "sh", "-c", script, env=environ).split() == [
        "nvidia4",
        "nvidia5",
        "libcuda.so.1",
        "loaded",
    ]


def test_devices_by_option(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.cdi()
    dgx.node("/dev/kfd", 240, 0)
    environ = {"ENROOT_RESTRICT_DEV": "y"}
    options = ["--device", "nvidia.com/gpu=3", "--device=/dev/kfd"]
    out = user.start(*options, "box", "sh", "-c", "ls /dev; loader libcuda.so.1; echo $FROM_CDI", env=environ)
    assert {"nvidia1", "nvidiactl", "kfd", "loaded", "yes"} <= set(out.split())
    assert not {"nvidia0", "nvidia2"} & set(out.split())
    done = user.penroot("start", "--device", "nvidia.com/gpu=9", "box", "true", env=environ, status=1)
    assert "nvidia.com/gpu=9" in done.stderr
    assert "Traceback" not in done.stderr


def test_site_says_it_in_enroot_conf(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    (user.home / "etc/enroot.conf").write_text("NVIDIA_VISIBLE_DEVICES 1\nENROOT_RESTRICT_DEV yes\n")
    assert "nvidia3" in user.start("box", "ls", "/dev").split()
    assert "nvidia3" not in user.start("box", "ls", "/dev", env={"NVIDIA_VISIBLE_DEVICES": "void"}).split()


def test_variables_of_libraries_pass_unchanged(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    value = "a'b\"c $(id) `x`; \\ ünï=*"
    names = ("HCOLL_X", "SHARP_COLL_Y", "UCX_TLS", "NCCL_DEBUG_FILE")
    options = [word for name in names for word in ("-e", name)]
    out = user.start(*options, "box", "env", env=dict.fromkeys(names, value))
    assert {f"{name}={value}" for name in names} <= set(out.splitlines())


def test_limits_and_shared_memory_are_the_callers(user: User, rootfs: pathlib.Path) -> None:
    limits = ["sh", "-c", "grep -E 'locked memory|stack size' /proc/self/limits; stat -f -c %b /dev/shm"]
    prefix = ("prlimit", "--memlock=123456:234567", "--stack=4000000:unlimited")
    outside = user.run(*limits, prefix=prefix).stdout
    inside = user.run("penroot", "start", "box", *limits, prefix=prefix).stdout
    assert "123456" in inside
    assert inside == outside


def test_python_hook_of_the_site(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    extra = pathlib.Path(__file__).parent.parent.parent / "hooks/extra/50-sharp.py"
    (user.home / "etc/hooks.d").mkdir()
    shutil.copy(extra, user.home / "etc/hooks.d")
    environ = {"SLURM_NETWORK": "sharp", "MELLANOX_VISIBLE_DEVICES": "all", "SLURM_STEP_NUM_NODES": "2"}
    out = user.start("box", "env", env=environ)
    assert {"NCCL_COLLNET_ENABLE=1", "NCCL_SHARP_GROUP_SIZE_THRESH=2"} <= set(out.splitlines())


def test_ten_starts_at_once(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    script = "for i in 1 2 3 4 5 6 7 8 9 10; do penroot start box loader libcuda.so.1 & done; wait"
    out = user.run("sh", "-c", script, env={"NVIDIA_VISIBLE_DEVICES": "all"}).stdout
    assert out.splitlines() == ["libcuda.so.1 loaded"] * 10


def test_writable_container_may_start_again_and_with_another_driver(
    user: User, dgx: FakeHost, box: pathlib.Path
) -> None:
    environ = {"NVIDIA_VISIBLE_DEVICES": "all"}
    for _ in range(2):
        assert user.start("--rw", "box", "loader", "libcuda.so.1", env=environ) == "libcuda.so.1 loaded\n"
    shutil.rmtree(dgx.root)
    fakehost.VERSION, before = "550.54.15", fakehost.VERSION
    try:
        fakehost.dgx_a100(dgx.root)
    finally:
        fakehost.VERSION = before
    script = f"loader libcuda.so.1; readlink /usr/lib/{TRIPLET}/libcuda.so.1"
    out = user.start("--rw", "box", "sh", "-c", script, env=environ)
    assert out.split() == ["libcuda.so.1", "loaded", "libcuda.so.550.54.15"]


def test_device_hooks_cost_little(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    """At most 0.6 of a bare interpreter on top of a start; a loose bound here, the strict one is a benchmark."""
    start = ["penroot", "start", "box", "true"]
    runs = {
        "bare": (["/usr/bin/python3", "-IS", "-c", "pass"], {}),
        "plain": (start, {}),
        "devices": (start, {"NVIDIA_VISIBLE_DEVICES": "all", "MELLANOX_VISIBLE_DEVICES": "all"}),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(15):
        for name, (command, environ) in runs.items():
            begin = time.perf_counter()
            user.run(*command, env=environ)
            times[name].append(time.perf_counter() - begin)
    low = {name: statistics.quantiles(values, n=10)[0] for name, values in times.items()}
    assert low["devices"] - low["plain"] < 1.2 * low["bare"], low
