"""Containers on a fake DGX have exactly the selected devices and the driver's files, and these work."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable

import pytest

from enroot_py.runtime.hooks import OURS
from tests import fakehost
from tests.fakehost import MINORS, TRIPLET, FakeHost, cap_number, mig_uuid, uuid
from tests.kernel.conftest import PREFIX, User, require
from tests.waiting import until

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


def become(user: User, host: FakeHost) -> FakeHost:
    """Give the user's containers the /dev and /sys of ``host``, and return it."""
    user.environ.update(fakehost.as_host(host, user.home / "etc"))
    return host


def require_nodes() -> None:
    require(os.geteuid() == 0, "device nodes are made by root")
    require(shutil.which("gcc"), "gcc is not installed")


@pytest.fixture
def dgx(user: User) -> FakeHost:
    """Return a fake DGX as the host of the containers."""
    require_nodes()
    return become(user, fakehost.dgx_a100(user.home / "dgx"))


@pytest.fixture
def box(user: User, rootfs: pathlib.Path) -> pathlib.Path:
    """Return the container ``box`` with the C library, a program that loads libraries, and ldconfig."""
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


Lines = set[tuple[str, str]]


def explained(user: User, **environ: str) -> Lines:
    """Return kind and path of each device, file, link and covered directory in the output of ``start --explain``."""
    done = user.penroot("start", "--explain", "box", env=environ)
    words = [line.split() for line in (done.stdout + done.stderr).splitlines()]
    return {(line[0], line[1]) for line in words if line[:1] and line[0] in ("device", "file", "link", "cover")}


def content(user: User, *directories: str, **environ: str) -> set[str]:
    """Return the devices, files, links and sockets below ``directories`` of a started container."""
    kinds = ["-type", "c", "-o", "-type", "f", "-o", "-type", "l", "-o", "-type", "s"]
    return set(user.start("box", "find", *directories, "(", *kinds, ")", env=environ).splitlines())


# Skip /dev/shm: the container sees the host's, in which other processes create short-lived files.
EVERYWHERE = (
    "/",
    *(word for path in ("/proc", "/sys", "/dev/shm", "/dev/mqueue") for word in ("-path", path, "-prune", "-o")),
)

