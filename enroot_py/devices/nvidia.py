"""GPUs of NVIDIA: what the host has, and what of it a container gets.

Found in /proc/driver/nvidia and in the cache of the loader, without a program
and without NVML, except that only NVML knows the UUIDs of MIG devices.
Sources: "Using the /proc File System Interface" of the driver's README; the
MIG User Guide, "Device Nodes and Capabilities"; the environment variables of
the NVIDIA Container Toolkit.
"""

from __future__ import annotations

import os

from enroot_py.base.errors import HookError
from enroot_py.devices import ldcache
from enroot_py.devices.edits import Edits, Host, add_library, bits, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from enroot_py.runtime.hooks import Context

_PROC = "/proc/driver/nvidia"
CAPABILITIES = ("compute", "compat32", "display", "graphics", "ngx", "utility", "video")

# Libraries of the driver by what they are for. A name ends before ".so".
LIBRARIES = {
    "utility": "libnvidia-ml libnvidia-cfg libnvidia-nscq libnvidia-sandboxutils",
    "compute": "libcuda libcudadebugger libnvidia-opencl libnvidia-gpucomp libnvidia-ptxjitcompiler "
    "libnvidia-fatbinaryloader libnvidia-allocator libnvidia-compiler libnvidia-pkcs11 libnvidia-pkcs11-openssl3 "
    "libnvidia-nvvm libnvidia-nvvm70 libnvidia-tileiras",
    "video": "libvdpau_nvidia libnvidia-encode libnvidia-opticalflow libnvcuvid libcuda",
    "graphics": "libnvidia-eglcore libnvidia-glcore libnvidia-tls libnvidia-glsi libnvidia-fbc libnvidia-ifr "
    "libnvidia-rtcore libnvoptix libGLX_nvidia libEGL_nvidia libGLESv2_nvidia libGLESv1_CM_nvidia "
    "libnvidia-glvkspirv libnvidia-cbl libnvidia-gpucomp libnvidia-allocator libnvidia-egl-gbm "
    "libnvidia-egl-wayland libnvidia-egl-wayland2 libnvidia-egl-xcb libnvidia-egl-xlib libnvidia-vulkan-producer "
    "libnvidia-present libnvidia-vksc-core libnvidia-api",
    "ngx": "libnvidia-ngx",
}
LIBRARIES["display"] = LIBRARIES["graphics"]
# Those with a version of their own, not the driver's.
_OWN_VERSION = ("libnvidia-egl-", "libnvidia-api", "libnvidia-nvvm70")
_PREFIXES = (b"libcuda", b"libnvidia-", b"libnvcuvid", b"libnvoptix", b"libvdpau_nvidia", b"libGL", b"libEGL_nvidia")
_MAIN = ("libcuda.so.1", "libnvidia-ml.so.1")
# Programs look for these too, and packages for developers are not in an image.
_MORE_LINKS = {
    "libcuda.so": "libcuda.so.1",
    "libnvidia-opticalflow.so": "libnvidia-opticalflow.so.1",
    "libGLX_indirect.so.0": "libGLX_nvidia.so.0",
}
_GBM = "gbm/nvidia-drm_gbm.so"  # as Mesa's loader asks for it, libnvidia-allocator under another name
_PROGRAMS = {
    "utility": (
        "nvidia-smi",
        "nvidia-debugdump",
        "nvidia-persistenced",
        "nv-fabricmanager",
        "nvidia-imex-ctl",
    ),
    "compute": ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"),
}
_PROGRAM_DIRECTORIES = ("/usr/bin", "/usr/sbin", "/usr/local/nvidia/bin", "/usr/local/bin", "/opt/bin")
# Where a driver is that the cache of the loader does not know: driver containers, Kubernetes hosts.
_LIBRARY_DIRECTORIES = (
    "/usr/lib/{machine}-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/lib64",
    "/opt/nvidia/lib64",
)
# What loaders of other libraries read, and where a driver may have put it; in a container it is in /usr/share.
_GRAPHICS_FILES = (
    "vulkan/icd.d/nvidia_icd.json",
    "vulkan/icd.d/nvidia_icd.{machine}.json",
    "vulkan/icd.d/nvidia_layers.json",
    "vulkan/implicit_layer.d/nvidia_layers.json",
    "glvnd/egl_vendor.d/10_nvidia.json",
    "egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "egl/egl_external_platform.d/20_nvidia_xcb.json",
    "egl/egl_external_platform.d/20_nvidia_xlib.json",
    "nvidia/nvoptix.bin",
)
_SHARE_DIRECTORIES = ("/etc", "/usr/share", "/usr/local/share", "/usr/local/nvidia/share", "/usr/local/nvidia")

