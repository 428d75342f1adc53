"""The host's libraries for its network: which are asked for, and which it has, with all that they need.

All of it happens before a container's namespaces are entered, where it can be seen whose the files are. What of it fits
an image, fitting.py decides. Sources of names: docs.cscs.ch, "Hooks and native resources"; aws-ofi-nccl, README;
fi_provider(7); UCX, ucs_module.
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
API = {UCX[0]: "ucp_"}  # symbols that have to stay, of libraries without versions
_MACHINE = os.uname().machine
USUAL = (f"/usr/lib/{_MACHINE}-linux-gnu", f"/lib/{_MACHINE}-linux-gnu", "/usr/lib64", "/lib64", "/usr/lib", "/lib")
# Where vendors put them, beside the loader's directories; on hosts and in images.
VENDORS = (
    *("/opt/amazon/efa/lib64", "/opt/amazon/efa/lib", "/opt/cray/lib64", "/usr/local/lib", "/usr/local/lib64"),
    *("/opt/hpcx/ucx/lib", "/opt/ucx/lib", "/opt/libfabric/lib"),
)
_PLUGIN_DIRECTORIES = (
    *("/opt/aws-ofi-nccl/{variant}/lib", "/opt/aws-ofi-nccl/lib/{variant}", "/opt/aws-ofi-nccl/lib"),
    *(f"/opt/amazon/ofi-nccl/lib/{_MACHINE}-linux-gnu", "/opt/amazon/ofi-nccl/lib64", "/opt/amazon/ofi-nccl/lib"),
)
# Libraries that share private symbols with libibverbs, which change with each release: they come with it.
_OF_VERBS = tuple(f"lib{name}.so.1" for name in ("rdmacm", "efa", "mlx4", "mlx5", "mana", "hns", "ibumad"))
OF_LIBC = (
    *("libc", "libm", "libmvec", "libpthread", "libdl", "librt", "libutil", "libresolv", "libanl", "libnsl"),
    *("libBrokenLocale", "libthread_db", "libnss_files", "libnss_dns", "libc_malloc_debug"),
)
_CONFIGURED = "/etc/libibverbs.d"
_MOST = 512  # libraries that a fabric needs
CXI, OFI_NCCL = "com.hooks.cxi.enabled", "com.hooks.aws_ofi_nccl.enabled"
_VARIANT = "com.hooks.aws_ofi_nccl.variant"


def is_cxi(name: str) -> bool:
    """Whether a name in /dev is that of an adapter of Slingshot."""
    return name.startswith("cxi") and name[3:].isdecimal()


def is_of_libc(name: str) -> bool:
    """Whether a library is of the C library or its loader: an image's, always."""
    stem = name.partition(".so")[0]
    return stem in OF_LIBC or stem.startswith(("ld-", "ld64", "ld."))


class Want(Frozen):
    """One of libfabric, ucx and nccl, what asks for it, and how to do without; the plugin may be of a ``variant``."""

    part: str
    origin: str
    required: bool
    without: str
    variant: str = ""


def wanted(settings: Settings, host: Mapping[str, str]) -> list[Want]:
    """What settings and annotations ask for: these go before those. Raises HookError for one that makes no sense."""
    lines = host.get("PENROOT_ANNOTATIONS", "").split("\n")
    said = dict(line.split("=", 1) for line in lines if "=" in line)
    cxi, plugin = _flag(said, CXI), _flag(said, OFI_NCCL)
    by_annotation = {
        "libfabric": (cxi, CXI) if cxi is not None or not plugin else (plugin, OFI_NCCL),
        "ucx": (None, ""),
        "nccl": (plugin, OFI_NCCL),
    }
    variant = said.get(_VARIANT, "").strip()
    if plugin and (variant.startswith(".") or not (variant + "0").replace("-", "").replace(".", "").isalnum()):
        raise HookError(f"{_VARIANT}={shown(variant)} is no name of a variant", hint='for example "cuda12"')
    fabric, wants = FabricSettings(settings), []
    for part, (asked, origin) in by_annotation.items():
        if asked:
            wants.append(Want(part, origin, True, f'{origin} = "false"', variant if part == "nccl" else ""))
        elif asked is None and part in fabric.fabric:
            where = f"ENROOT_FABRIC, {settings.origin(SETTINGS['ENROOT_FABRIC'])}"
            without = "ENROOT_FABRIC without it, or ENROOT_FABRIC_UNFIT=warn"
            wants.append(Want(part, where, fabric.fabric_unfit == "error", without))
    return wants


def _flag(said: Mapping[str, str], name: str) -> bool | None:
    """What an annotation says, or None where there is none. Raises HookError."""
    try:
        return true_or_false(said.get(name, ""))
    except ValueError as e:
        message = f"the annotation {name}={shown(str(e))} is no truth value"
        raise HookError(message, hint=f'{name} = "true"') from None


class HostLibrary(Frozen):
    """A library of the host: the name that others ask for, where it really is, and what is in it.

    One that others load themselves is in a ``folder`` beside them.
    """

    name: str
    path: str
    elf: Elf
    folder: str = ""

    @property
    def directory(self) -> str:
        return self.path.rpartition("/")[0]


class FabricPart(Frozen):
    """What the host has of one of libfabric, ucx and nccl: the libraries themselves, and those that they load.

    These are in a directory of their own. ``lack`` says why there is nothing.
    """

    want: Want
    main: tuple[HostLibrary, ...] = ()
    modules: tuple[HostLibrary, ...] = ()
    lack: str = ""


