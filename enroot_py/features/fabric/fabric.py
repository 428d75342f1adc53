"""Find the host's network libraries that a start asks for, with all their dependencies.

This runs before the start enters the container's namespaces, because inside, the owners of files are not visible.
fitting.py then decides which libraries fit the image. Sources of names: docs.cscs.ch, "Hooks and native resources";
aws-ofi-nccl, README; fi_provider(7); UCX, ucs_module.
"""

from __future__ import annotations

import os

from enroot_py.base import elf, ldcache, log, trusted
from enroot_py.base.elf import Elf, NotElf
from enroot_py.base.errors import HookError
from enroot_py.base.fds import Fd
from enroot_py.base.frozen import Frozen
from enroot_py.config.words import true_or_false
from enroot_py.features.fabric.settings import SETTINGS, FabricSettings
from enroot_py.runtime.edits import Host, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from enroot_py.config.settings import Settings

PARTS = ("libfabric", "ucx", "nccl")
LIBFABRIC, VERBS, UCX = "libfabric.so.1", "libibverbs.so.1", ("libucp.so.0", "libuct.so.0", "libucs.so.0")
PLUGINS = ("libnccl-net-ofi.so", "libnccl-net.so")
API = {UCX[0]: "ucp_"}  # library without symbol versions -> prefix of its public symbols
_MACHINE = os.uname().machine
USUAL = (f"/usr/lib/{_MACHINE}-linux-gnu", f"/lib/{_MACHINE}-linux-gnu", "/usr/lib64", "/lib64", "/usr/lib", "/lib")
# Directories of vendors outside the loader's directories, on hosts and in images.
VENDORS = (
    *("/opt/amazon/efa/lib64", "/opt/amazon/efa/lib", "/opt/cray/lib64", "/usr/local/lib", "/usr/local/lib64"),
    *("/opt/hpcx/ucx/lib", "/opt/ucx/lib", "/opt/libfabric/lib"),
)
_PLUGIN_DIRECTORIES = (
    *("/opt/aws-ofi-nccl/{variant}/lib", "/opt/aws-ofi-nccl/lib/{variant}", "/opt/aws-ofi-nccl/lib"),
    *(f"/opt/amazon/ofi-nccl/lib/{_MACHINE}-linux-gnu", "/opt/amazon/ofi-nccl/lib64", "/opt/amazon/ofi-nccl/lib"),
)
# Libraries that share private symbols with libibverbs. The symbols change with each release, so these libraries come
# from the host if libibverbs does.
_OF_VERBS = tuple(f"lib{name}.so.1" for name in ("rdmacm", "efa", "mlx4", "mlx5", "mana", "hns", "ibumad"))
OF_LIBC = (
    *("libc", "libm", "libmvec", "libpthread", "libdl", "librt", "libutil", "libresolv", "libanl", "libnsl"),
    *("libBrokenLocale", "libthread_db", "libnss_files", "libnss_dns", "libc_malloc_debug"),
)
_CONFIGURED = "/etc/libibverbs.d"
_MAX_LIBRARIES = 512
CXI, OFI_NCCL = "com.hooks.cxi.enabled", "com.hooks.aws_ofi_nccl.enabled"
_VARIANT = "com.hooks.aws_ofi_nccl.variant"


def is_cxi(name: str) -> bool:
    """Check whether a name in /dev is the name of a Slingshot adapter."""
    return name.startswith("cxi") and name[3:].isdecimal()


def is_of_libc(name: str) -> bool:
    """Check whether a library is part of glibc or its loader. These libraries are always the image's."""
    stem = name.partition(".so")[0]
    return stem in OF_LIBC or stem.startswith(("ld-", "ld64", "ld."))


class Want(Frozen):
    """A request by ``origin`` for a part: libfabric, ucx or nccl. ``without`` says how to start without the part."""

    part: str
    origin: str
    required: bool
    without: str
    variant: str = ""  # variant of the NCCL plugin, such as cuda12


