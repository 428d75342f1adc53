"""Select a container's GPUs and MIG devices, and add their device nodes in /dev."""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.errors import HookError
from enroot_py.runtime.edits import Edits, Host, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PROC = "/proc/driver/nvidia"


class GPU:
    """One GPU. ``index`` is its number in nvidia-smi, or -1 without a device node."""

    __slots__ = ("index", "minor", "bus", "uuid", "model")

    def __init__(self, index: int, minor: int, bus: str = "", uuid: str = "", model: str = "") -> None:
        self.index = index
        self.minor = minor
        self.bus = bus
        self.uuid = uuid
        self.model = model

    @property
    def node(self) -> str:
        return f"/dev/nvidia{self.minor}"

    def is_named(self, word: str) -> bool:
        """Check whether ``word`` is the GPU's index, UUID, start of the UUID, or PCI address."""
        if word.isdecimal():
            return word == str(self.index)
        if word.startswith("GPU-"):
            return len(word) > 4 and self.uuid.startswith("GPU-" + word[4:].lower())
        return bool(self.bus) and _address(word) == _address(self.bus)


class Mig:
    """One MIG device: a compute instance of a GPU instance. ``name`` is the requested name."""

    __slots__ = ("gpu", "gi", "ci", "name")

    def __init__(self, gpu: GPU, gi: int, ci: int, name: str) -> None:
        self.gpu = gpu
        self.gi = gi
        self.ci = ci
        self.name = name


class Selection:
    """The whole GPUs and the MIG devices of a container. ``every``: the selection has all GPUs of the node."""

    def __init__(self, gpus: tuple[GPU, ...] = (), migs: tuple[Mig, ...] = (), *, every: bool = False) -> None:
        self.gpus = gpus
        self.migs = migs
        self.every = every

    def names(self) -> list[str]:
        """Return the names of the devices, in the form that NVIDIA's tools accept."""
        if self.every:
            return ["all"]
        return [gpu.uuid or str(gpu.index) for gpu in self.gpus] + [mig.name for mig in self.migs]