_CONSUMER = {"geforce", "titan"}  # not for these: CUDA would not start, where the host's own libcuda might do

# The newest CUDA that a branch of the driver runs: CUDA Toolkit Release Notes, table of drivers.
_CUDA_OF_DRIVER = (
    (615, 13.4), (610, 13.3), (595, 13.2), (590, 13.1), (580, 13.0), (575, 12.9), (570, 12.8), (565, 12.7),
    (560, 12.6), (555, 12.5), (550, 12.4), (545, 12.3), (535, 12.2), (530, 12.1), (525, 12.0), (520, 11.8),
    (515, 11.7), (510, 11.6), (495, 11.5), (470, 11.4), (465, 11.3), (460, 11.2), (455, 11.1), (450, 11.0),
    (440, 10.2), (418, 10.1), (410, 10.0), (396, 9.2), (390, 9.1), (384, 9.0), (375, 8.0),
)  # fmt: skip


class GPU:
    """One GPU; its index is its place by PCI address among those with a node, as nvidia-smi counts, or -1."""

    __slots__ = ("index", "minor", "bus", "uuid", "model")

    def __init__(self, index: int, minor: int, bus: str = "", uuid: str = "", model: str = "") -> None:
        self.index = index
        self.minor = minor
        self.bus = bus
        self.uuid = uuid
        self.model = model


class Mig:
    """One MIG device: a compute instance of a GPU instance, and the name by which it was asked for."""

    __slots__ = ("gpu", "gi", "ci", "name")

    def __init__(self, gpu: GPU, gi: int, ci: int, name: str = "") -> None:
        self.gpu = gpu
        self.gi = gi
        self.ci = ci
        self.name = name


class Selection:
    """The GPUs that a container gets whole, and the MIG devices of others."""

    def __init__(self, gpus: tuple[GPU, ...] = (), migs: tuple[Mig, ...] = (), *, every: bool = False) -> None:
        self.gpus = gpus
        self.migs = migs
        self.every = every

    @property
    def minors(self) -> set[int]:
        return {gpu.minor for gpu in self.gpus} | {mig.gpu.minor for mig in self.migs}


def gpus(host: Host) -> list[GPU]:
    """The GPUs of the host, by PCI address; by number of their nodes where the driver tells no more.

    Some have no node where this runs in a container with a part of them.
    """
    found: list[GPU] = []
    for bus in host.list(_PROC + "/gpus"):
        said = {}
        for line in host.read(f"{_PROC}/gpus/{bus}/information").decode("ascii", "replace").splitlines():
            key, _, value = line.partition(":")
            said[key.strip()] = value.strip()
        minor = said.get("Device Minor", "")
        if minor.isdecimal() and said.get("GPU Excluded") != "Yes":
            uuid = said.get("GPU UUID", "")  # of question marks until somebody has used the GPU
            found.append(GPU(len(found), int(minor), bus, "" if "?" in uuid else uuid, said.get("Model", "")))
    usable = [gpu for gpu in found if host.exists(f"/dev/nvidia{gpu.minor}")]
    if usable:
        for gpu in found:
            gpu.index = usable.index(gpu) if gpu in usable else -1
    if not found:
        nodes = [name.removeprefix("nvidia") for name in host.list("/dev") if name.startswith("nvidia")]
        found = [GPU(i, n) for i, n in enumerate(sorted(int(name) for name in nodes if name.isdecimal()))]
    return found


