"""Fake hosts with GPUs and HCAs: directory trees with the files of drivers that penroot reads to find devices.

Shared libraries are real, compiled here, and ldconfig writes the loader's cache. For root, device nodes are real nodes
of drivers that are not loaded: opening one gives ENXIO, not EACCES.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import pwd
import runpy
import stat
import subprocess
import tempfile
from typing import Any

from enroot_py.config.settings import load
from enroot_py.runtime.hooks import OURS, Caller, Context

VERSION = "535.104.05"
TRIPLET = f"{os.uname().machine}-linux-gnu"
BUSES = ("07", "0f", "47", "4e", "87", "90", "b7", "bd")  # PCI addresses in a DGX A100
MINORS = (2, 3, 0, 1, 6, 7, 4, 5)  # the driver has not probed the GPUs in the order of their addresses
MIG_GPUS = (6, 7)  # indexes of the GPUs with MIG devices
# Libraries that a driver of this branch installs, and the suffix of each soname.
LIBRARIES = {
    "libcuda": 1, "libcudadebugger": 1, "libnvidia-ml": 1, "libnvidia-cfg": 1, "libnvidia-opencl": 1,
    "libnvidia-ptxjitcompiler": 1, "libnvidia-allocator": 1, "libnvidia-nvvm": 4, "libnvidia-encode": 1,
    "libnvidia-opticalflow": 1, "libnvcuvid": 1, "libvdpau_nvidia": 1, "libnvidia-fbc": 1, "libnvoptix": 1,
    "libGLX_nvidia": 0, "libEGL_nvidia": 0, "libGLESv2_nvidia": 2, "libGLESv1_CM_nvidia": 1, "libnvidia-ngx": 1,
    "libnvidia-sandboxutils": 1, "libnvidia-vksc-core": 1,
}  # fmt: skip
# Libraries whose soname is the file's name.
INTERNAL = (
    "libnvidia-eglcore",
    "libnvidia-glcore",
    "libnvidia-tls",
    "libnvidia-glsi",
    "libnvidia-rtcore",
    "libnvidia-glvkspirv",
    "libnvidia-compiler",
    "libnvidia-gpucomp",
    "libnvidia-present",
)
# Libraries whose version is independent of the driver's: the suffixes of the file's name and of the soname.
OWN = {"libnvidia-nvvm70": ("4", "4"), "libnvidia-egl-wayland2": ("1.0.1", "1"), "libnvidia-api": ("1", "1")}
_LONGEST = "libXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXX.so.1"

_NVML = """
/* The functions of NVML that describe MIG devices, for two GPUs of a fake host. */
#include <stdio.h>
#include <string.h>
struct mig { const char *bus; unsigned number, gi, ci; const char *uuid; };
static struct mig migs[] = { MIGS };
static const unsigned count = sizeof migs / sizeof *migs;
static const char *buses[] = { BUSES };
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **gpu)
{
	for (unsigned i = 0; i < sizeof buses / sizeof *buses; i++)
		if (strcmp(bus, buses[i]) == 0) {
			*gpu = (void *)buses[i];
			return 0;
		}
	return 6;
}
int nvmlDeviceGetMigMode(void *gpu, unsigned *current, unsigned *pending)
{
	*current = 0;
	for (unsigned i = 0; i < count; i++)
		*current |= strcmp(gpu, migs[i].bus) == 0;
	*pending = *current;
	return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *gpu, unsigned *most)
{
	(void)gpu;
	*most = 7;
	return 0;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *gpu, unsigned number, void **mig)
{
	for (unsigned i = 0; i < count; i++)
		if (strcmp(gpu, migs[i].bus) == 0 && migs[i].number == number) {
			*mig = &migs[i];
			return 0;
		}
	return 6;
}
int nvmlDeviceGetCount_v2(unsigned *devices)
{
	*devices = sizeof buses / sizeof *buses;
	return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu)
{
	*gpu = (void *)buses[index];
	return 0;
}
static unsigned index_of(void *gpu)
{
	unsigned index = 0;
	while (buses[index] != gpu)
		index++;
	return index;
}
int nvmlDeviceGetMinorNumber(void *gpu, unsigned *minor)
{
	static const unsigned minors[] = { MINORS };
	*minor = minors[index_of(gpu)];
	return 0;
}
int nvmlDeviceGetUUID(struct mig *mig, char *uuid, unsigned size)
{
	if (mig >= migs && mig < migs + count)
		snprintf(uuid, size, "%s", mig->uuid);
	else
		snprintf(uuid, size, UUID, index_of(mig));
	return 0;
}
int nvmlDeviceGetGpuInstanceId(struct mig *mig, unsigned *id)
{
	*id = mig->gi;
	return 0;
}
int nvmlDeviceGetComputeInstanceId(struct mig *mig, unsigned *id)
{
	*id = mig->ci;
	return 0;
}
"""


def compiled(source: str, soname: str, *options: str) -> bytes:
    """Compile a small shared library."""
    link = ["gcc", "-shared", "-fPIC", *options, f"-Wl,-soname,{soname}", "-x", "c", "-"]
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run([*link, "-o", out.name], input=source, text=True, check=True)
        return pathlib.Path(out.name).read_bytes()


@functools.cache
def _library() -> bytes:
    source = "const char *fake(void) { return __FILE__; } int cuInit(unsigned f) { return f ? 1 : 0; }\n"
    return compiled(source, _LONGEST, "-nostdlib")


@functools.cache
def _nvml() -> bytes:
    table = ", ".join(
        f'{{"0000:{BUSES[i]}:00.0", {n}, {gi}, {ci}, "{mig_uuid(i, n)}"}}'
        for i in MIG_GPUS
        for n, (gi, ci) in enumerate(MIGS)
    )
    source = _NVML.replace("MIGS", table).replace("BUSES", ", ".join(f'"0000:{bus}:00.0"' for bus in BUSES))
    source = source.replace("MINORS", ", ".join(map(str, MINORS))).replace("UUID,", f'"GPU-%08x{uuid(0)[12:]}",')
    return compiled(source, "libnvidia-ml.so.1")


class FakeHost:
    """A fake host's tree; the functions below build whole hosts."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.version = VERSION
        self.gpus: list[tuple[int, int]] = []  # index, and minor number of the device node
        self.driver_root = ""
        self.libraries = ""
        self.directory(*"dev proc/driver sys/class etc run usr/bin var".split())
        (root / "var/run").symlink_to("/run")

    def directory(self, *paths: str) -> None:
        for path in paths:
            (self.root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def file(self, path: str, text: str = "") -> pathlib.Path:
        made = self.root / path.lstrip("/")
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(text)
        return made

    def node(self, path: str, major: int, minor: int, mode: int = 0o666) -> None:
        """Create a device node, or an empty regular file if the caller is not root."""
        made = self.root / path.lstrip("/")
        made.parent.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            os.mknod(made, stat.S_IFCHR | mode, os.makedev(major, minor))
        else:
            made.touch()
        made.chmod(mode)

    def standard_nodes(self) -> None:
        """Add the devices that every program expects in /dev."""
        for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
            self.node(f"/dev/{name}", 1, minor)
        self.node("/dev/tty", 5, 0)
        self.directory("dev/shm", "dev/pts")

    def gpu(self, index: int, bus: str, minor: int, model: str = "NVIDIA A100-SXM4-40GB") -> None:
        self.gpus.append((index, minor))
        self.node(f"/dev/nvidia{minor}", 195, minor)
        text = (
            f"Model: \t\t {model}\nIRQ:   \t\t 123\nGPU UUID: \t {uuid(index)}\nVideo BIOS: \t 92.00.19.00.01\n"
            f"Bus Type: \t PCIe\nDMA Size: \t 47 bits\nDMA Mask: \t 0x7fffffffffff\nBus Location: \t 0000:{bus}:00.0\n"
            f"Device Minor: \t {minor}\nGPU Firmware: \t {self.version}\nGPU Excluded:\t No\n"
        )
        self.file(f"/proc/driver/nvidia/gpus/0000:{bus}:00.0/information", text)

    def driver(self, where: str = "", libraries: str = f"/usr/lib/{TRIPLET}", *, cache: bool = True) -> None:
        """Install the driver's user-space part beneath ``where``."""
        self.driver_root, self.libraries = where, libraries
        module = "NVIDIA UNIX x86_64 Kernel Module"
        text = f"NVRM version: {module}  {self.version}  Sat Aug 19 01:15:15 UTC 2023\nGCC version: gcc 12.2.0\n"
        self.file("/proc/driver/nvidia/version", text)
        for minor, name in ((255, "nvidiactl"), (254, "nvidia-modeset")):
            self.node(f"/dev/{name}", 195, minor)
        for minor, name in enumerate(("nvidia-uvm", "nvidia-uvm-tools")):
            self.node(f"/dev/{name}", 508, minor)
        for number, name in enumerate(("config", "monitor"), 1):
            self.node(f"/dev/nvidia-caps/nvidia-cap{number}", 509, number, 0o400 if number == 1 else 0o444)
            self.file(f"/proc/driver/nvidia/capabilities/mig/{name}", f"DeviceFileMinor: {number}\n")
        for program in ("nvidia-smi", "nvidia-debugdump", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
            self.file(f"{where}/usr/bin/{program}", f"#!/bin/sh\necho fake {program}\n").chmod(0o755)
        self.file(f"{where}/etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1\n")
        self.file(f"{where}/lib/firmware/nvidia/{self.version}/gsp_ga10x.bin", "firmware")
        made = self._compile(where, libraries)
        if cache:
            self.ldconfig(where, libraries)
        else:
            for file, soname in made.items():
                if file != soname:
                    (self.root / where.lstrip("/") / libraries.lstrip("/") / soname).symlink_to(file)

    def _compile(self, where: str, libraries: str) -> dict[str, str]:
        directory = self.root / where.lstrip("/") / libraries.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        content = _library()
        made = {f"{name}.so.{self.version}": f"{name}.so.{end}" for name, end in LIBRARIES.items()}
        made |= {f"{name}.so.{self.version}": f"{name}.so.{self.version}" for name in INTERNAL}
        made |= {f"{name}.so.{end}": f"{name}.so.{soname}" for name, (end, soname) in OWN.items()}
        for file, soname in made.items():
            if not file.startswith("libnvidia-ml."):
                (directory / file).write_bytes(
                    content.replace(_LONGEST.encode(), soname.encode().ljust(len(_LONGEST), b"\0"))
                )
        (directory / f"libnvidia-ml.so.{self.version}").write_bytes(_nvml())
        return made

    def ldconfig(self, where: str, libraries: str) -> None:
        tree = self.root / where.lstrip("/")
        (tree / "etc").mkdir(parents=True, exist_ok=True)
        (tree / "etc/ld.so.conf").write_text(f"{libraries}\n")
        as_root = [] if os.geteuid() == 0 else ["unshare", "-r"]
        subprocess.run([*as_root, "/sbin/ldconfig", "-r", str(tree)], check=True, stderr=subprocess.DEVNULL)

    def library(self, path: str, soname: str, *options: str) -> None:
        """Create an empty shared library."""
        made = self.root / path.lstrip("/")
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_bytes(compiled("", soname, "-nostdlib", *options))

    def mig(self) -> None:
        """Create MIG devices on the last two GPUs, and the table of all possible MIG devices."""
        lines = ["config 1", "monitor 2"]
        number = 2
        for minor in range(len(BUSES)):
            for gi in range(15):
                number += 1
                lines.append(f"gpu{minor}/gi{gi}/access {number}")
                for ci in range(8):
                    number += 1
                    lines.append(f"gpu{minor}/gi{gi}/ci{ci}/access {number}")
        self.file("/proc/driver/nvidia-caps/mig-minors", "\n".join(lines) + "\n")
        for index in MIG_GPUS:
            for gi, ci in MIGS:
                minor = MINORS[index]
                self.cap(minor, gi)
                self.cap(minor, gi, ci)

    def cap(self, gpu: int, gi: int, ci: int | None = None) -> None:
        number = cap_number(gpu, gi, ci)
        self.node(f"/dev/nvidia-caps/nvidia-cap{number}", 509, number, 0o444)
        below = f"gi{gi}" if ci is None else f"gi{gi}/ci{ci}"
        self.file(f"/proc/driver/nvidia/capabilities/gpu{gpu}/mig/{below}/access", f"DeviceFileMinor: {number}\n")

    def hca(self, number: int, bus: str, driver: str = "mlx5_core", *, mad: bool = True) -> None:
        """Create one InfiniBand device in sysfs and /dev."""
        address = f"0000:{bus}" if "." in bus else f"0000:{bus}:00.0"
        device = f"sys/devices/pci0000:00/{address}"
        name = f"{driver.partition('_')[0]}_{number}"
        self.node(f"/dev/infiniband/uverbs{number}", 231, 192 + number)
        entries = [("infiniband", name, ""), ("infiniband_verbs", f"uverbs{number}", f"infiniband/uverbs{number}")]
        if mad:
            for kind, minor in (("umad", 0), ("issm", 64)):
                entries.append(("infiniband_mad", f"{kind}{number}", f"infiniband/{kind}{number}"))
                self.node(f"/dev/infiniband/{kind}{number}", 231, minor + number, 0o600)
        for subsystem, entry, node in entries:
            text = f"NAME={name}\n" if subsystem == "infiniband" else f"MAJOR=231\nMINOR=0\nDEVNAME={node}\n"
            self.file(f"{device}/{subsystem}/{entry}/uevent", text)
            if subsystem != "infiniband":
                self.file(f"{device}/{subsystem}/{entry}/ibdev", name + "\n")
            self.directory(f"sys/class/{subsystem}")
            (self.root / f"sys/class/{subsystem}/{entry}").symlink_to(f"../../../{device}/{subsystem}/{entry}")
        self.directory(f"sys/bus/pci/drivers/{driver}")
        (self.root / device / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
        for subsystem, entry, _ in entries:
            (self.root / device / subsystem / entry / "device").symlink_to("../..")
        (self.root / f"sys/bus/pci/drivers/{driver}/{address}").symlink_to(f"../../../../../{device}")

    def fabric(self, count: int = 10) -> None:
        """Create the HCAs of a DGX and their common files."""
        for number, bus in enumerate(("0c", "12", "4b", "54", "8d", "94", "ba", "cc", "e1", "e2")[:count]):
            self.hca(number, bus)
        self.node("/dev/infiniband/rdma_cm", 10, 58)
        for subsystem in ("infiniband_verbs", "infiniband_mad"):
            self.file(f"/sys/class/{subsystem}/abi_version", "6\n")

    def cdi(self, *, name: str = "nvidia.yaml", directory: str = "/etc/cdi") -> pathlib.Path:
        """Write a specification like nvidia-ctk's. For a GPU with MIG devices, it lists only the MIG devices."""
        devices = []
        every: set[str] = set()
        for index, minor in self.gpus:
            parts = self._migs_of(minor) if index in MIG_GPUS else []
            named = [((f"{index}:{n}", mig_uuid(index, n)), caps) for n, caps in enumerate(parts)]
            for names, caps in named or [((str(index), uuid(index)), [])]:
                nodes = [f"/dev/nvidia{minor}", *caps]
                every.update(nodes)
                devices += [(each, nodes) for each in names]
        devices.append(("all", sorted(every)))
        text = "---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n"
        for each, nodes in devices:
            text += f"- name: {repr(each) if each[0].isdigit() else each}\n  containerEdits:\n    deviceNodes:\n"
            text += "".join(f"    - path: {node}\n" for node in nodes)
        text += _COMMON.format(libraries=self.libraries)
        mounts = [f"{self.libraries}/{lib}.so.{self.version}" for lib in ("libcuda", "libnvidia-ml", "libnvcuvid")]
        mounts.append("/usr/bin/nvidia-smi")
        options = "    options:\n    - ro\n    - nosuid\n    - nodev\n    - bind\n"
        for path in mounts:
            text += f"  - containerPath: {path}\n    hostPath: {self.driver_root}{path}\n{options}"
        return self.file(f"{directory}/{name}", text)

    def _migs_of(self, minor: int) -> list[list[str]]:
        """Return the nodes of each MIG device of a GPU, without the node of the GPU itself."""
        if not (self.root / f"proc/driver/nvidia/capabilities/gpu{minor}/mig").exists():
            return []
        numbers = [(cap_number(minor, gi), cap_number(minor, gi, ci)) for gi, ci in MIGS]
        return [[f"/dev/nvidia-caps/nvidia-cap{number}" for number in pair] for pair in numbers]


_COMMON = """containerEdits:
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  - FROM_CDI=yes
  deviceNodes:
  - path: /dev/nvidia-modeset
  - path: /dev/nvidia-uvm
  - path: /dev/nvidia-uvm-tools
  - path: /dev/nvidiactl
  hooks:
  - hookName: createContainer
    path: /usr/bin/nvidia-ctk
    args:
    - nvidia-ctk
    - hook
    - create-symlinks
    - --link
    - libcuda.so.1::{libraries}/libcuda.so
  - hookName: createContainer
    path: /usr/bin/nvidia-ctk
    args:
    - nvidia-ctk
    - hook
    - update-ldcache
    - --folder
    - {libraries}
  mounts:
"""

MIGS = ((1, 0), (2, 0), (5, 1))  # GPU instance and compute instance of each MIG device


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-b60b-a624-bf14-0a1819cfda3b"


def mig_uuid(index: int, number: int) -> str:
    return f"MIG-{index:04x}{number:04x}-3c05-5d1e-a04e-39e1b1ed6e6d"


def cap_number(gpu: int, gi: int, ci: int | None = None) -> int:
    """Return the number of a node in /dev/nvidia-caps."""
    return 3 + gpu * 135 + gi * 9 + (0 if ci is None else 1 + ci)


def dgx_a100(root: pathlib.Path) -> FakeHost:
    """Build a host with 8 GPUs, two of them with MIG devices, 6 NVSwitches, 10 HCAs, and the files of GPUDirect."""
    host = FakeHost(root)
    host.standard_nodes()
    for index, (bus, minor) in enumerate(zip(BUSES, MINORS, strict=True)):
        host.gpu(index, bus, minor)
    host.driver()
    host.mig()
    for number in range(6):
        host.node(f"/dev/nvidia-nvswitch{number}", 506, number)
    host.node("/dev/nvidia-nvswitchctl", 506, 255)
    host.node("/dev/gdrdrv", 236, 0)
    host.node("/dev/knem", 10, 60)
    host.node("/dev/xpmem", 10, 61)
    host.node("/dev/nvidia-fs0", 235, 0)
    host.node("/dev/nvidia-caps-imex-channels/channel0", 510, 0)
    host.file("/etc/cufile.json", "{}\n")
    host.file("/run/nvidia-persistenced/socket")
    host.fabric()
    return host


def driver_container(root: pathlib.Path) -> FakeHost:
    """Build a host whose driver is in a separate container, as with Kubernetes' GPU operator."""
    host = FakeHost(root)
    host.standard_nodes()
    host.gpu(0, "07", 0)
    host.driver("/run/nvidia/driver")
    return host


def consumer(root: pathlib.Path) -> FakeHost:
    """Build a workstation with one card, whose loader does not know the driver's directory."""
    host = FakeHost(root)
    host.standard_nodes()
    host.gpu(0, "01", 0, "NVIDIA GeForce RTX 3090")
    host.driver(libraries="/usr/local/nvidia/lib64", cache=False)
    return host


def other_vendors(root: pathlib.Path) -> FakeHost:
    """Build a host with two AMD GPUs and an Intel GPU, which a CDI specification describes in part."""
    host = FakeHost(root)
    host.standard_nodes()
    host.node("/dev/kfd", 240, 0)
    for number in range(3):
        host.node(f"/dev/dri/card{number}", 226, number)
        host.node(f"/dev/dri/renderD{128 + number}", 226, 128 + number)
    host.directory("dev/dri/by-path")
    devices = [("amd.com/gpu", {str(n): ["/dev/kfd", f"/dev/dri/renderD{128 + n}"] for n in range(2)})]
    devices.append(("intel.com/gpu", {"card2": ["/dev/dri/card2", "/dev/dri/renderD130"]}))
    for kind, named in devices:
        spec = {
            "cdiVersion": "0.6.0",
            "kind": kind,
            "devices": [
                {"name": name, "containerEdits": {"deviceNodes": [{"path": path} for path in paths]}}
                for name, paths in named.items()
            ],
            "containerEdits": {"env": [f"VENDOR={kind}"]},
        }
        host.file(f"/etc/cdi/{kind.replace('/', '-')}.json", json.dumps(spec))
    return host


SYSTEM = """\
/proc      /proc     none   x-create=dir,rbind,rw,nosuid,nodev,noexec,rslave  0  -1
{host}/sys /sys      none   x-create=dir,rbind,ro,nosuid,nodev,noexec,rslave  0  -1
{host}/dev /dev      none   x-create=dir,rbind,rw,nosuid,noexec,rslave        0  -1
tmpfs      /tmp      tmpfs  x-create=dir,rw,nosuid,nodev,mode=755,slave       0  -1
tmpfs      /var/run  tmpfs  x-create=dir,rw,nosuid,nodev,mode=755,slave       0  -1
"""


def as_host(host: FakeHost, etc: pathlib.Path) -> dict[str, str]:
    """Give containers the /dev and /sys of ``host``: write system mounts to ``etc``, and return variables."""
    (etc / "mounts.d").mkdir(parents=True)
    (etc / "mounts.d/10-system.fstab").write_text(SYSTEM.format(host=host.root))
    return {"PENROOT_HOST_ROOT": str(host.root)}


class Root(int):
    """A directory's descriptor, closed when the object is deleted."""

    def __del__(self) -> None:
        os.close(self)


def context(host: FakeHost, container: pathlib.Path, caller: dict[str, str], image: dict[str, str]) -> Context:
    """Return the context of a hook for the root ``container`` on a fake host."""
    root = Root(os.open(container, os.O_PATH | os.O_DIRECTORY))
    environ = {"HOME": str(container), "ENROOT_SYSCONF_PATH": str(container / "none"), **caller}
    settings = load(environ)
    caller = Caller(host={**environ, "PENROOT_HOST_ROOT": str(host.root)}, user=pwd.getpwuid(os.geteuid()))
    return Context(root, "", settings, image, caller)


def hook(name: str) -> dict[str, Any]:
    """Return the functions of one of our hooks."""
    return runpy.run_path(next(path for directory in OURS if os.path.exists(path := f"{directory}/{name}")))
