"""Find the user-space part of the NVIDIA driver, add it to a container, and check the driver's version."""

from __future__ import annotations

import os

from enroot_py.base import ldcache, log, paths
from enroot_py.base.errors import HookError
from enroot_py.features.devices.nvidia import tables
from enroot_py.runtime.edits import Edits, Host, add_library, bits, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from enroot_py.features.devices.nvidia.selection import GPU
    from enroot_py.runtime.hooks import Context


def absence(host: Host) -> tuple[str, str]:
    """Return why this module finds no driver, and a hint. The reason is "" unless the node is WSL2 or a Jetson."""
    for kind, marks in (("WSL2", ("/dev/dxg",)), ("a Jetson", ("/dev/nvmap", "/etc/nv_tegra_release"))):
        if any(host.exists(path) for path in marks):
            return f"it is {kind}", "describe the GPU with CDI: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
    return "", "load the kernel module, which creates /proc/driver/nvidia, or unset the variable to start without GPUs"


def loaded_version(host: Host) -> str:
    """Return the version of the loaded kernel module, such as 535.104.05; "" if unknown."""
    line = host.read("/proc/driver/nvidia/version").decode("ascii", "replace").partition("\n")[0]
    for word in line.split():
        if "." in word and word.replace(".", "").isdecimal():
            return word
    return ""


def capabilities(text: str) -> set[str]:
    """Parse NVIDIA_DRIVER_CAPABILITIES. The default is compute and utility. Raises HookError."""
    words = {word.strip() for word in text.split(",") if word.strip()} or {"compute", "utility"}
    if "all" in words:
        return set(tables.CAPABILITIES)
    if unknown := sorted(words - set(tables.CAPABILITIES)):
        raise HookError(
            f"NVIDIA_DRIVER_CAPABILITIES: unknown capability {shown(unknown[0])!r}",
            hint="use all, " + ", ".join(tables.CAPABILITIES),
        )
    return words


