"""Find AMD GPUs, Intel GPUs and Gaudi devices, select a container's devices, and add the host's libraries for them.

GPUs are numbered in the order of their render nodes, as in gres.conf. Unselected GPUs have no node in the container:
ROCm skips a GPU without a node, but fails altogether if opening a node returns EACCES. Sources: the kernel's ABI
documentation of sysfs, KFD's topology; ROCR-Runtime, topology_sysfs_check_node_supported(); ROCm, "GPU isolation
techniques"; Intel Gaudi, "Multiple Dockers Each with a Single Workload".
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
_FIRST_RENDER = 128  # minor number of the first render node: the kernel's drm_drv.c


class Accelerator(Frozen):
    """One device. ``number`` is the number in the name of its main node, which ``nodes`` lists first."""

    number: int
    nodes: tuple[str, ...]
    uuid: str = ""  # if the driver reports it


class Vendor(Frozen):
    """The devices, variables and libraries of one vendor.

    ``visible`` is the variable by which the image or the user selects devices. Slurm sets the variables ``masks`` to
    the devices of a task. If the image lacks the library ``main``, it gets the host's libraries whose names
    begin with one of ``libraries``, except those that it has.
    """

    name: str
    ids: tuple[bytes, ...]  # PCI vendor IDs as sysfs prints them
    folder: str
    prefix: str  # of the main nodes' names in ``folder``
    common: tuple[str, ...]
    visible: str
    masks: tuple[str, ...]
    main: str
    libraries: tuple[bytes, ...]
    directories: tuple[str, ...]
    files: tuple[str, ...] = ()
    stacked: bool = False  # the numbers in a later mask count only the devices that the first mask selects


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


def find_devices(host: Host, vendor: Vendor) -> list[Accelerator]:
    """Return a vendor's devices by number, including devices that the device cgroup denies to this process."""
    kind = "accel" if vendor.folder == "/dev/accel" else "drm"
    numbers = {}
    for name in host.list(f"/sys/class/{kind}"):
        number = name.removeprefix(vendor.prefix)
        if (
            name.startswith(vendor.prefix)
            and number.isdecimal()
            and _has_vendor(host, vendor, f"/sys/class/{kind}/{name}")
        ):
            numbers[int(number)] = ""
    if vendor.common:
        numbers.update(_kfd_gpus(host))
    return [Accelerator(number, _nodes(host, vendor, number), numbers[number]) for number in sorted(numbers)]


def _range(word: str) -> range:
    """Parse an index or a range of indices, such as 2 or 2-5; return an empty range for anything else."""
    first, dash, last = word.partition("-")
    is_range = bool(first and (last or not dash)) and (first + last).isdecimal() and len(word) < 16
    return range(int(first), int(last or first) + 1) if is_range else range(0)


def _has_vendor(host: Host, vendor: Vendor, path: str) -> bool:
    return host.read(f"{path}/device/vendor").strip() in vendor.ids


def _kfd_gpus(host: Host) -> dict[int, str]:
    """Return the UUIDs of AMD GPUs, and of partitions of GPUs, by the minor number of the render node."""
    gpus = {}
    for node in host.list(_KFD):
        lines = host.read(f"{_KFD}/{node}/properties").decode("ascii", "replace").splitlines()
        values = dict(line.split(" ", 1) for line in lines if line.count(" ") == 1)
        minor, unique = values.get("drm_render_minor", ""), values.get("unique_id", "")
        if minor.isdecimal() and int(minor) >= _FIRST_RENDER:
            gpus[int(minor)] = f"GPU-{int(unique):016x}" if unique.isdecimal() and int(unique) else ""
    return gpus


def _nodes(host: Host, vendor: Vendor, number: int) -> tuple[str, ...]:
    """Return the nodes of one device: the compute node, then its display or control nodes."""
    main = f"{vendor.folder}/{vendor.prefix}{number}"
    if vendor.folder == "/dev/accel":
        control = f"/dev/accel/accel_controlD{number}"
        return (main, control) if host.exists(control) else (main,)
    names = host.list(f"/sys/class/drm/{vendor.prefix}{number}/device/drm")
    return tuple(dict.fromkeys([main, *(f"/dev/dri/{name}" for name in names if host.exists(f"/dev/dri/{name}"))]))