def wanted(settings: Settings, host: Mapping[str, str]) -> list[Want]:
    """Return the requested parts. Annotations take precedence over settings. Raises HookError for an invalid value."""
    lines = host.get("PENROOT_ANNOTATIONS", "").split("\n")
    annotations = dict(line.split("=", 1) for line in lines if "=" in line)
    cxi, plugin = _flag(annotations, CXI), _flag(annotations, OFI_NCCL)
    by_annotation = {
        "libfabric": (cxi, CXI) if cxi is not None or not plugin else (plugin, OFI_NCCL),
        "ucx": (None, ""),
        "nccl": (plugin, OFI_NCCL),
    }
    variant = annotations.get(_VARIANT, "").strip()
    if plugin and (variant.startswith(".") or not (variant + "0").replace("-", "").replace(".", "").isalnum()):
        raise HookError(f"{_VARIANT}={shown(variant)} is not a variant name", hint='write for example "cuda12"')
    fabric, wants = FabricSettings(settings), []
    for part, (is_requested, origin) in by_annotation.items():
        if is_requested:
            wants.append(Want(part, origin, True, f'set {origin} = "false"', variant if part == "nccl" else ""))
        elif is_requested is None and part in fabric.fabric:
            origin = f"ENROOT_FABRIC, {settings.origin(SETTINGS['ENROOT_FABRIC'])}"
            without = f"remove {part} from ENROOT_FABRIC, or set ENROOT_FABRIC_UNFIT=warn"
            wants.append(Want(part, origin, fabric.fabric_unfit == "error", without))
    return wants


def _flag(annotations: Mapping[str, str], name: str) -> bool | None:
    """Return the truth value of an annotation, or None if it is not set. Raises HookError."""
    try:
        return true_or_false(annotations.get(name, ""))
    except ValueError as e:
        message = f"the annotation {name}={shown(str(e))} is not true or false"
        raise HookError(message, hint=f'write {name} = "true"') from None


class HostLibrary(Frozen):
    """A library of the host: the name that programs load, the real path, and the ELF contents.

    A main library loads modules with dlopen(3). A module is in ``folder`` beside its main library.
    """

    name: str
    path: str
    elf: Elf
    folder: str = ""

    @property
    def directory(self) -> str:
        return self.path.rpartition("/")[0]


class FabricPart(Frozen):
    """The host's libfabric, ucx or nccl: the main libraries and their modules.

    If the host lacks the part, ``lack`` is the reason.
    """

    want: Want
    main: tuple[HostLibrary, ...] = ()
    modules: tuple[HostLibrary, ...] = ()
    lack: str = ""


