"""Fake hosts with AMD GPUs, Intel GPUs or Gaudis: directory trees with device nodes and sysfs files."""

from __future__ import annotations

import pathlib

from tests.fakehost import TRIPLET, FakeHost

MI300X = 8
BUSES = ("05", "15", "65", "75", "85", "95", "e5", "f5")
_ROCM = {
    "libhsa-runtime64.so.1.14.0": "libhsa-runtime64.so.1",
    "libamdhip64.so.6.2.41134": "libamdhip64.so.6",
    "libamd_comgr.so.2.8.0": "libamd_comgr.so.2",
    "librocm_smi64.so.7.3.0": "librocm_smi64.so.7",
}
_LEVEL_ZERO = {"libze_intel_gpu.so.1.3.29735": "libze_intel_gpu.so.1", "libze_loader.so.1.17.6": "libze_loader.so.1"}


def unique_id(number: int) -> int:
    return 0x9F2B_0000_0000_0000 + number


def uuid(number: int) -> str:
    """Format a UUID as rocminfo does."""
    return f"GPU-{unique_id(number):016x}"


def _drm(host: FakeHost, render: int, card: int, bus: str, vendor: str) -> None:
    """Add a GPU: nodes, sysfs directories and udev's links."""
    device = f"sys/devices/pci0000:00/0000:{bus}:00.0"
    host.file(f"/{device}/vendor", f"{vendor}\n")
    for name, minor in ((f"card{card}", card), (f"renderD{render}", render)):
        host.node(f"/dev/dri/{name}", 226, minor)
        host.file(f"/{device}/drm/{name}/uevent", f"MAJOR=226\nMINOR={minor}\nDEVNAME=dri/{name}\n")
        host.directory("sys/class/drm", "dev/dri/by-path")
        (host.root / f"sys/class/drm/{name}").symlink_to(f"../../../{device}/drm/{name}")
        (host.root / device / "drm" / name / "device").symlink_to("../..")
        kind = "card" if name.startswith("card") else "render"
        (host.root / f"dev/dri/by-path/pci-0000:{bus}:00.0-{kind}").symlink_to(f"../{name}")


def _display(host: FakeHost) -> None:
    """Add the display-only card of a BMC."""
    device = "sys/devices/pci0000:00/0000:c2:00.0"
    host.file(f"/{device}/vendor", "0x1a03\n")
    host.node("/dev/dri/card0", 226, 0)
    host.file(f"/{device}/drm/card0/uevent", "DEVNAME=dri/card0\n")
    host.directory("sys/class/drm")
    (host.root / "sys/class/drm/card0").symlink_to(f"../../../{device}/drm/card0")


def _libraries(host: FakeHost, directory: str, names: dict[str, str]) -> None:
    for file, soname in names.items():
        host.library(f"{directory}/{file}", soname)
        if soname != file:
            (host.root / directory.lstrip("/") / soname).symlink_to(file)


def mi300x(root: pathlib.Path, *, readable: tuple[int, ...] = tuple(range(MI300X))) -> FakeHost:
    """Build a host with eight MI300X, two CPUs and a BMC.

    KFD shows the properties of the ``readable`` GPUs only, as if a device cgroup denied the others.
    """
    host = FakeHost(root)
    host.standard_nodes()
    host.node("/dev/kfd", 240, 0)
    _display(host)
    topology = "/sys/class/kfd/kfd/topology/nodes"
    for cpu in range(2):
        host.file(f"{topology}/{cpu}/gpu_id", "0\n")
        host.file(f"{topology}/{cpu}/properties", "cpu_cores_count 96\nsimd_count 0\nvendor_id 0\ndrm_render_minor 0\n")
    for number, bus in enumerate(BUSES):
        _drm(host, 128 + number, 1 + number, bus, "0x1002")
        text = f"cpu_cores_count 0\nsimd_count 1216\nvendor_id 4098\ndrm_render_minor {128 + number}\n"
        text += f"unique_id {unique_id(number)}\n"
        properties = host.file(f"{topology}/{2 + number}/properties", text if number in readable else "")
        assert properties.exists()
    _libraries(host, "/opt/rocm-6.2.4/lib", _ROCM)
    (host.root / "opt/rocm").symlink_to("rocm-6.2.4")
    host.file("/etc/OpenCL/vendors/amdocl64.icd", "libamdocl64.so\n")
    return host


def ponte_vecchio(root: pathlib.Path) -> FakeHost:
    """Build a host with six Data Center GPU Max 1550 and a BMC."""
    host = FakeHost(root)
    host.standard_nodes()
    _display(host)
    for number in range(6):
        _drm(host, 128 + number, 1 + number, f"{0x18 + 16 * number:02x}", "0x8086")
    _libraries(host, f"/usr/lib/{TRIPLET}", _LEVEL_ZERO)
    host.ldconfig("", f"/usr/lib/{TRIPLET}")
    host.file("/etc/OpenCL/vendors/intel.icd", "/usr/lib/intel-opencl/libigdrcl.so\n")
    return host


def gaudi(root: pathlib.Path) -> FakeHost:
    """Build a host with eight Gaudi 2, and an Intel NPU, which has the same kind of device node."""
    host = FakeHost(root)
    host.standard_nodes()
    for number in range(9):
        vendor = "0x1da3" if number < 8 else "0x8086"
        device = f"sys/devices/pci0000:00/0000:{0x30 + number:02x}:00.0"
        host.file(f"/{device}/vendor", f"{vendor}\n")
        host.node(f"/dev/accel/accel{number}", 261, number)
        host.directory("sys/class/accel", f"{device}/accel/accel{number}")
        (host.root / f"sys/class/accel/accel{number}").symlink_to(f"../../../{device}/accel/accel{number}")
        (host.root / device / f"accel/accel{number}/device").symlink_to("../..")
        if number < 8:
            host.node(f"/dev/accel/accel_controlD{number}", 261, 64 + number)
    _libraries(host, "/usr/lib/habanalabs", {"libSynapse.so": "libSynapse.so", "libhl-thunk.so": "libhl-thunk.so"})
    return host