def absence(host: Host) -> tuple[str, str]:
    """Why there is no driver that this module could use, with the way out; the first is empty where nobody wonders."""
    for kind, paths in (("WSL2", ("/dev/dxg",)), ("a Jetson", ("/dev/nvmap", "/etc/nv_tegra_release"))):
        if any(host.exists(path) for path in paths):
            return f"it is {kind}", "its GPU is given by CDI: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
    return "", "its kernel module makes /proc/driver/nvidia; unset the variable to start without GPUs"


def driver_version(host: Host) -> str:
    """The version of the kernel's driver, such as 535.104.05; empty where it does not say."""
    line = host.read(_PROC + "/version").decode("ascii", "replace").partition("\n")[0]
    for word in line.split():
        if "." in word and word.replace(".", "").isdecimal():
            return word
    return ""


def instances(host: Host, gpu: GPU) -> list[Mig]:
    """The MIG devices of a GPU by the numbers of their instances."""
    found = []
    base = f"{_PROC}/capabilities/gpu{gpu.minor}/mig"
    for gi in _numbers(host, base, "gi"):
        found += [Mig(gpu, gi, ci) for ci in _numbers(host, f"{base}/gi{gi}", "ci")]
    return found


def _numbers(host: Host, path: str, prefix: str) -> list[int]:
    names = (name.removeprefix(prefix) for name in host.list(path) if name.startswith(prefix))
    return sorted(int(name) for name in names if name.isdecimal())


def select(words: list[str], known: list[GPU], host: Host, origin: str, nvml: Callable[[], str]) -> Selection:
    """What ``words`` name: all, an index, a UUID or the start of one, a PCI address, GPU:MIG, a MIG UUID.

    ``nvml`` finds the library that is asked about MIG devices. Raises
    HookError, which names ``origin``, for what this host does not have.
    """
    whole: dict[int, GPU] = {}
    parts: list[Mig] = []
    if "all" in words:
        return Selection(_usable(known), every=True)
    if any(word.startswith("GPU-") for word in words) and not all(gpu.uuid for gpu in known):
        _learn_uuids(known, nvml())
    for word in dict.fromkeys(words):
        if word.startswith("MIG-") or (":" in word and word.replace(":", "").isdecimal() and word.count(":") == 1):
            parts.append(_mig(word, known, host, origin, nvml))
            continue
        matching = [gpu for gpu in known if _is(gpu, word)]
        if len(matching) != 1:
            said = "more than one GPU" if matching else "no GPU"
            raise HookError(f"{origin}: {said} {shown(word)!r} on {os.uname().nodename}", hint=_have(known))
        whole[matching[0].minor] = matching[0]
    return Selection(tuple(whole.values()), tuple(parts))


def _usable(known: list[GPU]) -> tuple[GPU, ...]:
    """All GPUs but those that this machine has without a node: nvidia-smi does not show them either."""
    missing = [gpu for gpu in known if gpu.index < 0]
    for gpu in missing:
        from enroot_py.base import log

        log.warn(f"the GPU {gpu.bus} is left out: {os.uname().nodename} has no /dev/nvidia{gpu.minor}")
    return tuple(gpu for gpu in known if gpu not in missing)


def _learn_uuids(known: list[GPU], library: str) -> None:
    """Ask NVML for UUIDs that the driver does not tell in /proc."""
    if library:
        from enroot_py.devices import nvml

        uuids = nvml.uuids(library)
        for gpu in known:
            gpu.uuid = gpu.uuid or uuids.get(gpu.minor, "")


def _is(gpu: GPU, word: str) -> bool:
    if word.isdecimal():
        return word == str(gpu.index)
    if word.startswith("GPU-"):
        return len(word) > 4 and gpu.uuid.startswith("GPU-" + word[4:].lower())
    return bool(gpu.bus) and _address(word) == _address(gpu.bus)


def _address(text: str) -> tuple[str, str]:
    """A PCI address without the zeros of its domain: nvidia-smi writes eight digits, the kernel four."""
    domain, _, rest = text.lower().partition(":")
    return domain.lstrip("0"), rest


