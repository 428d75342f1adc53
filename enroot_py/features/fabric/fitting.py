"""Check whether the host's network libraries fit an image, and add them to the container.

The image's loader loads the host's library, so the image's C library must provide every symbol version that the host's
library needs. A host library that replaces a library of the image must also provide all public symbol versions of
that library, since programs of the image may need them. Most dependencies come from the image if it has versions that
fit; libraries of drivers and of UCX come from the host.
"""

from __future__ import annotations

import os
import re
from itertools import islice

from enroot_py.base import elf, ldcache, log, paths
from enroot_py.base.elf import Elf, NotElf
from enroot_py.base.errors import HookError
from enroot_py.base.fds import Fd
from enroot_py.base.frozen import Frozen
from enroot_py.features.fabric.fabric import (
    API,
    LIBFABRIC,
    OF_LIBC,
    PLUGINS,
    UCX,
    USUAL,
    VENDORS,
    VERBS,
    is_cxi,
    is_of_libc,
)
from enroot_py.runtime.edits import Edits, library_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from enroot_py.features.fabric.fabric import FabricPart, HostLibrary, Stock, Want
    from enroot_py.runtime.hooks import Context

_LIBC = "libc.so.6"
# Libraries that use the private interface of a kernel driver. They are always the host's.
_OF_DRIVER = ("libcxi.so.1",)
_OF_UCX = (*UCX, "libucm.so.0", "libucs_signal.so.0")  # UCX libraries share private symbols
_RCCL = "librccl-net-ofi.so"  # the plugin's name for RCCL, AMD's NCCL
_MAX_DIRECTORIES, _MAX_COPIES = 32, 16  # directories in LD_LIBRARY_PATH; copies of a library


class ImageLibrary(Frozen):
    """A library of the image at its real path. If it is not ``seen`` by the loader, it is in a vendor's directory."""

    path: str
    elf: Elf
    seen: bool


class ImageLibraries:
    """The libraries of an image in the order of its loader: LD_LIBRARY_PATH, the cache, the usual directories."""

    def __init__(self, context: Context, names: Iterable[str]) -> None:
        self._context = context
        self._root = os.readlink(f"/proc/self/fd/{context.root}").rstrip("/")
        directories = context.environ.get("LD_LIBRARY_PATH", "").split(":")
        self._first = [path for path in directories if path.startswith("/")][:_MAX_DIRECTORIES]
        self._cached: dict[str, list[str]] = {}
        self._copies: dict[str, list[ImageLibrary]] = {}
        encoded_names = {name.encode("utf-8", "surrogateescape") for name in names}
        try:
            for flags, name, path in ldcache.find(context.read("/etc/ld.so.cache"), tuple(encoded_names)):
                listed = self._cached.setdefault(name, [])
                if flags & 0xFF00 and len(listed) < _MAX_COPIES:
                    listed.append(path)
        except ldcache.DAMAGE:
            pass  # then the loader searches only directories

    def copies(self, name: str) -> list[ImageLibrary]:
        """Return up to _MAX_COPIES copies of a library in the image, starting with the copy that programs load."""
        if name not in self._copies:
            seen = [f"{directory}/{name}" for directory in self._first] + self._cached.get(name, [])
            seen += [f"{directory}/{name}" for directory in USUAL]
            known: dict[str, ImageLibrary] = {}
            existing = (path for path in dict.fromkeys([*seen, *(f"{directory}/{name}" for directory in VENDORS)])
                     if self._context.exists(path))  # fmt: skip
            for path in islice(existing, _MAX_COPIES):
                if library := self._read(path, name, path in seen):
                    known.setdefault(library.path, library)
            self._copies[name] = list(known.values())
        return self._copies[name]

    def first(self, name: str) -> Elf | None:
        """Return the library that programs load by a name, or None."""
        return next((library.elf for library in self.copies(name) if library.seen), None)

    def _read(self, path: str, name: str, seen: bool) -> ImageLibrary | None:
        try:
            with Fd(paths.open_regular(self._context.root, path)) as fd:
                real = os.readlink(f"/proc/self/fd/{fd}")
                if real.startswith(f"{self._root}/"):
                    return ImageLibrary(real[len(self._root) :], elf.read(fd, API.get(name, "")), seen)
        except (OSError, NotElf):
            pass  # the loader cannot load it either
        return None


class Fit(Frozen):
    """The result for one part: the host's libraries to add (``brought``), or the ``reasons`` why it does not fit."""

    part: FabricPart
    brought: dict[str, HostLibrary]
    reasons: list[str]
    left_out: list[str]  # modules that do not fit, each with the reason