LIB = f"/usr/lib/{TRIPLET}"
# Sonames of the libraries for compute and utility, with their ldconfig links.
SONAMES = {
    *("libcuda.so.1", "libcudadebugger.so.1", "libnvidia-ml.so.1", "libnvidia-cfg.so.1", "libnvidia-opencl.so.1"),
    *("libnvidia-ptxjitcompiler.so.1", "libnvidia-allocator.so.1", "libnvidia-nvvm.so.4"),
    "libnvidia-sandboxutils.so.1",
}
PROGRAMS = ("nvidia-smi", "nvidia-debugdump", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
DRIVER = {
    *(("file", f"{LIB}/{name.partition('.')[0]}.so.{fakehost.VERSION}") for name in SONAMES),
    *(("file", f"{LIB}/{name}.so.{fakehost.VERSION}") for name in ("libnvidia-compiler", "libnvidia-gpucomp")),
    ("file", f"{LIB}/libnvidia-nvvm70.so.4"),
    ("file", "/etc/OpenCL/vendors/nvidia.icd"),
    *(("link", f"{LIB}/{name}") for name in SONAMES),
    ("link", f"{LIB}/libcuda.so"),
    *(("file", f"/usr/bin/{name}") for name in PROGRAMS),
    ("file", f"/lib/firmware/nvidia/{fakehost.VERSION}/gsp_ga10x.bin"),
}
MAIN = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
DIRECT = {"gdrdrv", "nvidia-fs0", "nvidia-caps-imex-channels/channel0"}
SHARED = {("device", "/dev/knem"), ("device", "/dev/xpmem")}
SWITCHES = {*(f"nvidia-nvswitch{n}" for n in range(6)), "nvidia-nvswitchctl"}
CAPS = {
    f"nvidia-caps/nvidia-cap{cap_number(MINORS[i], gi, c)}"
    for i in fakehost.MIG_GPUS
    for gi, ci in fakehost.MIGS
    for c in (None, ci)
}


def nodes(*names: str) -> Lines:
    return {("device", f"/dev/{name}") for name in names}


def of_specification(libraries: str) -> Lines:
    """Return the lines that the CDI specification of a fake host adds, whichever devices are selected."""
    sonames = {"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1", "libnvcuvid": "libnvcuvid.so.1"}
    return {
        *nodes(*MAIN, "nvidia-modeset"),
        *(("file", f"{libraries}/{name}.so.{fakehost.VERSION}") for name in sonames),
        *(("link", f"{libraries}/{soname}") for soname in sonames.values()),
        ("link", f"{libraries}/libcuda.so"),
        ("file", "/usr/bin/nvidia-smi"),
    }


def mig_nodes(index: int, number: int) -> set[str]:
    gi, ci = fakehost.MIGS[number]
    minor = MINORS[index]
    caps = {f"nvidia-caps/nvidia-cap{cap_number(minor, gi, c)}" for c in (None, ci)}
    return {f"nvidia{minor}", *caps}


def of_dgx() -> dict[str, tuple[set[str], set[str]]]:
    """Return selection -> (nodes that are always added, nodes that are added only without a CDI specification)."""
    return {
        "all": ({f"nvidia{minor}" for minor in MINORS} | CAPS, SWITCHES),
        "0,3": ({"nvidia2", "nvidia1"}, set()),
        uuid(5): ({"nvidia7"}, set()),
        mig_uuid(6, 2): (mig_nodes(6, 2), set()),
    }


def of_one_gpu() -> dict[str, tuple[set[str], set[str]]]:
    return {visible: ({"nvidia0"}, set()) for visible in ("all", "0", uuid(0))}


SOCKET = ("file", "/var/run/nvidia-persistenced/socket")
OF_DGX = {*nodes(*DIRECT), ("file", "/etc/cufile.json"), SOCKET}


@pytest.mark.parity("98-nvidia: NVIDIA_VISIBLE_DEVICES")
@pytest.mark.parametrize("specification", [False, True], ids=["native", "cdi"])
@pytest.mark.parametrize(
    ("make", "selections", "always", "libraries"),
    [
        (fakehost.dgx_a100, of_dgx(), OF_DGX, LIB),
        (fakehost.driver_container, of_one_gpu(), set(), LIB),
        (fakehost.consumer, of_one_gpu(), set(), "/usr/local/nvidia/lib64"),
    ],
    ids=["dgx", "driver-container", "consumer"],
)
def test_container_has_exactly_the_explained_devices(
    user: User,
    box: pathlib.Path,
    make: Callable[[pathlib.Path], FakeHost],
    selections: dict[str, tuple[set[str], set[str]]],
    always: Lines,
    libraries: str,
    specification: bool,
) -> None:
    require_nodes()
    host = become(user, make(user.home / "host"))
    if specification:
        host.cdi()
    shared = SHARED if (host.root / "dev/knem").exists() else set()
    restricted = {"ENROOT_RESTRICT_DEV": "yes"}
    without = content(user, *EVERYWHERE, NVIDIA_VISIBLE_DEVICES="void", **restricted)
    expected_lines = {"void": shared, "none": shared | DRIVER | always}
    for visible, (devices, besides) in selections.items():
        if specification:
            expected_lines[visible] = shared | always | nodes(*devices) | of_specification(libraries)
        else:
            expected_lines[visible] = shared | always | nodes(*devices, *besides, *MAIN) | DRIVER
    for visible, expected in expected_lines.items():
        environ = {"NVIDIA_VISIBLE_DEVICES": visible, **restricted}
        assert explained(user, **environ) == expected, visible
        held = content(user, *EVERYWHERE, **environ)
        assert held - without == {path for _, path in expected - shared} | (
            {"/etc/ld.so.cache"} if visible != "void" else set()
        ), visible
        assert not without - held, visible


@pytest.mark.parametrize("visible", ["all", "0,3", "mlx5_4", "none", "void"])
def test_container_has_exactly_the_explained_hcas(user: User, dgx: FakeHost, box: pathlib.Path, visible: str) -> None:
    environ = {"MELLANOX_VISIBLE_DEVICES": visible, "ENROOT_RESTRICT_DEV": "yes"}
    numbers = {"all": range(10), "0,3": (0, 3), "mlx5_4": (4,)}.get(visible, ())
    classes = {"infiniband": "mlx5_{}", "infiniband_verbs": "uverbs{}"}
    shown = {f"/sys/class/{name}/{entry.format(n)}" for name, entry in classes.items() for n in numbers}
    allocated = nodes("infiniband/rdma_cm", *(f"infiniband/uverbs{n}" for n in numbers)) if numbers else set()
    abi = {f"/sys/class/{name}/abi_version" for name in ("infiniband_verbs", "infiniband_mad")}
    lines = explained(user, **environ)
    assert {line for line in lines if line[0] == "device"} == allocated | SHARED
    if len(numbers) in (0, 10):
        assert lines == allocated | SHARED
    else:
        assert lines - allocated - SHARED == {
            *(("link", path) for path in shown),
            *(("file", path) for path in abi),
            *(("cover", f"/sys/class/{name}") for name in (*classes, "infiniband_mad")),
        }
    held = content(user, "/dev/infiniband", **environ) if numbers else set()
    assert held == {path for _, path in allocated}
    directories = [f"/sys/class/{name}" for name in (*classes, "infiniband_mad")]
    held = content(user, *directories, **environ)
    if len(numbers) in (0, 10):
        # The container sees the host's sysfs. It lists management devices too, whose nodes do not exist.
        numbers = range(10)
        shown = {f"/sys/class/{name}/{entry.format(n)}" for name, entry in classes.items() for n in numbers}
        shown |= {f"/sys/class/infiniband_mad/{name}{n}" for name in ("umad", "issm") for n in numbers}
    assert held == shown | abi


def test_all_of_infiniband_for_the_superuser(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    """With ENROOT_ALLOW_SUPERUSER, a container of the host's root also has the devices that manage the fabric."""
    subprocess.run(["chown", "-hR", "0:0", user.home], check=True)  # root rejects settings of other users
    environ = {
        **user.environ,
        **{f"ENROOT_{name}_PATH": str(user.home / f"root-{name}") for name in ("CACHE", "RUNTIME")},
        "ENROOT_RESTRICT_DEV": "yes",
        "MELLANOX_VISIBLE_DEVICES": "3",
    }
    for allowed, expected in (("no", {"rdma_cm", "uverbs3"}), ("yes", {"rdma_cm", "uverbs3", "umad3", "issm3"})):
        command = [f"{PREFIX}/bin/penroot", "start", "box", "ls", "/dev/infiniband", "/sys/class/infiniband_mad"]
        environ["ENROOT_ALLOW_SUPERUSER"] = allowed
        done = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        out = done.stdout
        of_dev, _, of_sys = out.partition("/sys/class/infiniband_mad:\n")
        assert set(of_dev.split()[1:]) == expected
        assert set(of_sys.split()) == {"abi_version", *(expected & {"umad3", "issm3"})}


def test_loader_finds_libraries(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    environ = {"NVIDIA_VISIBLE_DEVICES": "all"}
    out = user.start("box", "loader", "libcuda.so.1", "libnvidia-ml.so.1", "libnvcuvid.so.1", env=environ)
    assert out.splitlines()[:2] == ["libcuda.so.1 loaded", "libnvidia-ml.so.1 loaded"]
    assert "cannot open" in out.splitlines()[2]
    listed = user.start("box", "/sbin/ldconfig", "-p", env=environ)
    assert f"libcuda.so.1 (libc6,x86-64) => /usr/lib/{TRIPLET}/libcuda.so.1" in listed
    # The loader also finds the libraries after ldconfig has rewritten the cache in the container.
    out = user.start("--rw", "box", "sh", "-c", "/sbin/ldconfig; loader libcuda.so.1", env=environ)
    assert out == "libcuda.so.1 loaded\n"


def test_loader_prefers_the_hosts_over_a_stale_copy(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    """The image has an old driver library in a private directory, and its loader cache lists the library."""
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
    """A hidden node cannot be opened. A selected node can, but open(2) fails because this machine has no driver."""
    environ = {"NVIDIA_VISIBLE_DEVICES": "0,3", "MELLANOX_VISIBLE_DEVICES": "mlx5_1"}
    nodes = [f"nvidia{minor}" for minor in sorted(MINORS)] + [f"infiniband/uverbs{n}" for n in range(10)]
    for options in ((), ("--root",)):
        script = "for n in " + " ".join(nodes) + '; do echo "$n" $(head -c0 /dev/$n 2>&1); done'
        out = user.start(*options, "box", "sh", "-c", script, env=environ)
        opened = {line.split()[0] for line in out.splitlines() if "No such device or address" in line}
        refused = {line.split()[0] for line in out.splitlines() if "Permission denied" in line}
        assert opened == {"nvidia1", "nvidia2", "infiniband/uverbs1"}
        assert refused == set(nodes) - opened


@pytest.mark.parametrize("specification", [False, True], ids=["native", "cdi"])
def test_parts_of_others_are_hidden_in_the_hosts_dev(
    user: User, dgx: FakeHost, box: pathlib.Path, specification: bool
) -> None:
    if specification:
        dgx.cdi()
    nodes = [f"nvidia{minor}" for minor in MINORS] + sorted(CAPS)
    script = "for n in " + " ".join(nodes) + '; do head -c0 /dev/$n 2>&1 | grep -q "Permission denied" || echo $n; done'
    for visible, expected in ((mig_uuid(6, 1), mig_nodes(6, 1)), ("none", set()), ("void", set(nodes))):
        out = user.start("box", "sh", "-c", script, env={"NVIDIA_VISIBLE_DEVICES": visible})
        assert set(out.split()) == expected, visible


@pytest.mark.parity("99-mellanox: adds uverbs, rdma_cm, umad and issm")
def test_sysfs_shows_the_chosen_hcas(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    script = "ls /sys/class/infiniband /sys/class/infiniband_mad; cat /sys/class/infiniband_verbs/uverbs*/ibdev"
    out = user.start("box", "sh", "-c", script, env={"MELLANOX_VISIBLE_DEVICES": "2,0"})
    assert out.split() == [
        "/sys/class/infiniband:", "mlx5_0", "mlx5_2", "/sys/class/infiniband_mad:", "abi_version", "mlx5_0", "mlx5_2",
    ]  # fmt: skip


@pytest.mark.security("C4")
def test_roots_private_dev_has_the_hcas(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    """Root's containers have a private /dev by default. It includes the InfiniBand nodes that every user may open."""
    user.uid = 0
    user.own(user.home)
    show = ("box", "sh", "-c", "ls /dev; ls /dev/infiniband")
    for setting in ({}, {"ENROOT_RESTRICT_DEV": "auto"}):
        names = user.start(*show, env=setting).split()
        assert "rdma_cm" in names
        assert {f"uverbs{n}" for n in range(10)} <= set(names)
        assert not any(name.startswith(("umad", "issm", "nvidia0")) for name in names)
    for chosen in ({"MELLANOX_VISIBLE_DEVICES": "void"}, {"ENROOT_RESTRICT_DEV": "yes"}):
        assert "infiniband" not in user.start("box", "ls", "/dev", env=chosen).split()


@pytest.mark.parity("start --device", "97-devices")
def test_devices_by_option(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.cdi()
    dgx.node("/dev/kfd", 240, 0)
    environ = {"ENROOT_RESTRICT_DEV": "y"}
    options = ["--device", "nvidia.com/gpu=3", "--device=/dev/kfd"]
    out = user.start(*options, "box", "sh", "-c", "ls /dev; loader libcuda.so.1; echo $FROM_CDI", env=environ)
    assert {"nvidia1", "nvidiactl", "kfd", "loaded", "yes"} <= set(out.split())
    assert not {"nvidia0", "nvidia2"} & set(out.split())
    # NVIDIA_VISIBLE_DEVICES=all of the image adds no GPUs.
    (box / "etc/environment").write_text("NVIDIA_VISIBLE_DEVICES=all\n")
    out = user.start(*options, "box", "sh", "-c", "ls /dev", env=environ)
    assert [name for name in out.split() if name[6:].isdecimal()] == ["nvidia1"]
    done = user.penroot("start", "--device", "nvidia.com/gpu=9", "box", "true", env=environ, status=1)
    assert "nvidia.com/gpu=9" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("root", ["y", "n"])
def test_a_specification_is_parsed_once(user: User, dgx: FakeHost, box: pathlib.Path, root: str) -> None:
    """penroot keeps the parsed specification in a cache, and ignores the cache if others can write it.

    penroot checks the cache's owner within the container's user namespace, where all owners look alike.
    """
    dgx.cdi()
    environ = {"ENROOT_RESTRICT_DEV": "y", "ENROOT_REMAP_ROOT": root, "NVIDIA_VISIBLE_DEVICES": "0"}
    cache = user.home / "cache/cdi"

    def from_cdi() -> str:
        return user.start("box", "sh", "-c", "echo $FROM_CDI", env=environ)

    until(lambda: from_cdi() == "yes\n" and cache.exists(), "a parse is cached once the file is old enough")
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes().replace(b"FROM_CDI=yes", b"FROM_CDI=its"))
    assert from_cdi() == "its\n"
    cache.chmod(0o777)
    assert from_cdi() == "yes\n"


def test_tmpfs_of_a_specification_is_made(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    """The image has no mount point for the tmpfs, so penroot creates the mount point."""
    edits = {"mounts": [{"hostPath": "tmpfs", "containerPath": "/mnt/scratch", "type": "tmpfs"}]}
    spec = {"cdiVersion": "0.6.0", "kind": "acme.com/x", "devices": [{"name": "a", "containerEdits": edits}]}
    dgx.file("/run/cdi/acme.json", json.dumps(spec))
    script = "grep ' /mnt/scratch tmpfs ' /proc/mounts | cut -c1-5; echo x > /mnt/scratch/x"
    assert user.start("--device", "acme.com/x=a", "box", "sh", "-c", script) == "tmpfs\n"


@pytest.mark.parity("start --env")
def test_hooks_read_variables_of_env(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    """As in enroot, --env takes precedence over the image's variables, and the caller's variables over --env."""
    (box / "etc/environment").write_text("NVIDIA_VISIBLE_DEVICES=all\n")
    environ = {"ENROOT_RESTRICT_DEV": "y"}
    options = ["-e", "NVIDIA_VISIBLE_DEVICES=3", "--env=MELLANOX_VISIBLE_DEVICES=mlx5_2"]
    script = "cd /dev; ls nvidia[0-9]* infiniband/*; echo $NVIDIA_VISIBLE_DEVICES"
    out = user.start(*options, "box", "sh", "-c", script, env=environ)
    assert set(out.split()) == {"nvidia1", "infiniband/uverbs2", "infiniband/rdma_cm", "3"}
    out = user.start(*options, "box", "sh", "-c", script, env={**environ, "NVIDIA_VISIBLE_DEVICES": "0"})
    assert set(out.split()) == {"nvidia2", "infiniband/uverbs2", "infiniband/rdma_cm", "3"}


def test_directory_at_the_path_of_a_library_is_named(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    (box / f"usr/lib/{TRIPLET}/libcuda.so.{fakehost.VERSION}").mkdir()
    user.own(box)
    err = user.penroot("start", "box", "true", env={"NVIDIA_VISIBLE_DEVICES": "0"}).stderr
    assert f"cannot give the container /usr/lib/{TRIPLET}/libcuda.so.{fakehost.VERSION}: " in err
    assert err.count("\n") == 1


def test_cache_that_cannot_be_written_is_named(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    """Without the cache, the loader finds the libraries in their directories."""
    (box / "etc/ld.so.cache").mkdir()
    user.own(box)
    done = user.penroot("start", "box", "loader", "libcuda.so.1", env={"NVIDIA_VISIBLE_DEVICES": "0"})
    assert done.stdout == "libcuda.so.1 loaded\n"
    assert "cannot write /etc/ld.so.cache: Is a directory" in done.stderr


@pytest.mark.parametrize("layout", ["usrmerge", "lib64", "lib64-link", "bare"])
def test_images_of_any_layout(user: User, dgx: FakeHost, box: pathlib.Path, layout: str) -> None:
    """The loader finds the driver's libraries before copies in the image. Nothing is written into the image."""
    debian = box / f"usr/lib/{TRIPLET}"
    debian.rmdir()
    libraries = debian
    if layout == "usrmerge":
        for name in ("lib", "lib64"):
            shutil.copytree(box / name, box / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(box / name)
            (box / name).symlink_to(f"usr/{name}")
    elif layout == "lib64":
        libraries = box / "usr/lib64"
        libraries.mkdir()
    elif layout == "lib64-link":
        (box / "usr/lib64").symlink_to("lib")
        libraries = box / "usr/lib"
    stale = FakeHost(user.home / "stale")
    if layout != "bare":
        stale.library("/libcuda.so.470.1", "libcuda.so.1")
        shutil.copy(stale.root / "libcuda.so.470.1", libraries)
        (libraries / "libcuda.so.1").symlink_to("libcuda.so.470.1")
    user.own(box)
    before = sorted(str(path) for path in box.rglob("*"))
    script = "loader libcuda.so.1 libnvidia-ml.so.1; cd /usr; ls -l lib*/libcuda.so.1 lib/*/libcuda.so.1"
    out = user.start("box", "sh", "-c", f"{script} 2> /dev/null; true", env={"NVIDIA_VISIBLE_DEVICES": "0"})
    assert out.splitlines()[:2] == ["libcuda.so.1 loaded", "libnvidia-ml.so.1 loaded"]
    assert {line.rpartition("-> ")[2] for line in out.splitlines()[2:]} == {f"libcuda.so.{fakehost.VERSION}"}
    assert sorted(str(path) for path in box.rglob("*")) == before


@pytest.mark.parity("ENROOT_DEVICES")
def test_site_selects_devices_in_enroot_conf(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    (user.home / "etc/enroot.conf").write_text("NVIDIA_VISIBLE_DEVICES 1\nENROOT_RESTRICT_DEV yes\n")
    assert "nvidia3" in user.start("box", "ls", "/dev").split()
    assert "nvidia3" not in user.start("box", "ls", "/dev", env={"NVIDIA_VISIBLE_DEVICES": "void"}).split()


NOT_WITHOUT = {"dev/nvidiactl", *(f"dev/nvidia{minor}" for minor in MINORS)}


def parts(host: FakeHost) -> list[str]:
    """Return the files and directories of a host without which a start still works."""
    paths = [path for path in sorted(host.root.rglob("*")) if "sys/devices" not in str(path)]
    # With "all", a start works without one of several GPUs, so the result contains the first GPU.
    kept = NOT_WITHOUT - {f"dev/nvidia{MINORS[0]}"} | {
        "proc",
        "proc/driver",
        "proc/driver/nvidia",
        "dev",
        "sys",
        "sys/class",
        "usr",
        "usr/bin",
        "run",
        "var",
    }
    standard = {"null", "zero", "full", "random", "urandom", "tty", "shm", "pts"}
    names = [str(path.relative_to(host.root)) for path in paths]
    libraries = [name for name in names if ".so." in name]
    few = set(libraries[:2]) | {name for name in libraries if "libcuda.so" in name or "libnvidia-ml" in name}
    # Of many similar parts, return only the first and the last.
    for prefix in ("dev/nvidia-caps/", "proc/driver/nvidia/capabilities/gpu", "dev/infiniband/", "sys/"):
        many = [name for name in names if name.startswith(prefix)]
        few |= {many[0], many[-1]}
        names = [name for name in names if not name.startswith(prefix)]
    names = [
        name for name in names if name not in kept and ".so." not in name and name.rpartition("/")[2] not in standard
    ]
    return sorted(few | set(names))


@pytest.mark.parametrize("restricted", ["yes", "no"])
def test_no_start_fails_for_what_is_optional(
    user: User, dgx: FakeHost, box: pathlib.Path, tmp_path: pathlib.Path, restricted: str
) -> None:
    """Each start lacks one optional part of the host."""
    environ = {
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "all",
        "MELLANOX_VISIBLE_DEVICES": "all",
        "ENROOT_RESTRICT_DEV": restricted,
    }
    names = parts(dgx)
    assert {"dev/gdrdrv", "dev/nvidia-uvm", "etc/cufile.json", "run/nvidia-persistenced/socket"} <= set(names)
    for name in names:
        path, away = dgx.root / name, dgx.root / "away"
        os.rename(path, away)
        try:
            user.start("box", "true", env=environ)
        except AssertionError as e:
            pytest.fail(f"without {name}: {e}")
        finally:
            os.rename(away, path)


@pytest.mark.parametrize("specification", [False, True], ids=["native", "cdi"])
def test_missing_required_device_is_named(user: User, dgx: FakeHost, box: pathlib.Path, specification: bool) -> None:
    if specification:
        dgx.cdi()
    mode = "cdi" if specification else "native"
    environ = {"PENROOT_NVIDIA_MODE": mode}
    for name in sorted(NOT_WITHOUT):
        path, away = dgx.root / name, dgx.root / "away"
        number = name.removeprefix("dev/nvidia")
        # Without a CDI specification, "all" selects only GPUs that have a node, so select the GPU by UUID.
        needs_uuid = number.isdecimal() and not specification
        environ["NVIDIA_VISIBLE_DEVICES"] = uuid(MINORS.index(int(number))) if needs_uuid else "all"
        os.rename(path, away)
        err = user.penroot("start", "box", "true", env=environ, status=1).stderr
        os.rename(away, path)
        assert f"/{name} does not exist" in err or f"no node {path}" in err, name
        assert "[HINT]" in err
        assert "Traceback" not in err


DIRECTLY = ("gdrdrv", "nvidia-fs0", "nvidia-caps-imex-channels/channel0", "knem", "xpmem")


@pytest.mark.parametrize("restricted", ["yes", "no"])
def test_gpudirect_devices_work(user: User, dgx: FakeHost, box: pathlib.Path, restricted: str) -> None:
    environ = {"NVIDIA_VISIBLE_DEVICES": "0", "ENROOT_RESTRICT_DEV": restricted}
    script = f'for n in {" ".join(DIRECTLY)}; do echo "$n" $(head -c0 /dev/$n 2>&1); done; cat /etc/cufile.json'
    lines = user.start("box", "sh", "-c", script, env=environ).splitlines()
    # The nodes can be opened, but open(2) fails because this machine has no driver.
    assert {line.split()[0] for line in lines if "No such device" in line} == set(DIRECTLY)
    assert lines[-1] == "{}"
    script = f"cd /dev; ls {' '.join(DIRECTLY)} 2>/dev/null; true"
    out = user.start("box", "sh", "-c", script, env={"ENROOT_RESTRICT_DEV": "yes"})
    assert out.split() == ["knem", "xpmem"]  # these two need no selection


READ_FROM_PEER = """
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/uio.h>
static char buffer[16] = "by the peer";
int main(int argc, char **argv)
{
	if (argc == 1) {
		prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY); /* as MPI does, for Yama */
		printf("%p\\n", (void *)buffer);
		fflush(stdout);
		return getchar() == EOF;
	}
	char read[16] = "";
	struct iovec here = {read, sizeof read}, there = {(void *)strtoul(argv[2], NULL, 16), sizeof read};
	if (process_vm_readv(atoi(argv[1]), &here, 1, &there, 1, 0) < 0)
		perror("process_vm_readv");
	puts(read);
	return 0;
}
"""


@pytest.mark.parametrize("restricted", ["yes", "no"])
def test_ranks_read_each_others_memory(user: User, box: pathlib.Path, restricted: str) -> None:
    """Cross-memory attach, process_vm_readv(2), works. MPI uses it between the ranks of a node."""
    require(shutil.which("gcc"), "gcc is not installed")
    source = box / "peer.c"
    source.write_text(READ_FROM_PEER)
    subprocess.run(["gcc", "-o", box / "bin/peer", source], check=True)
    user.own(box)
    (box / "bin/mkfifo").symlink_to("busybox")
    script = "cd /tmp; mkfifo in out; peer < in > out & exec 3> in; read address < out; peer $! $address; echo >&3"
    out = user.start("box", "sh", "-c", script, env={"ENROOT_RESTRICT_DEV": restricted})
    assert out == "by the peer\n"


CLI = r"""#!/usr/bin/python3
# A fake nvidia-container-cli: it records its call in said.json, and bind-mounts a file as the real program does.
import ctypes, json, os, sys

root = sys.argv[-1]
with open("/proc/self/status") as f:
    status = dict(line.split(":", 1) for line in f)
said = {"arguments": sys.argv[1:], "parent": os.getppid(), "visible": os.environ.get("NVIDIA_VISIBLE_DEVICES", "")}
said["effective"] = int(status["CapEff"], 16)
# The real program finds the container's mount namespace through its parent process.
said["namespace"] = os.readlink(f"/proc/{os.getppid()}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
with open(os.environ["HOME"] + "/said.json", "w") as f:
    json.dump(said, f)
if "--fail" in os.environ.get("CLI", ""):
    sys.exit("nvidia-container-cli: initialization error: nvml error: driver not loaded")
source = os.environ["PENROOT_HOST_ROOT"] + "/usr/bin/nvidia-smi"
target = root + "/usr/bin/nvidia-smi"
open(target, "w").close()
if ctypes.CDLL(None, use_errno=True).mount(source.encode(), target.encode(), None, 4096, None):
    sys.exit(f"mount {source} on {target}: {os.strerror(ctypes.get_errno())}")
"""


@pytest.mark.parity("98-nvidia: NVIDIA_DEBUG_LOG")
@pytest.mark.parametrize("options", [(), ("--root",), ("--rw",)])
def test_nvidia_container_cli_by_setting(
    user: User, dgx: FakeHost, box: pathlib.Path, options: tuple[str, ...]
) -> None:
    program = user.home / "bin/nvidia-container-cli"
    program.parent.mkdir()
    program.write_text(CLI)
    program.chmod(0o755)
    (user.home / "etc/enroot.conf").write_text("PENROOT_NVIDIA_MODE nvidia-container-cli\n")
    environ = {"NVIDIA_VISIBLE_DEVICES": "0,3", "PATH": f"{program.parent}:{user.environ['PATH']}"}
    script = "nvidia-smi; for n in 0 1 2; do echo $n $(head -c0 /dev/nvidia$n 2>&1); done"
    out = user.start(*options, "box", "sh", "-c", script, env=environ).splitlines()
    assert out[0] == "fake nvidia-smi"
    assert [line.rpartition(": ")[2] for line in out[1:]] == [
        "Permission denied",
        "No such device or address",
        "No such device or address",
    ]
    call = json.loads((user.home / "said.json").read_text())
    *arguments, root = call["arguments"]
    assert arguments[:3] == ["--user", f"--root={dgx.root}", "configure"]
    assert set(arguments[3:]) >= {"--no-cgroups", f"--device={uuid(0)},{uuid(3)}", "--compute", "--utility"}
    assert root.startswith("/")
    assert call["effective"] >> 21 & 1  # CAP_SYS_ADMIN
    assert call["namespace"]
    # The container's program does not get the capabilities of the hook.
    if "--root" not in options:
        assert user.start("box", "grep", "CapEff", "/proc/self/status", env=environ).split()[1] == "0" * 16
    done = user.penroot("start", "box", "true", env={**environ, "CLI": "--fail"}, status=1)
    assert "driver not loaded" in done.stderr
    assert "command: " in done.stderr
    assert not user.penroot("start", "box", "true", env={**environ, "NVIDIA_VISIBLE_DEVICES": "void"}).stderr


def test_nvidias_own_program_is_missing(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    environ = {"NVIDIA_VISIBLE_DEVICES": "all", "PENROOT_NVIDIA_MODE": "nvidia-container-cli"}
    err = user.penroot("start", "box", "true", env=environ, status=1).stderr
    assert "nvidia-container-cli is not installed" in err
    assert "libnvidia-container-tools" in err


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (("/dev/kfd", "/dev/dri/renderD129"), {"kfd", "dri/renderD129"}),
        (("/dev/dri",), {f"dri/{name}" for n in range(3) for name in (f"card{n}", f"renderD{128 + n}")}),
        (("amd.com/gpu=1",), {"kfd", "dri/renderD129"}),
        (("amd.com/gpu=all",), {"kfd", "dri/renderD128", "dri/renderD129"}),
        (("intel.com/gpu=card2", "amd.com/gpu=0"), {"dri/card2", "dri/renderD130", "kfd", "dri/renderD128"}),
        ((), set()),
    ],
)
def test_gpus_of_other_vendors(user: User, box: pathlib.Path, devices: tuple[str, ...], expected: set[str]) -> None:
    require_nodes()
    become(user, fakehost.other_vendors(user.home / "host"))
    # Slurm numbers GPUs of other vendors too. The node has no NVIDIA driver.
    environ = {"ENROOT_RESTRICT_DEV": "yes", "SLURM_STEP_GPUS": "0", "ROCR_VISIBLE_DEVICES": "0"}
    options = [word for device in devices for word in ("--device", device)]
    script = "find /dev/kfd /dev/dri -type c 2>/dev/null; echo vendor $VENDOR"
    *nodes, vendor = user.start(*options, "box", "sh", "-c", script, env=environ).splitlines()
    assert set(nodes) == {f"/dev/{name}" for name in expected}
    assert vendor.split()[1:] == [device.partition("=")[0] for device in devices if "=" in device][-1:]
    stdout = user.penroot("start", "--explain", *options, "box", env=environ).stdout
    assert {line.split()[1] for line in stdout.splitlines() if line.startswith("device ")} == {
        f"/dev/{name}" for name in expected
    }
    # A step selects the devices by ENROOT_DEVICES, with the same result.
    if devices:
        environ["ENROOT_DEVICES"] = ",".join(devices)
        assert user.start("box", "sh", "-c", script, env=environ).splitlines()[:-1] == nodes


def test_gpus_of_other_vendors_are_in_the_hosts_dev(user: User, box: pathlib.Path) -> None:
    require_nodes()
    become(user, fakehost.other_vendors(user.home / "host"))
    assert {"kfd", "dri"} <= set(user.start("box", "ls", "/dev").split())


def extra(user: User, name: str, directory: str) -> None:
    """Copy an extra hook or mount file into the system's configuration, as a site would."""
    target = user.home / "etc" / directory
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(next(path for ours in OURS if os.path.exists(path := f"{ours}/extra/{name}")), target)


def test_owner_of_whole_gpus_may_configure_mig(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    extra(user, "50-mig-config.py", "hooks.d")
    script = "ls /dev/nvidia-caps/nvidia-cap1; echo $NVIDIA_MIG_CONFIG_DEVICES"
    environ = {"ENROOT_RESTRICT_DEV": "y"}
    out = user.start("box", "sh", "-c", script, env={**environ, "NVIDIA_VISIBLE_DEVICES": "6"})
    assert out.split() == ["/dev/nvidia-caps/nvidia-cap1", "all"]
    for visible in ("0", "6:1"):
        out = user.start("box", "sh", "-c", f"{script} | cat", env={**environ, "NVIDIA_VISIBLE_DEVICES": visible})
        assert out.split() == []


@pytest.mark.parity("30-lxcfs")
def test_processors_and_memory_of_lxcfs(user: User, box: pathlib.Path) -> None:
    """The same mount file works without lxcfs and with it."""
    extra(user, "30-lxcfs.fstab", "mounts.d")
    fstab = user.home / "etc/mounts.d/30-lxcfs.fstab"
    lxcfs = user.home / "lxcfs"
    fstab.write_text(fstab.read_text().replace("/var/lib/lxcfs", str(lxcfs)))
    before = user.start("box", "cat", "/proc/meminfo")
    assert before.startswith("MemTotal")
    (lxcfs / "proc").mkdir(parents=True)
    (lxcfs / "proc/meminfo").write_text("MemTotal: 7 kB\n")
    assert user.start("box", "cat", "/proc/meminfo") == "MemTotal: 7 kB\n"
    assert user.start("box", "cat", "/proc/cpuinfo")


def test_python_hook_of_the_site(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    extra(user, "50-sharp.py", "hooks.d")
    environ = {"SLURM_NETWORK": "sharp", "MELLANOX_VISIBLE_DEVICES": "all", "SLURM_STEP_NUM_NODES": "2"}
    out = user.start("box", "env", env=environ)
    assert {"NCCL_COLLNET_ENABLE=1", "NCCL_SHARP_GROUP_SIZE_THRESH=2"} <= set(out.splitlines())


def test_ten_starts_at_once(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
    script = "for i in 1 2 3 4 5 6 7 8 9 10; do penroot start box loader libcuda.so.1 & done; wait"
    out = user.run("sh", "-c", script, env={"NVIDIA_VISIBLE_DEVICES": "all"}).stdout
    assert out.splitlines() == ["libcuda.so.1 loaded"] * 10


def test_writable_container_starts_with_another_driver(user: User, dgx: FakeHost, box: pathlib.Path) -> None:
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