class Driver:
    """The user-space part of the driver, in the file tree ``tree``: the host's, or a driver container's."""

    def __init__(self, tree: Host, version: str, caller: Mapping[str, str]) -> None:
        self.tree = tree
        self.version = version
        self._caller = caller
        self._programs: tuple[str, ...] = tables.PROGRAM_DIRECTORIES
        self._libraries: list[ldcache.Library] | None = None

    @classmethod
    def of(cls, host: Host, caller: Mapping[str, str]) -> Driver:
        """Return the driver beneath NVIDIA_DRIVER_ROOT if it is set, else in a driver container, else on the host."""
        root = caller.get("NVIDIA_DRIVER_ROOT", "").rstrip("/")
        if not root and host.exists("/run/nvidia/driver/usr/bin/nvidia-smi"):
            root = "/run/nvidia/driver"
        return cls(host.beneath(root), loaded_version(host), caller)

    @property
    def libraries(self) -> list[ldcache.Library]:
        """The libraries in the loader cache, or in the usual directories if the cache lacks the loaded version."""
        if self._libraries is None:
            try:
                self._libraries = ldcache.find(self.tree.read("/etc/ld.so.cache"), tables.PREFIXES)
            except ldcache.DAMAGE:
                self._libraries = []
            if not any(
                self._has_driver_version(path) for _, name, path in self._libraries if name in tables.MAIN_LIBRARIES
            ):
                self._libraries = self._scanned()
                self._programs += self._paths("PATH")
        return self._libraries

    def _paths(self, name: str) -> tuple[str, ...]:
        """Return the absolute directories in the caller's variable ``name``."""
        return tuple(path for path in self._caller.get(name, "").split(":") if path.startswith("/"))

    def _directories(self) -> list[str]:
        """Return the directories to search for a driver that is not in the loader cache."""
        usual = [pattern.format(machine=os.uname().machine) for pattern in tables.LIBRARY_DIRECTORIES]
        return list(dict.fromkeys([*usual, *self._paths("LD_LIBRARY_PATH")]))

    def _has_driver_version(self, path: str) -> bool:
        """Check whether a library has the kernel module's version. Libraries of CUDA's compatibility package do not."""
        return not self.version or self.tree.real(path).endswith("." + self.version)

    def _scanned(self) -> list[ldcache.Library]:
        libraries: dict[str, ldcache.Library] = {}
        prefixes = tuple(prefix.decode() for prefix in tables.PREFIXES)
        for directory in self._directories():
            names = [name for name in self.tree.list(directory) if name.startswith(prefixes)]
            # Programs load libcuda.so.1, not libcuda.so.535.104.05.
            sonames = [name for name in names if len(name.rpartition(".so.")[2]) < 3]
            linked = {name.partition(".so.")[0] for name in sonames}
            # Libraries that only the driver itself loads have the version in the name.
            sonames += [n for n in names if n.endswith(f".so.{self.version}") and n.partition(".so.")[0] not in linked]
            for name in sonames:
                if name not in libraries or not self._has_driver_version(libraries[name][2]):
                    libraries[name] = ldcache.NATIVE, name, f"{directory}/{name}"
        return list(libraries.values())

    def _vdpau(self) -> list[ldcache.Library]:
        """Return the VDPAU driver. Its directory, beside libnvcuvid, is not in the loader cache."""
        name = "libvdpau_nvidia.so.1"
        nvcuvid = [(flags, path) for flags, soname, path in self.libraries if soname == "libnvcuvid.so.1"]
        return [(flags, name, f"{os.path.dirname(path)}/vdpau/{name}") for flags, path in nvcuvid]

    def _library(self, name: str) -> str:
        """Return the path of a 64-bit library on this machine, or ""."""
        for flags, soname, path in self.libraries:
            if soname == name and bits(flags) == 64:
                return self.tree.path(self.tree.real(path))
        return ""

    def nvml(self) -> str:
        """Return the path of the NVML library, or ""."""
        return self._library("libnvidia-ml.so.1")

    def link(self, edits: Edits, folders: list[str]) -> None:
        """Add soname links and loader cache entries for libraries bound in ``folders``, as ldconfig would."""
        bound = {source: target for target, (source, _) in edits.files.items() if os.path.dirname(target) in folders}
        known = [(flags, soname, self.tree.path(self.tree.real(path))) for flags, soname, path in self.libraries]
        # Libraries that are not in the host's loader cache.
        unlisted = (ldcache.soname(path) for path in bound.keys() - {path for _, _, path in known} if ".so" in path)
        for flags, soname, path in [*known, *(library for library in unlisted if library)]:
            target = bound.get(path, "")
            directory, _, file = target.rpartition("/")
            if file:
                if soname != file:
                    edits.links.setdefault(f"{directory}/{soname}", file)
                edits.libraries.append((flags, soname, f"{directory}/{soname}"))

    def add(self, edits: Edits, context: Context, wanted: set[str]) -> None:
        """Add the libraries, programs and firmware for ``wanted`` capabilities."""
        self._add_libraries(edits, context, wanted)
        for capability, library in (("compute", "libcuda.so.1"), ("utility", "libnvidia-ml.so.1")):
            if capability in wanted and all(library != name for _, name, _ in edits.libraries):
                self._warn(library)
        for capability in ("utility", "compute"):
            for program in tables.PROGRAMS[capability] if capability in wanted else ():
                for directory in self._programs:
                    if edits.file(self.tree, f"{directory}/{program}", f"/usr/bin/{program}"):
                        break
        for directory in (f"/lib/firmware/nvidia/{self.version}",) if self.version else ():
            for name in self.tree.list(directory):
                if name.startswith("gsp") and name.endswith(".bin"):
                    edits.file(self.tree, f"{directory}/{name}")
        if "compute" in wanted:
            self._share(edits, "OpenCL/vendors/nvidia.icd", "/etc")
        for name in tables.GRAPHICS_FILES if wanted & {"graphics", "display"} else ():
            self._share(edits, name.format(machine=os.uname().machine), "/usr/share")

    def _share(self, edits: Edits, name: str, target: str) -> None:
        for directory in tables.SHARE_DIRECTORIES:
            if edits.file(self.tree, f"{directory}/{name}", f"{target}/{name}"):
                return

    def _warn(self, library: str) -> None:
        log.warn(
            f"{os.uname().nodename} has no {library}{' for driver ' + self.version if self.version else ''}: "
            f"it is neither in {self.tree.path('/etc/ld.so.cache')} nor in {', '.join(self._directories())}"
        )

    def _add_libraries(self, edits: Edits, context: Context, wanted: set[str]) -> None:
        names = {name for capability in wanted for name in tables.LIBRARIES.get(capability, "").split()}
        for library in [*self.libraries, *(self._vdpau() if "video" in wanted else ())]:
            flags, soname, path = library
            name, _, rest = soname.partition(".so")
            if name not in names or not rest or (bits(flags) == 32 and "compat32" not in wanted):
                continue
            real = self.tree.real(path)
            file = real.rpartition("/")[2]
            of_driver = not self.version or name.startswith(tables.OWN_VERSION) or file.endswith("." + self.version)
            if not file or not of_driver:
                continue  # a leftover of an older driver does not work with this kernel module
            directory = add_library(edits, self.tree, context, library, real)
            for link, target in tables.LINKS.items():
                if target == soname:
                    edits.links[f"{directory}/{link}"] = target
            if name == "libnvidia-allocator" and wanted & {"graphics", "display"}:
                edits.links[f"{directory}/{tables.GBM}"] = f"../{soname}"