def names(selection: Selection) -> list[str]:
    """A selection in the words that any tool of NVIDIA's takes."""
    whole = [gpu.uuid or str(gpu.index) for gpu in selection.gpus]
    return whole + [mig.name for mig in selection.migs]


def also_named(word: str, known: list[GPU], names: list[str]) -> str:
    """The one of ``names`` that means the GPU ``word``: a UUID, 0, or gpu0; ``word`` where there is none."""
    if word in names:
        return word
    matching = [gpu for gpu in known if _is(gpu, word)]
    others = [name for gpu in matching[:1] for name in (gpu.uuid, str(gpu.index), f"gpu{gpu.index}") if name in names]
    return others[0] if len(matching) == 1 and others else word


def _have(known: list[GPU]) -> str:
    if not known:
        return "it has none that its driver knows of: nvidia-smi -L"
    names = {gpu: str(gpu.index) if gpu.index >= 0 else f"{gpu.bus} without a node" for gpu in known}
    return "it has " + ", ".join(f"{name} ({gpu.uuid})" if gpu.uuid else name for gpu, name in names.items())


def _mig(word: str, known: list[GPU], host: Host, origin: str, nvml: Callable[[], str]) -> Mig:
    """Raises HookError."""
    where = os.uname().nodename
    if word.startswith("MIG-GPU-"):  # as drivers before R470 name them: MIG-GPU-UUID/GI/CI
        uuid, _, numbers = word.removeprefix("MIG-").partition("/")
        gi, _, ci = numbers.partition("/")
        for mig in (mig for gpu in known if gpu.uuid == uuid for mig in instances(host, gpu)):
            if (str(mig.gi), str(mig.ci)) == (gi, ci):
                return Mig(mig.gpu, mig.gi, mig.ci, word)
        raise HookError(f"{origin}: no MIG device {shown(word)} on {where}", hint="nvidia-smi -L lists them")
    gpu_index, _, mig_index = word.partition(":")
    library = nvml()
    if library:
        from enroot_py.devices import nvml as library_calls

        for gpu in known:
            for number, (uuid, gi_id, ci_id) in library_calls.mig_devices(library, gpu.bus).items():
                if word == uuid or (gpu_index, mig_index) == (str(gpu.index), str(number)):
                    return Mig(gpu, gi_id, ci_id, word)
    elif not word.startswith("MIG-"):
        matching = [gpu for gpu in known if str(gpu.index) == gpu_index]
        for number, mig in enumerate(instances(host, matching[0]) if matching else ()):
            if mig_index == str(number):
                return Mig(mig.gpu, mig.gi, mig.ci, word)
    else:
        raise HookError(
            f"{origin}: cannot find {shown(word)}: libnvidia-ml.so.1 is not on {where}",
            hint="without it MIG devices are named GPU:MIG, such as 0:1",
        )
    raise HookError(f"{origin}: no MIG device {shown(word)} on {where}", hint="nvidia-smi -L lists them")


def capabilities(text: str) -> set[str]:
    """NVIDIA_DRIVER_CAPABILITIES as a set; compute and utility where nothing is said. Raises HookError."""
    words = {word.strip() for word in text.split(",") if word.strip()} or {"compute", "utility"}
    if "all" in words:
        return set(CAPABILITIES)
    if unknown := sorted(words - set(CAPABILITIES)):
        raise HookError(
            f"NVIDIA_DRIVER_CAPABILITIES: unknown capability {shown(unknown[0])!r}",
            hint="there are all, " + ", ".join(CAPABILITIES),
        )
    return words


