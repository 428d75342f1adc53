"""GPUs of AMD and Intel, and Gaudi: which there are, which a container gets, and what of the host it needs for them.

GPUs count in the order of their render nodes, as they do in gres.conf. Others than the selected ones are not there at
all: ROCm fails as a whole where one cannot be opened with EACCES, and passes over it where there is no node. Sources:
the kernel's ABI documentation of sysfs, KFD's topology; ROCR-Runtime, topology_sysfs_check_node_supported(); ROCm, "GPU
isolation techniques"; Intel Gaudi, "Multiple Dockers Each with a Single Workload".
"""

from __future__ import annotations

import os

from enroot_py.base import ldcache, log
from enroot_py.base.errors import HookError
from enroot_py.base.frozen import Frozen
from enroot_py.features.devices import allocation
from enroot_py.runtime.edits import Edits, Host, add_library, bits, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from enroot_py.runtime.hooks import Context

_KFD = "/sys/class/kfd/kfd/topology/nodes"
_FIRST_RENDER = 128  # the minor of the first render node: the kernel's drm_drv.c


class Accelerator(Frozen):
    """One device: the number in the name of its main node, its nodes, and its UUID where the driver tells that."""

    number: int
    nodes: tuple[str, ...]
    uuid: str = ""


class Vendor(Frozen):
    """What is different from vendor to vendor.

    ``visible`` is the variable by which an image or its user selects devices, ``masks`` are those by which Slurm tells
    tasks which are theirs. Of the host's libraries, by how their names begin, an image gets those that it lacks, unless
    it has ``main``.
    """

    name: str
    ids: tuple[bytes, ...]  # of PCI, as sysfs has them
    folder: str
    prefix: str  # of the main nodes in that folder
    common: tuple[str, ...]
    visible: str
    masks: tuple[str, ...]
    main: str
    libraries: tuple[bytes, ...]
    directories: tuple[str, ...]
    files: tuple[str, ...] = ()
    stacked: bool = False  # whether later masks count what the first one leaves


VENDORS = (
    Vendor(
        name="amd.com/gpu",
        ids=(b"0x1002",),
        folder="/dev/dri",
        prefix="renderD",
        common=("/dev/kfd",),
        visible="AMD_VISIBLE_DEVICES",
        masks=("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES"),
        main="libhsa-runtime64.so.1",
        libraries=(
            *(
                b"libhsa-runtime64.so",
                b"libamdhip64.so",
                b"libhiprtc",
                b"libamd_comgr.so",
                b"librocprofiler-register.so",
            ),
            *(b"libamdocl64.so", b"librocm_smi64.so", b"libamd_smi.so", b"libdrm_amdgpu.so", b"libdrm.so"),
        ),
        directories=("/opt/rocm/lib", "/opt/rocm/lib64", "/opt/amdgpu/lib/{machine}-linux-gnu", "/opt/amdgpu/lib64"),
        files=("/etc/OpenCL/vendors/amdocl64.icd",),
        stacked=True,
    ),
    Vendor(
        name="intel.com/gpu",
        ids=(b"0x8086",),
        folder="/dev/dri",
        prefix="renderD",
        common=(),
        visible="",
        masks=("ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL"),
        main="libze_intel_gpu.so.1",
        libraries=(
            *(b"libze_loader.so", b"libze_validation_layer.so", b"libze_tracing_layer.so", b"libze_intel_gpu.so"),
            *(b"libigdrcl.so", b"libigdgmm.so", b"libigc.so", b"libigdfcl.so", b"libiga64.so", b"libopencl-clang.so"),
        ),
        directories=("/usr/lib/{machine}-linux-gnu/intel-opencl", "/usr/lib64/intel-opencl"),
        files=("/etc/OpenCL/vendors/intel.icd",),
    ),
    Vendor(
        name="habana.ai/gaudi",
        ids=(b"0x1da3",),
        folder="/dev/accel",
        prefix="accel",
        common=(),
        visible="HABANA_VISIBLE_DEVICES",
        masks=(),
        main="libSynapse.so",
        libraries=(b"libSynapse", b"libhl-thunk.so", b"libhl_logger.so", b"libscal.so", b"libhcl.so", b"libhlml.so"),
        directories=("/usr/lib/habanalabs",),
    ),
)


def found(host: Host, vendor: Vendor) -> list[Accelerator]:
    """The devices of a vendor, those too that the device cgroup keeps from this process, in their order."""
    kind = "accel" if vendor.folder == "/dev/accel" else "drm"
    numbers = {}
    for name in host.list(f"/sys/class/{kind}"):
        number = name.removeprefix(vendor.prefix)
        if name.startswith(vendor.prefix) and number.isdecimal() and _is_of(host, vendor, f"/sys/class/{kind}/{name}"):
            numbers[int(number)] = ""
    if vendor.common:
        numbers.update(_of_kfd(host))
    return [Accelerator(number, _nodes(host, vendor, number), numbers[number]) for number in sorted(numbers)]