def add_compat(edits: Edits, context: Context, version: str, known: list[GPU]) -> None:
    """Prefer the image's libcuda if it is newer than the driver: CUDA Compatibility, "Forward Compatibility"."""
    directory = "/usr/local/cuda/compat"
    try:
        with paths.open_in(context.root, directory, os.O_RDONLY | os.O_DIRECTORY) as fd:
            names = sorted(os.listdir(fd))
    except OSError:
        return
    versions = [name.removeprefix("libcuda.so.") for name in names if name.startswith("libcuda.so.")]
    newest = max((v for v in versions if "." in v and v.replace(".", "").isdecimal()), key=_version, default="")
    branch = _version(version)[0]
    if not newest or not version or _version(newest)[0] <= branch or _brands(known) & tables.CONSUMER:
        return
    try:
        with open(paths.open_regular(context.root, f"{directory}/libcuda.so.{newest}"), "rb") as library:
            branches = ldcache.drivers_of_compat(library)
    except OSError:
        return
    if branches and branch not in branches:
        return
    # Some libraries are loaded by their full name: libnvidia-gpucomp.so.580.65.06.
    compat_libraries = [name for name in names if name.startswith("lib") and ".so." in name]
    edits.libraries = [library for library in edits.libraries if library[1] not in compat_libraries]
    edits.libraries += [(ldcache.NATIVE, name, f"{directory}/{name}") for name in compat_libraries]


def add_direct_nodes(edits: Edits, host: Host) -> None:
    """Add the host's device nodes of GDRCopy, GPUDirect Storage and IMEX channels."""
    edits.node(host, "/dev/gdrdrv")
    for name in host.list("/dev"):
        if name.startswith("nvidia-fs"):
            edits.node(host, f"/dev/{name}")
            edits.file(host, "/run/udev")  # cuFile looks up disks here
    for name in host.list("/dev/nvidia-caps-imex-channels"):
        edits.node(host, f"/dev/nvidia-caps-imex-channels/{name}")


def check_requirements(requirements: dict[str, str], version: str, known: list[GPU]) -> None:
    """Check NVIDIA_REQUIRE_*: a space is "or", a comma is "and". Raises HookError if a requirement is not met."""
    if not version:
        return
    driver = _version(version)
    cuda = next(((int(c), round(c * 10) % 10) for branch, c in tables.CUDA_OF_DRIVER if driver[0] >= branch), (0, 0))
    facts = {"driver": driver, "cuda": cuda}
    if driver[0] > tables.CUDA_OF_DRIVER[0][0]:
        del facts["cuda"]  # the driver is newer than the table
    brands = _brands(known)
    for name, text in sorted(requirements.items()):
        alternatives = text.split()
        if alternatives and not any(all(_is_met(c, facts, brands) for c in a.split(",")) for a in alternatives):
            supported = f", which supports CUDA up to {cuda[0]}.{cuda[1]}" if "cuda" in facts else ""
            raise HookError(
                f"{name}={shown(alternatives[0])} is not met: {os.uname().nodename} has driver {version}{supported}, "
                f"and a GPU of brand {' or '.join(sorted(brands))}",
                hint="use a node with a newer driver or another GPU, or set NVIDIA_DISABLE_REQUIRE=1 to start anyway",
            )


def _is_met(condition: str, facts: dict[str, tuple[int, ...]], brands: set[str]) -> bool:
    for operator in (">=", "<=", "!=", "=", ">", "<"):
        name, separator, value = condition.partition(operator)
        if separator:
            break
    else:
        return True
    if name == "brand":
        return (value.lower() in brands) == (operator == "=")
    if name not in facts or not value.replace(".", "").isdecimal() or len(value) > 32:
        return True  # ignore unknown conditions
    actual, required = facts[name], _version(value)
    width = max(len(actual), len(required))
    actual += (0,) * (width - len(actual))
    required += (0,) * (width - len(required))
    results = {">=": actual >= required, "<=": actual <= required, "=": actual == required, "!=": actual != required}
    return results.get(operator, actual > required if operator == ">" else actual < required)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal()) or (0,)


def _brands(known: list[GPU]) -> set[str]:
    """Return the brand names that old and new NVML versions report for the model."""
    model = known[0].model.lower() if known else ""
    for name in ("geforce", "quadro", "titan"):
        if name in model:
            return {name, name + "rtx"}
    if "rtx" in model:
        return {"nvidiartx", "quadrortx"}
    return {next((name for name in ("nvs", "grid") if name in model), "tesla"), "nvidia"}