class Driver:
    """The user's part of the driver: where it is and which version it has."""

    def __init__(self, host: Host, root: str, version: str) -> None:
        self.tree = host.beneath(root)
        self.version = version
        self.caller: Mapping[str, str] = {}
        self.programs: tuple[str, ...] = _PROGRAM_DIRECTORIES
        self._found: list[ldcache.Library] | None = None

    @classmethod
    def of(cls, host: Host, caller: Mapping[str, str]) -> Driver:
        """That of a host, beneath NVIDIA_DRIVER_ROOT where a site says so; else in a driver container, or the host."""
        root = caller.get("NVIDIA_DRIVER_ROOT", "").rstrip("/")
        if not root and host.exists("/run/nvidia/driver/usr/bin/nvidia-smi"):
            root = "/run/nvidia/driver"
        driver = cls(host, root, driver_version(host))
        driver.caller = caller
        return driver

    @property
    def libraries(self) -> list[ldcache.Library]:
        """Libraries that the loader of the host knows; else, as in a container, those of the usual directories."""
        if self._found is None:
            try:
                self._found = ldcache.find(self.tree.read("/etc/ld.so.cache"), _PREFIXES)
            except ldcache.DAMAGE:
                self._found = []
            if not any(self._is_ours(path) for _, name, path in self._found if name in _MAIN):
                self._found = list(self._scan())
                self.programs += self._paths("PATH")
        return self._found

    def _paths(self, name: str) -> tuple[str, ...]:
        """Directories of one of the caller's variables, who may know what the loader does not."""
        return tuple(path for path in self.caller.get(name, "").split(":") if path.startswith("/"))

    def _directories(self) -> list[str]:
        """Where a driver is that the loader does not know."""
        usual = [pattern.format(machine=os.uname().machine) for pattern in _LIBRARY_DIRECTORIES]
        return list(dict.fromkeys([*usual, *self._paths("LD_LIBRARY_PATH")]))

    def _is_ours(self, path: str) -> bool:
        """Whether a library is of the kernel's version, and not of CUDA's compatibility package, say."""
        return not self.version or self.tree.real(path).endswith("." + self.version)

    def _scan(self) -> list[ldcache.Library]:
        flags = {"x86_64": 0x303, "aarch64": 0xA03}.get(os.uname().machine, 0x3)
        found: dict[str, ldcache.Library] = {}
        prefixes = tuple(prefix.decode() for prefix in _PREFIXES)
        for directory in self._directories():
            names = [name for name in self.tree.list(directory) if name.startswith(prefixes)]
            # libcuda.so.1 and not libcuda.so.535.104.05: what programs ask for.
            sonames = [name for name in names if len(name.rpartition(".so.")[2]) < 3]
            linked = {name.partition(".so.")[0] for name in sonames}
            # Those that only other libraries of the driver ask for have the version in their name.
            sonames += [n for n in names if n.endswith(f".so.{self.version}") and n.partition(".so.")[0] not in linked]
            for name in sonames:
                if name not in found or not self._is_ours(found[name][2]):
                    found[name] = flags, name, f"{directory}/{name}"
        return list(found.values())

    def _vdpau(self) -> list[ldcache.Library]:
        """The driver for VDPAU, in a directory that only that looks into."""
        found = [(flags, path.rpartition("/")[0]) for flags, name, path in self.libraries if name == "libnvcuvid.so.1"]
        name = "libvdpau_nvidia.so.1"
        return [(flags, name, f"{folder}/vdpau/{name}") for flags, folder in found]

    def library(self, name: str) -> str:
        """The path on this machine of a library, empty where there is none."""
        for flags, found, path in self.libraries:
            if found == name and bits(flags) == 64:
                return self.tree.path(self.tree.real(path))
        return ""

    def nvml(self) -> str:
        return self.library("libnvidia-ml.so.1")

    def link(self, edits: Edits, folders: list[str]) -> None:
        """What ldconfig would do for libraries that are bound in ``folders``: links and entries in the cache."""
        bound = {source: target for target, (source, _) in edits.files.items() if os.path.dirname(target) in folders}
        known = [(flags, soname, self.tree.path(self.tree.real(path))) for flags, soname, path in self.libraries]
        # A driver that no loader of the host knows, or a library that is no driver's.
        more = (ldcache.soname(path) for path in bound.keys() - {path for _, _, path in known} if ".so" in path)
        for flags, soname, path in [*known, *(library for library in more if library)]:
            target = bound.get(path, "")
            directory, _, file = target.rpartition("/")
            if file:
                if soname != file:
                    edits.links.setdefault(f"{directory}/{soname}", file)
                edits.libraries.append((flags, soname, f"{directory}/{soname}"))

    def add(self, edits: Edits, context: Context, wanted: set[str]) -> None:
        """Libraries, programs and firmware for ``wanted`` capabilities."""
        self._add_libraries(edits, context, wanted)
        for capability, library in (("compute", "libcuda.so.1"), ("utility", "libnvidia-ml.so.1")):
            if capability in wanted and all(library != name for _, name, _ in edits.libraries):
                self._warn(library)
        for capability in ("utility", "compute"):
            for program in _PROGRAMS[capability] if capability in wanted else ():
                for directory in self.programs:
                    if edits.file(self.tree, f"{directory}/{program}", f"/usr/bin/{program}"):
                        break
        for directory in (f"/lib/firmware/nvidia/{self.version}",) if self.version else ():
            for name in self.tree.list(directory):
                if name.startswith("gsp") and name.endswith(".bin"):
                    edits.file(self.tree, f"{directory}/{name}")
        if "compute" in wanted:
            self._share(edits, "OpenCL/vendors/nvidia.icd", "/etc")
        for name in _GRAPHICS_FILES if wanted & {"graphics", "display"} else ():
            self._share(edits, name.format(machine=os.uname().machine), "/usr/share")

    def _share(self, edits: Edits, name: str, target: str) -> None:
        for directory in _SHARE_DIRECTORIES:
            if edits.file(self.tree, f"{directory}/{name}", f"{target}/{name}"):
                return

    def _warn(self, library: str) -> None:
        from enroot_py.base import log

        log.warn(
            f"{os.uname().nodename} has no {library}{' of its driver ' + self.version if self.version else ''}: "
            f"it is not in {self.tree.path('/etc/ld.so.cache')} nor in {', '.join(self._directories())}"
        )

    def _add_libraries(self, edits: Edits, context: Context, wanted: set[str]) -> None:
        names = {name for capability in wanted for name in LIBRARIES.get(capability, "").split()}
        for library in [*self.libraries, *(self._vdpau() if "video" in wanted else ())]:
            flags, soname, path = library
            name, _, rest = soname.partition(".so")
            if name not in names or not rest or (bits(flags) == 32 and "compat32" not in wanted):
                continue
            real = self.tree.real(path)
            file = real.rpartition("/")[2]
            of_driver = not self.version or name.startswith(_OWN_VERSION) or file.endswith("." + self.version)
            if not file or not of_driver:
                continue  # what an older driver left behind does not work with this kernel's
            directory = add_library(edits, self.tree, context, library, real)
            for more, target in _MORE_LINKS.items():
                if target == soname:
                    edits.links[f"{directory}/{more}"] = target
            if name == "libnvidia-allocator" and wanted & {"graphics", "display"}:
                edits.links[f"{directory}/{_GBM}"] = f"../{soname}"