class VendorPlan:
    """Build the changes to a container (Edits) for one vendor's devices."""

    def __init__(self, context: Context, vendor: Vendor, visible: str) -> None:
        self.context = context
        self.vendor = vendor
        self.visible = visible
        self.host = Host.of(context.host)
        self.all = find_devices(self.host, vendor)
        self.edits = Edits("98-accelerators")

    def build(self, allocated: str) -> Edits:
        """Return the edits. ``allocated`` are the device numbers from Slurm, or "". Raises HookError."""
        if not self.all:
            if self.visible not in ("", "all", "none") and self.vendor.visible in self.context.host:
                hint = f"unset {self.vendor.visible} to start without devices"
                raise HookError(f"{self._origin}: {os.uname().nodename} has no such device", hint=hint)
            return self.edits
        selected = self._select_allocated(allocated) if allocated else self._select_visible()
        for node in self.vendor.common if selected else ():
            self.edits.node(self.host, node)
        for device in selected:
            if not self.edits.node(self.host, device.nodes[0]):
                message = f"{self.vendor.name}: {self.host.path(device.nodes[0])} does not exist"
                raise HookError(message, hint=f"the driver on {os.uname().nodename} creates it: check dmesg")
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

    def _select_allocated(self, allocated: str) -> list[Accelerator]:
        """Return the devices of the step's tasks. If they are unknown, return all: the device cgroup denies the rest.

        If the numbers in the tasks' masks count all devices of the node, or if the vendor's masks are stacked, the
        masks must be renumbered for the container. PENROOT_GPUS and PENROOT_GPU_KIND tell pyxis_py/node/gpus.py how.
        """
        caller = self.context.host
        mask = next((caller[name] for name in self.vendor.masks if caller.get(name)), "")
        masks = [word for word in mask.split(",") if word]
        numbers, counts_all = allocation.gpus_of_step(caller, allocated, masks) or ([], False)
        devices = {number: device for number in numbers for device in self.all if self._is_number(device, number)}
        if counts_all and any(name in self.context.environ for name in self.vendor.masks):
            return self.all  # the user or the image has set a mask, which keeps its numbers: add all devices
        if not devices or len(devices) != len(numbers):
            devices, counts_all = {str(index): device for index, device in enumerate(self.all)}, False
        ordered = sorted(devices, key=lambda number: devices[number].number)
        if counts_all or self.vendor.stacked:
            mask_numbers = ordered if counts_all else map(str, range(len(ordered)))
            self.context.environ["PENROOT_GPUS"] = ",".join(mask_numbers)
            self.context.environ["PENROOT_GPU_KIND"] = self.vendor.name
        if self.visible not in ("", "all", "none"):
            log.warn(f"{self._origin} is ignored: the devices of the step are {allocated}")
        return [devices[number] for number in ordered]

    def _is_number(self, device: Accelerator, number: str) -> bool:
        """Check whether ``number`` is Slurm's number of a device.

        Slurm's number is the index of the device. Before Slurm 21.08, it is the number in the name of the device node.
        """
        if not number.isdecimal():
            return False
        if self.vendor.prefix == "renderD" and int(number) >= _FIRST_RENDER:
            return device.number == int(number)
        return self.all.index(device) == int(number)

    def _select_visible(self) -> list[Accelerator]:
        """Return the devices that the variable names: all, none, indices, ranges, UUIDs. Raises HookError."""
        words = [word.strip() for word in self.visible.split(",") if word.strip() not in ("", "none")]
        if "all" in words:
            return self.all
        chosen: dict[int, Accelerator] = {}
        for word in words:
            indices = _range(word)
            devices = [device for index, device in enumerate(self.all) if index in indices]
            if not indices:
                devices = [device for device in self.all if device.uuid and device.uuid.lower() == word.lower()]
            if not devices or len(devices) < len(indices):
                known = ", ".join(f"{at} ({d.uuid})" if d.uuid else str(at) for at, d in enumerate(self.all))
                message = f"{self._origin}: no device {shown(word)!r} on {os.uname().nodename}"
                raise HookError(message, hint=f"available: {known}")
            chosen.update({device.number: device for device in devices})
        return [chosen[number] for number in sorted(chosen)]

    def _hide_others(self, selected: list[Accelerator]) -> None:
        """Hide the nodes of unselected devices. Keep nodes that belong to no accelerator, such as a display card's."""
        hidden = {node for device in self.all if device not in selected for node in device.nodes}
        self.edits.emptied.append(self.vendor.folder)
        for name in self.host.list(self.vendor.folder):
            path = f"{self.vendor.folder}/{name}"
            if path not in hidden and name != "by-path":
                self.edits.node(self.host, path)
        links = f"{self.vendor.folder}/by-path"  # Level Zero reads this directory
        for name in self.host.list(links):
            target = os.readlink(self.host.path(f"{links}/{name}"))  # udev creates only links here
            if f"{self.vendor.folder}/{target.removeprefix('../')}" not in hidden:
                self.edits.links[f"{links}/{name}"] = target

    # -- libraries

    def _add_libraries(self) -> None:
        """If the image lacks the main library, add it and the other host libraries that the image lacks."""
        image_libraries = set(self._image_libraries())
        if self.vendor.main in image_libraries:
            return
        libraries = dict(self._host_libraries())
        if self.vendor.main not in libraries:
            return
        for name, library in libraries.items():
            if name not in image_libraries:
                add_library(self.edits, self.host, self.context, library)
        for path in self.vendor.files:
            if not self.context.exists(path):
                self.edits.file(self.host, path)

    def _directories(self) -> list[str]:
        return [directory.format(machine=os.uname().machine) for directory in self.vendor.directories]

    def _image_libraries(self) -> Iterator[str]:
        """Yield the names of the vendor's libraries in the image's loader cache and usual directories."""
        parts = tuple(self.vendor.libraries)
        try:
            yield from (name for _, name, _ in ldcache.find(self.context.read("/etc/ld.so.cache"), parts))
        except ldcache.DAMAGE:
            pass  # the directories are searched below
        versions = [f"/opt/{name}/lib" for name in self.context.list("/opt") if name.startswith("rocm-")]
        usual = [f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64", "/usr/lib"]
        for directory in [*self._directories(), *versions, *usual]:
            yield from (name for name in self.context.list(directory) if name.startswith(self._prefixes))

    @property
    def _prefixes(self) -> tuple[str, ...]:
        return tuple(part.decode() for part in self.vendor.libraries)

    def _host_libraries(self) -> Iterator[tuple[str, ldcache.Library]]:
        """Yield the vendor's libraries on the host with the names that programs load."""
        try:
            known = ldcache.find(self.host.read("/etc/ld.so.cache"), self.vendor.libraries)
        except ldcache.DAMAGE:
            known = []
        unversioned = self.vendor.main.endswith(".so")  # this vendor's library names have no version
        for directory in self._directories():
            for name in self.host.list(directory):
                is_soname = name.endswith(".so") if unversioned else len(name.rpartition(".so.")[2]) < 3
                if is_soname and name.startswith(self._prefixes):
                    yield name, (ldcache.NATIVE, name, f"{directory}/{name}")
        yield from ((name, library) for library in known if bits(library[0]) == 64 for name in (library[1],))