class GPUs:
    """The GPUs of a host, in the order of PCI addresses, or of minor numbers if /proc does not list the GPUs.

    In a container that has only some GPUs, /proc also lists the other GPUs, but these have no device node.
    """

    def __init__(self, host: Host, nvml: Callable[[], str]) -> None:
        """``nvml`` returns the path of the NVML library, or ""."""
        self.host = host
        self.all = _listed(host) or _by_nodes(host)
        self._nvml = nvml
        self._caps = _cap_nodes(host)

    def select(self, words: list[str], origin: str) -> Selection:
        """Return the devices that ``words`` name: all, indices, (starts of) UUIDs, PCI addresses, GPU:MIG, MIG UUIDs.

        Raises HookError, naming ``origin``, for a device that this host lacks.
        """
        whole: dict[int, GPU] = {}
        parts: list[Mig] = []
        if "all" in words:
            return Selection(self._usable(), every=True)
        if any(word.startswith("GPU-") for word in words) and not all(gpu.uuid for gpu in self.all):
            self._learn_uuids()
        for word in dict.fromkeys(words):
            if word.startswith("MIG-") or (word.count(":") == 1 and word.replace(":", "").isdecimal()):
                parts.append(self._mig(word, origin))
                continue
            matching = [gpu for gpu in self.all if gpu.is_named(word)]
            if len(matching) != 1:
                which = "more than one GPU" if matching else "no GPU"
                raise HookError(f"{origin}: {which} {shown(word)!r} on {os.uname().nodename}", hint=self._available())
            whole[matching[0].minor] = matching[0]
        return Selection(tuple(whole.values()), tuple(parts))

    def _usable(self) -> tuple[GPU, ...]:
        """Return the GPUs that have a device node, as nvidia-smi does. Warn about the other GPUs."""
        for gpu in self.all:
            if gpu.index < 0:
                log.warn(f"ignoring GPU {gpu.bus}: {os.uname().nodename} has no {gpu.node}")
        return tuple(gpu for gpu in self.all if gpu.index >= 0)

    def _learn_uuids(self) -> None:
        """Read from NVML the UUIDs that /proc lacks."""
        if library := self._nvml():
            from enroot_py.features.devices import nvml

            uuids = nvml.uuids(library)
            for gpu in self.all:
                gpu.uuid = gpu.uuid or uuids.get(gpu.minor, "")

    def _available(self) -> str:
        if not self.all:
            return "the driver lists no GPU: check nvidia-smi -L"
        names = {gpu: str(gpu.index) if gpu.index >= 0 else f"{gpu.bus} without a node" for gpu in self.all}
        return "available: " + ", ".join(f"{name} ({gpu.uuid})" if gpu.uuid else name for gpu, name in names.items())

    def _mig(self, word: str, origin: str) -> Mig:
        """Return the MIG device named ``word``. Raises HookError."""
        if word.startswith("MIG-GPU-"):
            mig = self._mig_by_instances(word)
        elif library := self._nvml():
            mig = self._mig_by_nvml(word, library)
        elif not word.startswith("MIG-"):
            mig = self._mig_by_numbers(word)
        else:
            raise HookError(
                f"{origin}: cannot find {shown(word)}: {os.uname().nodename} has no libnvidia-ml.so.1",
                hint="name the MIG device as GPU:MIG, such as 0:1",
            )
        if not mig:
            message = f"{origin}: no MIG device {shown(word)} on {os.uname().nodename}"
            raise HookError(message, hint="list them: nvidia-smi -L")
        return mig

    def _mig_by_instances(self, word: str) -> Mig | None:
        """Find a MIG device by its name in drivers before R470: MIG-GPU-UUID/GI/CI."""
        uuid, _, instances = word.removeprefix("MIG-").partition("/")
        migs = (mig for gpu in self.all if gpu.uuid == uuid for mig in self._instances(gpu, word))
        return next((mig for mig in migs if f"{mig.gi}/{mig.ci}" == instances), None)

    def _mig_by_nvml(self, word: str, library: str) -> Mig | None:
        """Find a MIG device by UUID or GPU:MIG."""
        from enroot_py.features.devices import nvml

        for gpu in self.all:
            for number, (uuid, gi, ci) in nvml.mig_devices(library, gpu.bus).items():
                if word in (uuid, f"{gpu.index}:{number}"):
                    return Mig(gpu, gi, ci, word)
        return None

    def _mig_by_numbers(self, word: str) -> Mig | None:
        """Find a MIG device by GPU:MIG without NVML. The numbers are the same as NVML's."""
        migs = ((f"{gpu.index}:{i}", mig) for gpu in self.all for i, mig in enumerate(self._instances(gpu, word)))
        return next((mig for name, mig in migs if name == word), None)

    def _instances(self, gpu: GPU, name: str) -> Iterator[Mig]:
        """Yield the MIG devices of a GPU in the order of their instance numbers."""
        base = f"{_PROC}/capabilities/gpu{gpu.minor}/mig"
        for gi in _numbers(self.host, base, "gi"):
            for ci in _numbers(self.host, f"{base}/gi{gi}", "ci"):
                yield Mig(gpu, gi, ci, name)

    def translate_name(self, word: str, names: list[str]) -> str:
        """Return the name in ``names`` for the GPU ``word``: UUID, index or gpuINDEX. If none, return ``word``."""
        if word in names:
            return word
        matching = [gpu for gpu in self.all if gpu.is_named(word)]
        if len(matching) != 1:
            return word
        gpu = matching[0]
        return next((name for name in (gpu.uuid, str(gpu.index), f"gpu{gpu.index}") if name in names), word)

    def nodes(self, selection: Selection) -> set[str]:
        """Return the device nodes of the selected GPUs and of their MIG instances."""
        whole = {gpu.minor for gpu in selection.gpus}
        parts = {(mig.gpu.minor, mig.gi, mig.ci) for mig in selection.migs}
        nodes = {gpu.node for gpu in selection.gpus} | {mig.gpu.node for mig in selection.migs}
        for number, name in self._caps.items():
            words = name.split("/")  # gpu0/gi1/access, gpu0/gi1/ci0/access
            if len(words) < 3 or not words[0].startswith("gpu"):
                continue
            minor, gi = int(words[0][3:]), int(words[1][2:])
            ci = int(words[2][2:]) if len(words) == 4 else None
            if minor in whole or any(part[:2] == (minor, gi) and ci in (None, part[2]) for part in parts):
                nodes.add(f"/dev/nvidia-caps/nvidia-cap{number}")
        return nodes

    def add(self, edits: Edits, selection: Selection, capabilities: set[str]) -> None:
        """Add the device nodes of the selection and hide all others. Raises HookError if a selected GPU has no node."""
        graphics = bool(capabilities & {"graphics", "display"})
        self._add_common(edits, graphics=graphics, compute="compute" in capabilities)
        selected = self.nodes(selection)
        for gpu in self.all:
            if gpu.node in selected:
                self._add_gpu(edits, gpu, graphics=graphics)
        for path in selected:
            edits.node(self.host, path)
        for mig in selection.migs:
            self._check_mig(mig)
        if not selection.every:
            self.hide_others(edits, selected)
        elif "utility" in capabilities:
            for name in self.host.list("/dev"):
                if name.startswith("nvidia-nvswitch"):
                    edits.node(self.host, f"/dev/{name}")

    def _add_common(self, edits: Edits, *, graphics: bool, compute: bool) -> None:
        """Add the device nodes that all GPUs share. Raises HookError."""
        hostname = os.uname().nodename
        if not edits.node(self.host, "/dev/nvidiactl"):
            raise HookError(
                f"the NVIDIA driver is loaded but {self.host.path('/dev/nvidiactl')} does not exist on {hostname}",
                hint="as root: nvidia-modprobe -c 0 -u",
            )
        if not edits.node(self.host, "/dev/nvidia-uvm") and compute:
            log.warn(f"{hostname} has no {self.host.path('/dev/nvidia-uvm')}: CUDA finds no GPU without it")
        edits.node(self.host, "/dev/nvidia-uvm-tools")
        if graphics:
            edits.node(self.host, "/dev/nvidia-modeset")

    def _add_gpu(self, edits: Edits, gpu: GPU, *, graphics: bool) -> None:
        """Add the device nodes of one GPU. Raises HookError."""
        if not edits.node(self.host, gpu.node):
            raise HookError(
                f"the GPU {gpu.bus} has no node {self.host.path(gpu.node)} on {os.uname().nodename}",
                hint=f"as root: nvidia-modprobe -c {gpu.minor}",
            )
        if graphics and gpu.bus:
            for name in self.host.list(f"/sys/bus/pci/devices/{gpu.bus}/drm"):
                edits.node(self.host, f"/dev/dri/{name}")

    def _check_mig(self, mig: Mig) -> None:
        """Raise HookError if a MIG device lacks one of its two device nodes."""
        for name in (f"gi{mig.gi}/access", f"gi{mig.gi}/ci{mig.ci}/access"):
            if f"gpu{mig.gpu.minor}/{name}" not in self._caps.values():
                raise HookError(
                    f"the MIG device {mig.name} has no node in {self.host.path('/dev/nvidia-caps')} on "
                    f"{os.uname().nodename} for gpu{mig.gpu.minor}/{name}",
                    hint=f"as root: nvidia-modprobe -f {_PROC}/capabilities/gpu{mig.gpu.minor}/mig/{name}",
                )

    def hide_others(self, edits: Edits, selected: set[str]) -> None:
        """Hide all device nodes of GPUs and MIG instances except ``selected``, also if /proc does not list a GPU."""
        names = [name for name in self.host.list("/dev") if name.startswith("nvidia") and name[6:].isdecimal()]
        gpu_nodes = {f"/dev/{name}" for name in names} | self.nodes(Selection(tuple(self.all)))
        edits.hidden += sorted(gpu_nodes - selected)


