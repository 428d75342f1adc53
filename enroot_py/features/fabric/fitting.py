"""Whether libraries of the host's network fit an image, and what a container gets where they do.

A library of the host is loaded beside the image's, by the image's C library. So that has to have each version of a
symbol that it asks for; and where it takes the place of one of the image's, it has to give all versions that that
gives, since programs of the image may ask for them. What it needs and the image has is the image's.
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
# Those that speak to a driver of the kernel in its own words: the host's, whatever the image has.
_OF_DRIVER = ("libcxi.so.1",)
_OF_UCX = (*UCX, "libucm.so.0", "libucs_signal.so.0")  # which use what is private in each other
_RCCL = "librccl-net-ofi.so"  # as AMD's NCCL calls the plugin
_MOST_DIRECTORIES, _MOST_COPIES = 32, 16  # that an image may name, or have of one library


class ImageLibrary(Frozen):
    """A library of the image, where it really is; ``seen`` by the loader, or only where vendors put it."""

    path: str
    elf: Elf
    seen: bool


class ImageLibraries:
    """The libraries of an image, as its loader finds them: LD_LIBRARY_PATH, its cache, its directories."""

    def __init__(self, context: Context, names: Iterable[str]) -> None:
        self._context = context
        self._root = os.readlink(f"/proc/self/fd/{context.root}").rstrip("/")
        said = context.environ.get("LD_LIBRARY_PATH", "").split(":")
        self._first = [path for path in said if path.startswith("/")][:_MOST_DIRECTORIES]
        self._cached: dict[str, list[str]] = {}
        self._copies: dict[str, list[ImageLibrary]] = {}
        wanted = {name.encode("utf-8", "surrogateescape") for name in names}
        try:
            for flags, name, path in ldcache.find(context.read("/etc/ld.so.cache"), tuple(wanted)):
                listed = self._cached.setdefault(name, [])
                if flags & 0xFF00 and len(listed) < _MOST_COPIES:
                    listed.append(path)
        except ldcache.DAMAGE:
            pass  # the loader looks in its directories then

    def copies(self, name: str) -> list[ImageLibrary]:
        """All that there are of a library, the one that programs get first."""
        if name not in self._copies:
            seen = [f"{directory}/{name}" for directory in self._first] + self._cached.get(name, [])
            seen += [f"{directory}/{name}" for directory in USUAL]
            known: dict[str, ImageLibrary] = {}
            there = (path for path in dict.fromkeys([*seen, *(f"{directory}/{name}" for directory in VENDORS)])
                     if self._context.exists(path))  # fmt: skip
            for path in islice(there, _MOST_COPIES):
                if library := self._read(path, name, path in seen):
                    known.setdefault(library.path, library)
            self._copies[name] = list(known.values())
        return self._copies[name]

    def first(self, name: str) -> Elf | None:
        """The library that programs get by a name."""
        return next((library.elf for library in self.copies(name) if library.seen), None)

    def _read(self, path: str, name: str, seen: bool) -> ImageLibrary | None:
        try:
            with Fd(paths.open_regular(self._context.root, path)) as fd:
                real = os.readlink(f"/proc/self/fd/{fd}")
                if real.startswith(f"{self._root}/"):
                    return ImageLibrary(real[len(self._root) :], elf.read(fd, API.get(name, "")), seen)
        except (OSError, NotElf):
            pass  # what the loader cannot load, nobody has
        return None


class Fit(Frozen):
    """What becomes of a part: ``brought`` are the libraries of the host, by name; or why it does not fit."""

    part: FabricPart
    brought: dict[str, HostLibrary]
    reasons: list[str]
    left_out: list[str]  # modules that do not fit, with why


class Fitting:
    """Parts of a host's network on their way into one image."""

    def __init__(self, context: Context, stock: Stock) -> None:
        self.context = context
        self.stock = stock
        libc = [f"{name}.so" for name in OF_LIBC]
        self.image = ImageLibraries(context, (*stock.known, LIBFABRIC, *PLUGINS, *UCX, *libc, "ld-"))
        self.given: dict[str, HostLibrary] = {}

    def fit(self, part: FabricPart) -> Fit:
        """Whether a part fits beside those that are given already."""
        if part.lack:
            return Fit(part, {}, [part.lack], [])
        brought, reasons = self._close(part.main, {})
        if reasons:
            return Fit(part, {}, reasons, [])
        left_out = self._extend(brought, part.modules)
        if VERBS in brought:
            left_out += self._extend(brought, filter(self._comes_with_verbs, self.stock.verbs))
        return Fit(part, brought, [], left_out)

    def _extend(self, brought: dict[str, HostLibrary], modules: Iterable[HostLibrary]) -> list[str]:
        """Add those modules that fit, with what they need; the others, with what speaks against them."""
        left_out = []
        for module in modules:
            more, reasons = self._close([module], brought)
            if reasons:
                left_out.append(f"{module.name}: {reasons[0]}")
            else:
                brought.update(more)
        return left_out

    def _close(
        self, libraries: Iterable[HostLibrary], before: dict[str, HostLibrary]
    ) -> tuple[dict[str, HostLibrary], list[str]]:
        """The libraries that come into the image with these, and what speaks against them."""
        brought, reasons = dict(before), []
        pending = list(libraries)
        while pending:
            library = pending.pop(0)
            if library.name in brought or library.name in self.given:
                continue
            brought[library.name] = library
            reasons += [f"{library.path} {why}" for why in self._against(library)]
            for name in library.elf.needed:
                if is_of_libc(name) or name in brought or name in self.given or self._has(library, name):
                    continue
                if other := self.stock.known.get(name):
                    pending.append(other)
                else:
                    node, why = os.uname().nodename, self.stock.refused.get(name, "")
                    lack = f"{node}'s cannot be used: {why}" if why else f"{node} has none"
                    reasons.append(f"{library.path} needs {name}, which the image lacks, and {lack}")
        return brought, list(dict.fromkeys(reasons))

    def _comes_with_verbs(self, library: HostLibrary) -> bool:
        """A driver, or a library of which the image has one that goes with its own libibverbs."""
        return bool(library.folder or self.image.copies(library.name))

    def _has(self, library: HostLibrary, name: str) -> bool:
        """Whether the image has what a library needs, in the versions that it asks for."""
        ours = self.image.first(name)
        if ours is None or name in (*_OF_DRIVER, *_OF_UCX):
            return False
        return not ours.versions or ours.versions.issuperset(library.elf.needs.get(name, ()))

    def _against(self, library: HostLibrary) -> Iterator[str]:
        """Why a library could not be loaded in the image, or not in the place of the image's."""
        libc = self.image.first(_LIBC)
        if libc is None:
            yield f"needs {_LIBC}, and the image has no glibc"
            return
        if libc.machine != library.elf.machine:
            yield f"is for {library.elf.machine}, and the image for {libc.machine}"
            return
        for name, versions in library.elf.needs.items():
            if not is_of_libc(name):
                continue
            ours = self.image.first(name)
            if ours is None:
                yield f"needs {name}, which the image's C library lacks"
            elif missing := set(versions) - ours.versions:
                there = f"{newest(ours.versions, 'GLIBC_')} at most" if ours.versions else "no versions"
                yield f"needs {newest(missing)} of {name}, and the image's has {there}"
        for copy in self.image.copies(library.name):
            theirs = {each for each in copy.elf.versions - library.elf.versions if "_PRIVATE" not in each}
            if gone := theirs or copy.elf.symbols - library.elf.symbols:
                yield f"lacks {newest(gone)}, which programs may need of the image's {copy.path}"

    def add(self, edits: Edits, fit: Fit) -> dict[str, HostLibrary]:
        """Let a container have what fits; its main libraries, by where they then are."""
        placed: dict[str, HostLibrary] = {}
        target = library_directory(self.context, 64)
        for name, library in fit.brought.items():
            if library.folder:
                for place in self._beside(library, placed):
                    edits.file(self.stock.host, library.path, f"{place}/{library.folder}/{name}")
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
        said = {}
        if fit.part.want.part == "nccl":
            said["NCCL_NET_PLUGIN"] = "ofi"
            edits.links[f"{target}/{_RCCL}"] = next(iter(placed))
        if "libfabric" in folders:
            said["FI_PROVIDER_PATH"] = f"{target}/libfabric"
        elif fit.part.want.part == "libfabric" and "FI_PROVIDER_PATH" in self.context.environ:
            said["FI_PROVIDER_PATH"] = ""  # the image's providers are for the image's
        for path in self.stock.configured if "libibverbs" in folders else ():
            edits.file(self.stock.host, path)
        if "ucx" in folders:  # the image's own there would be of another release
            edits.tmpfs += {f"{path.rpartition('/')[0]}/ucx" for path in placed}
            said["UCX_MODULE_DIR"] = f"{next(iter(placed)).rpartition('/')[0]}/ucx"
        # Over what the image says; what the user says goes before, and comes later.
        edits.environ.update({name: value for name, value in said.items() if name not in self.context.host})
        self.given.update(fit.brought)
        return placed

    def _beside(self, module: HostLibrary, placed: dict[str, HostLibrary]) -> set[str]:
        """Above which directories a library looks for what it loads."""
        if module.folder == "ucx":
            return {path.rpartition("/")[0] for path in placed}
        verbs = self.stock.known.get(VERBS)
        if module.folder == "libibverbs" and verbs:
            return {verbs.directory}  # it was built with its path
        return {library_directory(self.context, 64)}