class Fitting:
    """Fit network libraries of the host into one image. ``added`` are the libraries added so far."""

    def __init__(self, context: Context, stock: Stock) -> None:
        self.context = context
        self.stock = stock
        libc = [f"{name}.so" for name in OF_LIBC]
        self.image = ImageLibraries(context, (*stock.known, LIBFABRIC, *PLUGINS, *UCX, *libc, "ld-"))
        self.added: dict[str, HostLibrary] = {}

    def fit(self, part: FabricPart) -> Fit:
        """Check whether a part fits beside the libraries added so far."""
        if part.lack:
            return Fit(part, {}, [part.lack], [])
        brought, reasons = self._with_dependencies(part.main, {})
        if reasons:
            return Fit(part, {}, reasons, [])
        left_out = self._extend(brought, part.modules)
        if VERBS in brought:
            left_out += self._extend(brought, filter(self._must_come_with_verbs, self.stock.verbs))
        return Fit(part, brought, [], left_out)

    def _extend(self, brought: dict[str, HostLibrary], modules: Iterable[HostLibrary]) -> list[str]:
        """Add the modules that fit and their dependencies to ``brought``. Return why each other module does not fit."""
        left_out = []
        for module in modules:
            dependencies, reasons = self._with_dependencies([module], brought)
            if reasons:
                left_out.append(f"{module.name}: {reasons[0]}")
            else:
                brought.update(dependencies)
        return left_out

    def _with_dependencies(
        self, libraries: Iterable[HostLibrary], before: dict[str, HostLibrary]
    ) -> tuple[dict[str, HostLibrary], list[str]]:
        """Return ``before`` plus ``libraries`` and their host dependencies, and the reasons why some do not fit."""
        brought, reasons = dict(before), []
        pending = list(libraries)
        while pending:
            library = pending.pop(0)
            if library.name in brought or library.name in self.added:
                continue
            brought[library.name] = library
            reasons += [f"{library.path} {reason}" for reason in self._mismatches(library)]
            for name in library.elf.needed:
                if is_of_libc(name) or name in brought or name in self.added or self._image_has(library, name):
                    continue
                if dependency := self.stock.known.get(name):
                    pending.append(dependency)
                else:
                    node, refusal = os.uname().nodename, self.stock.refused.get(name, "")
                    lack = f"{node}'s library cannot be used: {refusal}" if refusal else f"{node} has none"
                    reasons.append(f"{library.path} needs {name}, which the image lacks, and {lack}")
        return brought, list(dict.fromkeys(reasons))

    def _must_come_with_verbs(self, library: HostLibrary) -> bool:
        """Check whether a library is a driver, or replaces a copy that fits only the image's libibverbs."""
        return bool(library.folder or self.image.copies(library.name))

    def _image_has(self, library: HostLibrary, name: str) -> bool:
        """Check whether the image has the dependency ``name`` of a library, in the versions that the library needs."""
        image_library = self.image.first(name)
        if image_library is None or name in (*_OF_DRIVER, *_OF_UCX):
            return False
        return not image_library.versions or image_library.versions.issuperset(library.elf.needs.get(name, ()))

    def _mismatches(self, library: HostLibrary) -> Iterator[str]:
        """Yield reasons why the image cannot load a library, or why the library cannot replace the image's copies."""
        libc = self.image.first(_LIBC)
        if libc is None:
            yield f"needs {_LIBC}, and the image has no glibc"
            return
        if libc.machine != library.elf.machine:
            yield f"is for {library.elf.machine}, but the image is for {libc.machine}"
            return
        for name, versions in library.elf.needs.items():
            if not is_of_libc(name):
                continue
            image_library = self.image.first(name)
            if image_library is None:
                yield f"needs {name}, which the image's C library lacks"
            elif missing := set(versions) - image_library.versions:
                available = newest(image_library.versions, "GLIBC_")
                limit = f"only up to {available}" if image_library.versions else "no versions"
                yield f"needs {newest(missing)} of {name}, but the image provides {limit}"
        for copy in self.image.copies(library.name):
            public = {each for each in copy.elf.versions - library.elf.versions if "_PRIVATE" not in each}
            if removed := public or copy.elf.symbols - library.elf.symbols:
                yield f"lacks {newest(removed)}, which programs of the image may need from {copy.path}"

    def add(self, edits: Edits, fit: Fit) -> dict[str, HostLibrary]:
        """Add the libraries that fit. Return the main libraries by their paths in the container."""
        placed: dict[str, HostLibrary] = {}
        target = library_directory(self.context, 64)
        for name, library in fit.brought.items():
            if library.folder:
                for directory in self._parents(library, placed):
                    edits.file(self.stock.host, library.path, f"{directory}/{library.folder}/{name}")
                continue
            copies = self.image.copies(name)
            covered = [copy.path for copy in copies]
            if not any(copy.seen for copy in copies):
                covered.insert(0, f"{target}/{name}")
                edits.libraries.append((ldcache.NATIVE, name, covered[0]))
            for path in covered:
                edits.file(self.stock.host, library.path, path)
            if library in fit.part.main:
                placed[covered[0]] = library
        folders = {library.folder for library in fit.brought.values()}
        environ = {}
        if fit.part.want.part == "nccl":
            environ["NCCL_NET_PLUGIN"] = "ofi"
            edits.links[f"{target}/{_RCCL}"] = next(iter(placed))
        if "libfabric" in folders:
            environ["FI_PROVIDER_PATH"] = f"{target}/libfabric"
        elif fit.part.want.part == "libfabric" and "FI_PROVIDER_PATH" in self.context.environ:
            environ["FI_PROVIDER_PATH"] = ""  # the image's providers belong to the image's libfabric
        for path in self.stock.configured if "libibverbs" in folders else ():
            edits.file(self.stock.host, path)
        if "ucx" in folders:  # hide the image's modules: they belong to another release
            edits.tmpfs += {f"{path.rpartition('/')[0]}/ucx" for path in placed}
            environ["UCX_MODULE_DIR"] = f"{next(iter(placed)).rpartition('/')[0]}/ucx"
        # Override the image's variables, but not the user's.
        edits.environ.update({name: value for name, value in environ.items() if name not in self.context.host})
        self.added.update(fit.brought)
        return placed

    def _parents(self, module: HostLibrary, placed: dict[str, HostLibrary]) -> set[str]:
        """Return the directories in which a main library looks for the folder of a module."""
        if module.folder == "ucx":
            return {path.rpartition("/")[0] for path in placed}
        verbs = self.stock.known.get(VERBS)
        if module.folder == "libibverbs" and verbs:
            return {verbs.directory}  # this path is compiled into libibverbs
        return {library_directory(self.context, 64)}