def _range(word: str) -> range:
    """The places that a word names, as 2 and 2-5 do; none where it is another word, or longer than any."""
    first, dash, last = word.partition("-")
    is_range = bool(first and (last or not dash)) and (first + last).isdecimal() and len(word) < 16
    return range(int(first), int(last or first) + 1) if is_range else range(0)


def _is_of(host: Host, vendor: Vendor, path: str) -> bool:
    return host.read(f"{path}/device/vendor").strip() in vendor.ids


def _of_kfd(host: Host) -> dict[int, str]:
    """The render minors of AMD's GPUs, and of the parts of those that are partitioned, with their UUIDs."""
    gpus = {}
    for node in host.list(_KFD):
        lines = host.read(f"{_KFD}/{node}/properties").decode("ascii", "replace").splitlines()
        values = dict(line.split(" ", 1) for line in lines if line.count(" ") == 1)
        minor, unique = values.get("drm_render_minor", ""), values.get("unique_id", "")
        if minor.isdecimal() and int(minor) >= _FIRST_RENDER:
            gpus[int(minor)] = f"GPU-{int(unique):016x}" if unique.isdecimal() and int(unique) else ""
    return gpus


def _nodes(host: Host, vendor: Vendor, number: int) -> tuple[str, ...]:
    """The nodes of one device: that which computes, and those beside it."""
    main = f"{vendor.folder}/{vendor.prefix}{number}"
    if vendor.folder == "/dev/accel":
        control = f"/dev/accel/accel_controlD{number}"
        return (main, control) if host.exists(control) else (main,)
    names = host.list(f"/sys/class/drm/{vendor.prefix}{number}/device/drm")
    return tuple(dict.fromkeys([main, *(f"/dev/dri/{name}" for name in names if host.exists(f"/dev/dri/{name}"))]))