class Stock:
    """The network libraries of a host.

    ``known`` maps a name to the host's library, or to None if there is none. ``verbs`` are the drivers of libibverbs
    and the libraries that use its private symbols. ``configured`` are the drivers' configuration files.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self.host = Host.of(environ)
        self.known: dict[str, HostLibrary | None] = {}
        self.refused: dict[str, str] = {}  # name of a library -> why its file is not used
        self.verbs: list[HostLibrary] = []
        self.configured: list[str] = []
        self._path = FabricSettings(settings).fabric_path
        self._cached: dict[str, list[str]] = {}
        try:
            for flags, name, path in ldcache.find(self.host.read("/etc/ld.so.cache"), (b"lib",)):
                if flags & 0xFF00:
                    self._cached.setdefault(name, []).append(path)
        except ldcache.DAMAGE:
            pass  # then only the usual directories are searched

    def part(self, want: Want) -> FabricPart:
        """Find a part and all its dependencies."""
        names = {"libfabric": (LIBFABRIC,), "ucx": UCX}.get(want.part, ())
        main = [self._find(name, self._path) for name in names] or [self._plugin(want.variant)]
        libraries = tuple(library for library in main if library)
        if len(libraries) < len(main):
            return FabricPart(want, lack=self._lack(want, names))
        modules: list[HostLibrary] = []
        if want.part == "libfabric":
            modules = self._modules(f"{libraries[0].directory}/libfabric", "-fi.so")
        elif want.part == "ucx":
            modules = self._modules(f"{libraries[-1].directory}/ucx", ".so.0")
        for library in libraries:
            if refusal := self.refused.get(library.name):
                log.warn(f"99-fabric: ignoring {refusal}")
        self._add_dependencies([*libraries, *modules])
        self._add_verbs()
        return FabricPart(want, libraries, tuple(modules))

    def _lack(self, want: Want, names: Iterable[str]) -> str:
        names = names or PLUGINS
        refused = [self.refused[name] for name in names if name in self.refused]
        if refused:
            return f"cannot use the library on {os.uname().nodename}: {refused[0]}"
        missing = [name for name in names if not self.known.get(name)]
        variant = f", variant {want.variant}," if want.variant else ""
        searched = ":".join(self._path) or "the loader's directories"
        available = f"; it has {', '.join(variants)}" if want.part == "nccl" and (variants := self._variants()) else ""
        return f"{os.uname().nodename} has no {missing[0]}{variant} in {searched} or vendors' directories{available}"

    def _variants(self) -> list[str]:
        """Return the variants of the NCCL plugin that the host has."""
        names = set()
        for directory in (*self._path, *_PLUGIN_DIRECTORIES):
            above, variant, below = directory.partition("{variant}")
            for name in self.host.list(above) if variant else ():
                if any(self.host.exists(f"{above}{name}{below}/{plugin}") for plugin in PLUGINS):
                    names.add(f"variant {name}")
        return sorted(names)

    def _add_verbs(self) -> None:
        """Find the drivers of libibverbs, their configuration, and the libraries that use its private symbols."""
        verbs = self.known.get(VERBS)
        if verbs is None or self.verbs:
            return
        self.verbs = self._modules(f"{verbs.directory}/libibverbs", ".so")
        self._add_dependencies(self.verbs)
        self.verbs += [library for name in _OF_VERBS if (library := self.known.get(name))]
        for name in self.host.list(_CONFIGURED):
            real = self.host.real(f"{_CONFIGURED}/{name}")
            try:
                os.close(self._opened_file(real))
            except OSError:
                continue  # then libibverbs will not load the driver
            self.configured.append(real)

    def _add_dependencies(self, libraries: list[HostLibrary]) -> None:
        """Find the dependencies of ``libraries``, recursively."""
        pending = list(libraries)
        self.known.update({library.name: library for library in libraries if not library.folder})
        while pending and len(self.known) < _MAX_LIBRARIES:
            library = pending.pop()
            names = [*library.elf.needed, *(_OF_VERBS if library.name == VERBS else ())]
            for name in names:
                if name in self.known or is_of_libc(name):
                    continue
                origin = [path.replace("${ORIGIN}", "$ORIGIN") for path in library.elf.paths]
                near = [path.replace("$ORIGIN", library.directory) for path in origin]
                if dependency := self._find(name, [*near, *self._path, library.directory]):
                    pending.append(dependency)

    def _find(self, name: str, first: Iterable[str]) -> HostLibrary | None:
        """Return the library that the host's loader would load by name, or None. Skip files that users can change."""
        if self.known.get(name) is None:
            self.known[name] = next(self._opened(name, self._candidates(name, first)), None)
        return self.known[name]

    def _candidates(self, name: str, first: Iterable[str]) -> Iterator[str]:
        for directory in first:
            if directory.startswith("/") and "$" not in directory and "{" not in directory:
                yield f"{directory}/{name}"
        yield from self._cached.get(name, ())
        yield from (f"{directory}/{name}" for directory in (*USUAL, *VENDORS))

    def _opened(self, name: str, candidates: Iterable[str]) -> Iterator[HostLibrary]:
        """Yield the candidates that are libraries for this machine and that only an administrator can change."""
        for path in dict.fromkeys(candidates):
            real = self.host.real(path)
            if not real:
                continue
            try:
                with Fd(self._opened_file(real)) as fd:
                    library = elf.read(fd, API.get(name, ""))
            except (OSError, NotElf) as e:
                reason = e.strerror if isinstance(e, OSError) else e
                self.refused.setdefault(name, f"{self.host.path(real)}: {reason}")
                continue
            if library.machine == _MACHINE:
                yield HostLibrary(name, real, library)

    def _opened_file(self, real: str) -> int:
        return trusted.installed(self.host.path(real), self.host.prefix or "/")

    def _modules(self, directory: str, ending: str) -> list[HostLibrary]:
        """Return the modules in a directory: the files with this ``ending``, which a library of the host loads."""
        folder = directory.rpartition("/")[2]
        names = [name for name in self.host.list(directory) if name.endswith(ending)]
        listed = [library for name in names for library in self._opened(name, [f"{directory}/{name}"])]
        return [HostLibrary(library.name, library.path, library.elf, folder) for library in listed]

    def _plugin(self, variant: str) -> HostLibrary | None:
        """Return the NCCL plugin. Search a ``variant`` only in directories with {variant} in their name."""
        directories = (*self._path, *_PLUGIN_DIRECTORIES)
        fitting = [directory for directory in directories if ("{variant}" in directory) == bool(variant)]
        fitting = [directory.replace("{variant}", variant) for directory in fitting]
        for name in PLUGINS:
            usual = () if variant else self._candidates(name, ())
            if plugin := next(self._opened(name, [*(f"{directory}/{name}" for directory in fitting), *usual]), None):
                # With NCCL_NET_PLUGIN=ofi, NCCL loads this name even if the image has a plugin too.
                return HostLibrary(PLUGINS[0], plugin.path, plugin.elf)
        return None