def newest(versions: Iterable[str], prefix: str = "") -> str:
    """The version with the highest number."""
    named = [each for each in versions if each.startswith(prefix) and each[len(prefix) :][:1].isdigit() or not prefix]
    return max(named or [""], key=lambda each: ([int(n) for n in re.findall(r"\d{1,9}", each)], each))


def bring(context: Context, stock: Stock, parts: list[FabricPart]) -> None:
    """Give the container those of ``parts`` that fit. Raises HookError for one that does not and is required."""
    fitting = Fitting(context, stock)
    edits = Edits("99-fabric")
    placed = {}
    for part in parts:
        fit = fitting.fit(part)
        if fit.reasons:
            refuse(part.want, fit.reasons[0])
            continue
        say = log.explain or log.debug
        say(f"fabric   {part.want.part} of {os.uname().nodename}: {part.main[0].path}  ({part.want.origin})")
        for why in fit.left_out:
            say(f"without  {why}")
        placed.update({path: (part.want, library) for path, library in fitting.add(edits, fit).items()})
    if placed:
        add_nodes(context, stock, edits)
    edits.execute(context)
    for path, (want, library) in placed.items():
        if not _is_there(context, path, stock.host.path(library.path)):
            refuse(want, f"it cannot be put there as {path}")


def refuse(want: Want, why: str) -> None:
    """Say why a part does not come. Raises HookError where it is required."""
    message = f"{want.part} of {os.uname().nodename} does not come into the image: {why}"
    if want.required:
        raise HookError(f"{message} ({want.origin})", hint=f"penroot fabric IMAGE says more; without: {want.without}")
    log.warn(f"{message}; the image's own is used, if it has one")


def _is_there(context: Context, path: str, source: str) -> bool:
    try:
        with paths.open_in(context.root, path) as fd:
            return os.path.samestat(os.fstat(fd), os.stat(source))
    except OSError:
        return False


def add_nodes(context: Context, stock: Stock, edits: Edits) -> None:
    """The devices of the network: Slingshot's that Slurm names, and those of verbs where 99-mellanox has no choice."""
    said = context.host.get("SLINGSHOT_DEVICES", "").replace(",", " ").split()
    for name in stock.host.list("/dev"):
        if is_cxi(name) and (not said or name in said):
            edits.node(stock.host, f"/dev/{name}")
    if not context.value("MELLANOX_VISIBLE_DEVICES"):
        for name in stock.host.list("/dev/infiniband"):
            if name.startswith("uverbs") or name == "rdma_cm":
                edits.node(stock.host, f"/dev/infiniband/{name}")