class VendorPlan:
    """What a container needs of one vendor's devices."""

    def __init__(self, context: Context, vendor: Vendor, visible: str) -> None:
        self.context = context
        self.vendor = vendor
        self.visible = visible
        self.host = Host.of(context.host)
        self.all = found(self.host, vendor)
        self.edits = Edits("98-accelerators")

    def made(self, allocated: str) -> Edits:
        """What the container needs, where Slurm has ``allocated`` devices by their numbers. Raises HookError."""
        if not self.all:
            if self.visible not in ("", "all", "none") and self.vendor.visible in self.context.host:
                hint = f"unset {self.vendor.visible} to start without"
                raise HookError(f"{self._origin}: {os.uname().nodename} has no such device", hint=hint)
            return self.edits
        selected = self._of_slurm(allocated) if allocated else self._asked()
        for node in self.vendor.common if selected else ():
            self.edits.node(self.host, node)
        for device in selected:
            if not self.edits.node(self.host, device.nodes[0]):
                message = f"{self.vendor.name}: {self.host.path(device.nodes[0])} does not exist"
                raise HookError(message, hint=f"the driver of {os.uname().nodename} makes it: see dmesg")
            for node in device.nodes[1:]:
                self.edits.node(self.host, node)
        if len(selected) < len(self.all):
            self._hide_others(selected)
        if selected:
            self._add_libraries()
        return self.edits

    @property
    def _origin(self) -> str:
        return shown(f"{self.vendor.visible}={self.visible}")

    def _of_slurm(self, allocated: str) -> list[Accelerator]:
        """The devices of all tasks of the step; all where that cannot be known, of which the device cgroup keeps some.

        PENROOT_GPUS is set in the container where its tasks are told numbers that count others too, and with
        PENROOT_GPU_KIND where some of these numbers have to count among others of them: pyxis_py/node/gpus.py.
        """
        caller = self.context.host
        told = next((caller[name] for name in self.vendor.masks if caller.get(name)), "")
        masks = [word for word in told.split(",") if word]
        numbers, counts_all = allocation.shared(caller, allocated, masks) or ([], False)
        devices = {number: device for number in numbers for device in self.all if self._is_number(device, number)}
        if counts_all and any(name in self.context.environ for name in self.vendor.masks):
            return self.all  # somebody has said what it is inside, and the tasks are not told another
        if not devices or len(devices) != len(numbers):
            devices, counts_all = {str(place): device for place, device in enumerate(self.all)}, False
        inside = sorted(devices, key=lambda number: devices[number].number)
        if counts_all or self.vendor.stacked:
            counted = inside if counts_all else map(str, range(len(inside)))
            self.context.environ["PENROOT_GPUS"] = ",".join(counted)
            self.context.environ["PENROOT_GPU_KIND"] = self.vendor.name
        if self.visible not in ("", "all", "none"):
            log.warn(f"{self._origin} is ignored: the step has {allocated}")
        return [devices[number] for number in inside]

    def _is_number(self, device: Accelerator, number: str) -> bool:
        """Whether Slurm's number means a device: its place, or what its node is called, as Slurm before 21.08 says."""
        if not number.isdecimal():
            return False
        if self.vendor.prefix == "renderD" and int(number) >= _FIRST_RENDER:
            return device.number == int(number)
        return self.all.index(device) == int(number)

    def _asked(self) -> list[Accelerator]:
        """What the variable names: all, none, places, ranges of those, UUIDs. Raises HookError."""
        words = [word.strip() for word in self.visible.split(",") if word.strip() not in ("", "none")]
        if "all" in words:
            return self.all
        chosen: dict[int, Accelerator] = {}
        for word in words:
            places = _range(word)
            devices = [device for place, device in enumerate(self.all) if place in places]
            if not places:
                devices = [device for device in self.all if device.uuid and device.uuid.lower() == word.lower()]
            if not devices or len(devices) < len(places):
                there = ", ".join(f"{at} ({d.uuid})" if d.uuid else str(at) for at, d in enumerate(self.all))
                message = f"{self._origin}: no device {shown(word)!r} on {os.uname().nodename}"
                raise HookError(message, hint=f"it has {there}")
            chosen.update({device.number: device for device in devices})
        return [chosen[number] for number in sorted(chosen)]

    def _hide_others(self, selected: list[Accelerator]) -> None:
        """Leave in the folder what is selected, and what is of nobody here, as a card that only has a display."""
        hidden = {node for device in self.all if device not in selected for node in device.nodes}
        self.edits.emptied.append(self.vendor.folder)
        for name in self.host.list(self.vendor.folder):
            path = f"{self.vendor.folder}/{name}"
            if path not in hidden and name != "by-path":
                self.edits.node(self.host, path)
        links = f"{self.vendor.folder}/by-path"  # where Level Zero looks
        for name in self.host.list(links):
            target = os.readlink(self.host.path(f"{links}/{name}"))  # udev makes nothing else here
            if f"{self.vendor.folder}/{target.removeprefix('../')}" not in hidden:
                self.edits.links[f"{links}/{name}"] = target

    # -- libraries

    def _add_libraries(self) -> None:
        """Those of the host that the image lacks, if it lacks the main one."""
        there = set(self._of_image())
        if self.vendor.main in there:
            return
        libraries = dict(self._of_host())
        if self.vendor.main not in libraries:
            return
        for name, library in libraries.items():
            if name not in there:
                add_library(self.edits, self.host, self.context, library)
        for path in self.vendor.files:
            if not self.context.exists(path):
                self.edits.file(self.host, path)

    def _directories(self) -> list[str]:
        return [directory.format(machine=os.uname().machine) for directory in self.vendor.directories]

    def _of_image(self) -> Iterator[str]:
        """Names of the vendor's libraries that the image has: in its loader's cache, or where they belong."""
        parts = tuple(self.vendor.libraries)
        try:
            yield from (name for _, name, _ in ldcache.find(self.context.read("/etc/ld.so.cache"), parts))
        except ldcache.DAMAGE:
            pass  # they may be in a directory all the same
        versions = [f"/opt/{name}/lib" for name in self.context.list("/opt") if name.startswith("rocm-")]
        usual = [f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64", "/usr/lib"]
        for directory in [*self._directories(), *versions, *usual]:
            yield from (name for name in self.context.list(directory) if name.startswith(self._prefixes))

    @property
    def _prefixes(self) -> tuple[str, ...]:
        return tuple(part.decode() for part in self.vendor.libraries)

    def _of_host(self) -> Iterator[tuple[str, ldcache.Library]]:
        """The vendor's libraries of the host, by the names that programs ask for."""
        try:
            known = ldcache.find(self.host.read("/etc/ld.so.cache"), self.vendor.libraries)
        except ldcache.DAMAGE:
            known = []
        bare = self.vendor.main.endswith(".so")  # and not libhsa-runtime64.so.1
        for directory in self._directories():
            for name in self.host.list(directory):
                asked_for = name.endswith(".so") if bare else len(name.rpartition(".so.")[2]) < 3
                if asked_for and name.startswith(self._prefixes):
                    yield name, (ldcache.NATIVE, name, f"{directory}/{name}")
        yield from ((name, library) for library in known if bits(library[0]) == 64 for name in (library[1],))