def _listed(host: Host) -> list[GPU]:
    """Return the GPUs that the driver lists in /proc."""
    gpus: list[GPU] = []
    for bus in host.list(_PROC + "/gpus"):
        fields = {}
        for line in host.read(f"{_PROC}/gpus/{bus}/information").decode("ascii", "replace").splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
        minor = fields.get("Device Minor", "")
        if minor.isdecimal() and fields.get("GPU Excluded") != "Yes":
            uuid = fields.get("GPU UUID", "")  # question marks until the GPU is first used
            gpus.append(GPU(len(gpus), int(minor), bus, "" if "?" in uuid else uuid, fields.get("Model", "")))
    usable = [gpu for gpu in gpus if host.exists(gpu.node)]
    if usable:
        for gpu in gpus:
            gpu.index = usable.index(gpu) if gpu in usable else -1
    return gpus


def _by_nodes(host: Host) -> list[GPU]:
    return [GPU(index, minor) for index, minor in enumerate(_numbers(host, "/dev", "nvidia"))]


def _numbers(host: Host, path: str, prefix: str) -> list[int]:
    names = (name.removeprefix(prefix) for name in host.list(path) if name.startswith(prefix))
    return sorted(int(name) for name in names if name.isdecimal())


def _address(text: str) -> tuple[str, str]:
    """Split a PCI address into domain and rest. Strip the domain's leading zeros: nvidia-smi writes eight digits."""
    domain, _, rest = text.lower().partition(":")
    return domain.lstrip("0"), rest


def _cap_nodes(host: Host) -> dict[int, str]:
    """Return node number in /dev/nvidia-caps -> MIG instance that the node opens, such as 21 -> gpu0/gi1/access."""
    numbers = _numbers(host, "/dev/nvidia-caps", "nvidia-cap")
    if not set(numbers) - {1, 2}:  # the nodes for MIG configuration and monitoring always exist
        return {}
    names = {}
    # One line for each possible instance, about a thousand with 8 GPUs: "gpu0/gi1/access 21".
    table = b"\n" + host.read("/proc/driver/nvidia-caps/mig-minors") + b"\n"
    for number in numbers:
        end = table.find(b" %d\n" % number)
        if end > 0:
            names[number] = table[table.rfind(b"\n", 0, end) + 1 : end].decode("ascii", "replace")
    return names