def add_compat(edits: Edits, context: Context, version: str, known: list[GPU]) -> None:
    """Prefer the image's own libcuda where it is for a newer driver: CUDA Compatibility, "Forward Compatibility"."""
    directory = "/usr/local/cuda/compat"
    from enroot_py.base import paths

    try:
        fd = paths.open_in(context.root, directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        names = sorted(os.listdir(fd))
    finally:
        os.close(fd)
    found = [name.removeprefix("libcuda.so.") for name in names if name.startswith("libcuda.so.")]
    newest = max((v for v in found if "." in v and v.replace(".", "").isdecimal()), key=_version, default="")
    branch = _version(version)[0]
    if not newest or not version or _version(newest)[0] <= branch or _brands(known) & _CONSUMER:
        return
    try:
        with open(paths.open_regular(context.root, f"{directory}/libcuda.so.{newest}"), "rb") as library:
            branches = ldcache.drivers_of_compat(library)
    except OSError:
        return
    if branches and branch not in branches:
        return
    flags = {"x86_64": 0x303, "aarch64": 0xA03}.get(os.uname().machine, 0x3)
    # Some are asked for by their whole name: libnvidia-gpucomp.so.580.65.06.
    ours = [name for name in names if name.startswith("lib") and ".so." in name]
    edits.libraries = [library for library in edits.libraries if library[1] not in ours]
    edits.libraries += [(flags, name, f"{directory}/{name}") for name in ours]


def add_nodes(edits: Edits, host: Host, selection: Selection, known: list[GPU], wanted: set[str]) -> None:
    """Nodes of the selected devices; those of other GPUs are hidden. Raises HookError where a GPU has none."""
    if not edits.node(host, "/dev/nvidiactl"):
        raise HookError(
            f"the NVIDIA driver is loaded but {host.path('/dev/nvidiactl')} does not exist on {os.uname().nodename}",
            hint="as root: nvidia-modprobe -c 0 -u",
        )
    if not edits.node(host, "/dev/nvidia-uvm") and "compute" in wanted:
        from enroot_py.base import log

        log.warn(f"{os.uname().nodename} has no {host.path('/dev/nvidia-uvm')}, without which CUDA finds no GPU")
    edits.node(host, "/dev/nvidia-uvm-tools")
    if wanted & {"graphics", "display"}:
        edits.node(host, "/dev/nvidia-modeset")
    caps = cap_nodes(host)
    given = nodes(selection, caps)
    for gpu in known:
        if f"/dev/nvidia{gpu.minor}" not in given:
            continue
        if not edits.node(host, f"/dev/nvidia{gpu.minor}"):
            raise HookError(
                f"the GPU {gpu.bus} has no node {host.path(f'/dev/nvidia{gpu.minor}')} on {os.uname().nodename}",
                hint=f"as root: nvidia-modprobe -c {gpu.minor}",
            )
        if wanted & {"graphics", "display"} and gpu.bus:
            for name in host.list(f"/sys/bus/pci/devices/{gpu.bus}/drm"):
                edits.node(host, f"/dev/dri/{name}")
    for path in given:
        edits.node(host, path)
    for mig in selection.migs:
        for name in (f"gi{mig.gi}/access", f"gi{mig.gi}/ci{mig.ci}/access"):
            if f"gpu{mig.gpu.minor}/{name}" not in caps.values():
                raise HookError(
                    f"the MIG device {mig.name} has no node in {host.path('/dev/nvidia-caps')} on "
                    f"{os.uname().nodename} for gpu{mig.gpu.minor}/{name}",
                    hint=f"as root: nvidia-modprobe -f {_PROC}/capabilities/gpu{mig.gpu.minor}/mig/{name}",
                )
    if not selection.every:
        hide_others(edits, host, known, given, caps)
    if selection.every and "utility" in wanted:
        for name in host.list("/dev"):
            if name.startswith("nvidia-nvswitch"):
                edits.node(host, f"/dev/{name}")


def add_direct_nodes(edits: Edits, host: Host) -> None:
    """GDRCopy, GPUDirect Storage and IMEX channels, where the host has them."""
    edits.node(host, "/dev/gdrdrv")
    for name in host.list("/dev"):
        if name.startswith("nvidia-fs"):
            edits.node(host, f"/dev/{name}")
            edits.file(host, "/run/udev")  # where cuFile looks disks up
    for name in host.list("/dev/nvidia-caps-imex-channels"):
        edits.node(host, f"/dev/nvidia-caps-imex-channels/{name}")


def hide_others(edits: Edits, host: Host, known: list[GPU], given: set[str], caps: dict[int, str]) -> None:
    """Hide the nodes of GPUs and of their instances that are not ``given``, those too of which /proc does not tell."""
    others = {f"/dev/{name}" for name in host.list("/dev") if name.startswith("nvidia") and name[6:].isdecimal()}
    edits.hidden += sorted((others | nodes(Selection(tuple(known)), caps)) - given)


def nodes(selection: Selection, caps: dict[int, str]) -> set[str]:
    """The nodes of GPUs, and those of their instances among ``caps``, as cap_nodes has them."""
    found = {f"/dev/nvidia{minor}" for minor in selection.minors}
    whole = {gpu.minor for gpu in selection.gpus}
    parts = {(mig.gpu.minor, mig.gi, mig.ci) for mig in selection.migs}
    for number, name in caps.items():
        words = name.split("/")  # gpu0/gi1/access, gpu0/gi1/ci0/access
        if len(words) < 3 or not words[0].startswith("gpu"):
            continue
        gpu, gi = int(words[0][3:]), int(words[1][2:])
        ci = int(words[2][2:]) if len(words) == 4 else None
        if gpu in whole or any(part[:2] == (gpu, gi) and ci in (None, part[2]) for part in parts):
            found.add(f"/dev/nvidia-caps/nvidia-cap{number}")
    return found


def cap_nodes(host: Host) -> dict[int, str]:
    """The nodes of /dev/nvidia-caps by number, with what each gives access to."""
    names = (name.removeprefix("nvidia-cap") for name in host.list("/dev/nvidia-caps"))
    numbers = {int(name) for name in names if name.isdecimal()}
    if not numbers - {1, 2}:  # MIG configuration and monitoring, always there
        return {}
    found = {}
    # A line for each instance that could be, a thousand on a machine of eight: "gpu0/gi1/access 21".
    table = b"\n" + host.read("/proc/driver/nvidia-caps/mig-minors") + b"\n"
    for number in sorted(numbers):
        end = table.find(b" %d\n" % number)
        if end > 0:
            found[number] = table[table.rfind(b"\n", 0, end) + 1 : end].decode("ascii", "replace")
    return found


def check_requirements(requirements: dict[str, str], version: str, known: list[GPU]) -> None:
    """NVIDIA_REQUIRE_*: a space is "or", a comma is "and". Raises HookError for one that is not met."""
    if not version:
        return
    driver = _version(version)
    cuda = next(((int(c), round(c * 10) % 10) for branch, c in _CUDA_OF_DRIVER if driver[0] >= branch), (0, 0))
    facts = {"driver": driver, "cuda": cuda}
    if driver[0] > _CUDA_OF_DRIVER[0][0]:
        del facts["cuda"]  # of a branch that is newer than this table
    brands = _brands(known)
    for name, text in sorted(requirements.items()):
        alternatives = text.split()
        if alternatives and not any(all(_met(c, facts, brands) for c in a.split(",")) for a in alternatives):
            raise HookError(
                f"{name}={shown(alternatives[0])}: the driver {version} of {os.uname().nodename} "
                f"runs CUDA {cuda[0]}.{cuda[1]} at most",
                hint="it needs a newer driver; NVIDIA_DISABLE_REQUIRE=1 starts the container all the same",
            )


def _met(condition: str, facts: dict[str, tuple[int, ...]], brands: set[str]) -> bool:
    for operator in (">=", "<=", "!=", "=", ">", "<"):
        name, found, value = condition.partition(operator)
        if found:
            break
    else:
        return True
    if name == "brand":
        return (value.lower() in brands) == (operator == "=")
    if name not in facts or not value.replace(".", "").isdecimal() or len(value) > 32:
        return True  # what is not known here does not forbid a start
    ours, theirs = facts[name], _version(value)
    width = max(len(ours), len(theirs))
    ours += (0,) * (width - len(ours))
    theirs += (0,) * (width - len(theirs))
    results = {">=": ours >= theirs, "<=": ours <= theirs, "=": ours == theirs, "!=": ours != theirs}
    return results.get(operator, ours > theirs if operator == ">" else ours < theirs)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal()) or (0,)


def _brands(known: list[GPU]) -> set[str]:
    """What NVML may call the brand of such a model: older and newer drivers have different words."""
    model = known[0].model.lower() if known else ""
    for name in ("geforce", "quadro", "titan"):
        if name in model:
            return {name, name + "rtx"}
    if "rtx" in model:
        return {"nvidiartx", "quadrortx"}
    return {next((name for name in ("nvs", "grid") if name in model), "tesla"), "nvidia"}