def newest(versions: Iterable[str], prefix: str = "") -> str:
    """Return the version with the highest number among those that begin with ``prefix``, or ""."""
    named = [each for each in versions if each.startswith(prefix) and each[len(prefix) :][:1].isdigit() or not prefix]
    return max(named or [""], key=lambda each: ([int(n) for n in re.findall(r"\d{1,9}", each)], each))


def add_parts(context: Context, stock: Stock, parts: list[FabricPart]) -> None:
    """Add the ``parts`` that fit. Raises HookError if a required part does not fit."""
    fitting = Fitting(context, stock)
    edits = Edits("99-fabric")
    placed = {}
    for part in parts:
        fit = fitting.fit(part)
        if fit.reasons:
            refuse(part.want, fit.reasons[0])
            continue
        report = log.explain or log.debug
        report(f"fabric   {part.want.part} of {os.uname().nodename}: {part.main[0].path}  ({part.want.origin})")
        for reason in fit.left_out:
            report(f"without  {reason}")
        placed.update({path: (part.want, library) for path, library in fitting.add(edits, fit).items()})
    if placed:
        add_nodes(context, stock, edits)
    edits.execute(context)
    for path, (want, library) in placed.items():
        if not _is_mounted(context, path, stock.host.path(library.path)):
            refuse(want, f"cannot mount it on {path}")


def refuse(want: Want, reason: str) -> None:
    """Warn of a part that does not fit. Raises HookError if the part is required."""
    message = f"cannot add {want.part} of {os.uname().nodename} to the image: {reason}"
    if want.required:
        hint = f"for details: penroot fabric IMAGE; to start without: {want.without}"
        raise HookError(f"{message} ({want.origin})", hint=hint)
    log.warn(f"{message}; using the image's library, if any")


def _is_mounted(context: Context, path: str, source: str) -> bool:
    try:
        with paths.open_in(context.root, path) as fd:
            return os.path.samestat(os.fstat(fd), os.stat(source))
    except OSError:
        return False


def add_nodes(context: Context, stock: Stock, edits: Edits) -> None:
    """Add the Slingshot devices that Slurm allocated, or all of them if Slurm lists none.

    Also add all verbs devices, unless MELLANOX_VISIBLE_DEVICES is set: then 99-mellanox selects them.
    """
    allocated = context.host.get("SLINGSHOT_DEVICES", "").replace(",", " ").split()
    for name in stock.host.list("/dev"):
        if is_cxi(name) and (not allocated or name in allocated):
            edits.node(stock.host, f"/dev/{name}")
    if not context.value("MELLANOX_VISIBLE_DEVICES"):
        for name in stock.host.list("/dev/infiniband"):
            if name.startswith("uverbs") or name == "rdma_cm":
                edits.node(stock.host, f"/dev/infiniband/{name}")