class Stock:
    """What a host has: ``known`` are the libraries that its fabric needs, by name, and those that it has not.

    With libibverbs go libraries and drivers, ``verbs``, and the files in which these are ``configured``.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self.host = Host.of(environ)
        self.known: dict[str, HostLibrary | None] = {}
        self.refused: dict[str, str] = {}  # by name: why a file of that name is not used
        self.verbs: list[HostLibrary] = []
        self.configured: list[str] = []
        self._path = FabricSettings(settings).fabric_path
        self._cached: dict[str, list[str]] = {}
        try:
            for flags, name, path in ldcache.find(self.host.read("/etc/ld.so.cache"), (b"lib",)):
                if flags & 0xFF00:
                    self._cached.setdefault(name, []).append(path)
        except ldcache.DAMAGE:
            pass  # libraries are where they usually are

    def part(self, want: Want) -> FabricPart:
        """What there is of a part, and of all that it needs."""
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
            if passed_over := self.refused.get(library.name):
                log.warn(f"99-fabric: not used: {passed_over}")
        self._close([*libraries, *modules])
        self._add_verbs()
        return FabricPart(want, libraries, tuple(modules))

    def _lack(self, want: Want, names: Iterable[str]) -> str:
        names = names or PLUGINS
        refused = [self.refused[name] for name in names if name in self.refused]
        if refused:
            return f"{os.uname().nodename} has none that could be used: {refused[0]}"
        missing = [name for name in names if not self.known.get(name)]
        of = f", variant {want.variant}," if want.variant else ""
        where = ":".join(self._path) or "its loader's directories"
        there = f"; it has {', '.join(variants)}" if want.part == "nccl" and (variants := self._variants()) else ""
        return f"{os.uname().nodename} has no {missing[0]}{of} in {where} or in the vendors' directories{there}"

    def _variants(self) -> list[str]:
        """The variants of the plugin that there are."""
        names = set()
        for place in (*self._path, *_PLUGIN_DIRECTORIES):
            above, variant, below = place.partition("{variant}")
            for name in self.host.list(above) if variant else ():
                if any(self.host.exists(f"{above}{name}{below}/{plugin}") for plugin in PLUGINS):
                    names.add(f"variant {name}")
        return sorted(names)

    def _add_verbs(self) -> None:
        """The drivers of libibverbs, which it loads as files tell it, and libraries that share its private symbols."""
        verbs = self.known.get(VERBS)
        if verbs is None or self.verbs:
            return
        self.verbs = self._modules(f"{verbs.directory}/libibverbs", ".so")
        self._close(self.verbs)
        self.verbs += [library for name in _OF_VERBS if (library := self.known.get(name))]
        for name in self.host.list(_CONFIGURED):
            real = self.host.real(f"{_CONFIGURED}/{name}")
            try:
                os.close(self._opened_file(real))
            except OSError:
                continue  # as a driver that is not there
            self.configured.append(real)

    def _close(self, libraries: list[HostLibrary]) -> None:
        """Find all that these need, and what those need: what the image then lacks of it comes along."""
        pending = list(libraries)
        self.known.update({library.name: library for library in libraries if not library.folder})
        while pending and len(self.known) < _MOST:
            library = pending.pop()
            names = [*library.elf.needed, *(_OF_VERBS if library.name == VERBS else ())]
            for name in names:
                if name in self.known or is_of_libc(name):
                    continue
                origin = [path.replace("${ORIGIN}", "$ORIGIN") for path in library.elf.paths]
                near = [path.replace("$ORIGIN", library.directory) for path in origin]
                if found := self._find(name, [*near, *self._path, library.directory]):
                    pending.append(found)

    def _find(self, name: str, first: Iterable[str]) -> HostLibrary | None:
        """The library that programs of the host would get by a name; None where there is none that is root's."""
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
        """Those of some paths that are libraries for this machine and belong to who installs software there."""
        for path in dict.fromkeys(candidates):
            real = self.host.real(path)
            if not real:
                continue
            try:
                with Fd(self._opened_file(real)) as fd:
                    library = elf.read(fd, API.get(name, ""))
            except (OSError, NotElf) as e:
                why = e.strerror if isinstance(e, OSError) else e
                self.refused.setdefault(name, f"{self.host.path(real)}: {why}")
                continue
            if library.machine == _MACHINE:
                yield HostLibrary(name, real, library)

    def _opened_file(self, real: str) -> int:
        return trusted.installed(self.host.path(real), self.host.prefix or "/")

    def _modules(self, directory: str, ending: str) -> list[HostLibrary]:
        """The libraries in a directory from which one of the host's loads what it needs."""
        folder = directory.rpartition("/")[2]
        names = [name for name in self.host.list(directory) if name.endswith(ending)]
        listed = [library for name in names for library in self._opened(name, [f"{directory}/{name}"])]
        return [HostLibrary(library.name, library.path, library.elf, folder) for library in listed]

    def _plugin(self, variant: str) -> HostLibrary | None:
        """The plugin of NCCL, of a variant where one is named, which then has to be in a directory's name."""
        places = (*self._path, *_PLUGIN_DIRECTORIES)
        fitting = [place for place in places if ("{variant}" in place) == bool(variant)]
        fitting = [place.replace("{variant}", variant) for place in fitting]
        for name in PLUGINS:
            usual = () if variant else self._candidates(name, ())
            if found := next(self._opened(name, [*(f"{place}/{name}" for place in fitting), *usual]), None):
                # By this name NCCL finds it in any image, with NCCL_NET_PLUGIN=ofi, beside a plugin of the image's.
                return HostLibrary(PLUGINS[0], found.path, found.elf)
        return None
