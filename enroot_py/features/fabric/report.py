"""``penroot fabric``: which network libraries programs of an image get, the image's or the host's, and why."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator

from enroot_py.base import log
from enroot_py.base.errors import ContainerError, PenrootError
from enroot_py.base.fds import Fd
from enroot_py.cli import start
from enroot_py.config.settings import Settings
from enroot_py.features.fabric import fabric
from enroot_py.features.fabric.fabric import LIBFABRIC, PARTS, PLUGINS, UCX, FabricPart, Stock, Want
from enroot_py.features.fabric.fitting import Fit, Fitting, ImageLibraries
from enroot_py.runtime import hooks
from enroot_py.runtime.edits import Host, shown
from enroot_py.runtime.execute import Container
from enroot_py.runtime.rootfs import Source
from enroot_py.runtime.supervise import fork, wait

# What a libfabric that needs a library has built in: fi_provider(7); and what modules of Open MPI are for.
_PROVIDERS = {
    "libcxi.so.1": "cxi",
    "libefa.so.1": "efa",
    "librdmacm.so.1": "verbs",
    "libpsm2.so.2": "psm2",
    "libpsm_infinipath.so.1": "psm",
    "libucp.so.0": "ucx",
}
_COMPONENTS = {"mca_mtl_ofi.so": "libfabric", "mca_btl_ofi.so": "libfabric", "mca_pml_ucx.so": "UCX"}
_MPI = ("libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi_cray.so.12")
_OF_MPI = ("libopen-pal.so.40", "libopen-pal.so.80")
_MAIN = {"libfabric": LIBFABRIC, "ucx": UCX[0]}
_ASKING = {"libfabric": fabric.CXI, "nccl": fabric.OFI_NCCL}
_EFA = b"0x1d0f"  # Amazon's vendor, in sysfs
_WITHOUT = {
    "libfabric": "programs built for it do not start",
    "ucx": "programs built for it do not start",
    "nccl": "NCCL uses its own transports: InfiniBand verbs, or sockets",
}
_UNFIT = 3  # the status of a child that found so


def report(options: start.Options) -> None:
    """Print what the container of a command line gets, or without one what there is to get.

    Raises ContainerError where it would not start, and PenrootError.
    """
    start.read_description(options, "start")
    settings = start.read_settings(options, batch=False)
    host = {**settings.passed_on, **os.environ, **(options.file.host if options.file else {})}
    asked = {want.part: want for want in fabric.wanted(settings, host)}
    stock = Stock(settings, host)
    parts = [stock.part(asked.get(part) or Want(part, "", False, "")) for part in PARTS]
    there = [f"{path} ({provider})" for provider, path in _devices(stock.host)]
    _say("node", [f"{os.uname().nodename}: {', '.join(there) or 'no device of Slingshot, EFA or InfiniBand'}"])
    if not options.target:
        for part in parts:
            _say(part.want.part, [part.lack or part.main[0].path])
        return
    source = start.find(options.target, settings)
    caller = hooks.caller(host, os.geteuid(), os.getegid())
    sys.stdout.flush()
    child = fork()
    if child:
        if status := wait(child):
            why = "requests libraries that do not fit" if status == _UNFIT else "fails as shown above"
            raise ContainerError(
                f"the start of {options.target} {why}", hint="penroot start --explain lists everything"
            )
        return
    status = 1
    try:
        container = _entered(source, settings, options)
        with Fd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
            context = hooks.Context(root, "/", settings, container.environ, caller)
            status = 0 if _look(context, stock, parts) else _UNFIT
        sys.stdout.flush()
    except PenrootError as e:
        log.error(str(e))
        if e.hint:
            log.hint(e.hint)
    os._exit(status)


def _entered(source: Source, settings: Settings, options: start.Options) -> Container:
    """The container as it is without anything of the host's network."""
    os.environ.pop("PENROOT_ANNOTATIONS", None)
    if options.file:
        options.file.host = {}
    return start.entered(source, settings.replace("penroot fabric", fabric="", rootfs_writable=False), options)


def _look(context: hooks.Context, stock: Stock, parts: Iterable[FabricPart]) -> bool:
    """Print what the image has of each part, and what becomes of the host's."""
    fitting, good = Fitting(context, stock), True
    for part in parts:
        fit = fitting.fit(part)
        if part.want.origin and not fit.reasons:
            fitting.given.update(fit.brought)
        good = good and not (fit.reasons and part.want.required)
        _say(part.want.part, [*_verdict(fitting, fit), *_ways(fitting, fit, stock.host)])
    _say("mpi", list(_mpi(context)))
    return good


def _verdict(fitting: Fitting, fit: Fit) -> Iterator[str]:
    """Whose library programs get, and why."""
    part, want = fit.part, fit.part.want
    names = _plugins(fitting.context) if want.part == "nccl" else [_MAIN[want.part]]
    image = next((copy for name in names for copy in fitting.image.copies(name) if copy.seen), None)
    if want.origin and not fit.reasons:
        place = f"in place of the image's {image.path}" if image else "which the image lacks"
        if image and want.part == "nccl":
            place = f"beside the image's {image.path}"
        yield f"the host's {part.main[0].path}, {place}: asked for by {want.origin}"
        main = {library.name for library in part.main}
        if others := [each.name for each in fit.brought.values() if not each.folder and each.name not in main]:
            yield f"with it come {', '.join(sorted(others))}"
        yield from (f"left out: {why}" for why in fit.left_out)
        return
    yield f"the image's {image.path}" if image else f"none: {_WITHOUT[want.part]}"
    if not fit.reasons:
        asking = f', or {_ASKING[want.part]} = "true"' if want.part in _ASKING else ""
        yield f"the host's {part.main[0].path} would fit: ENROOT_FABRIC={want.part}{asking}"
        return
    which = "the host's would not come"
    if want.origin:
        which = f"{want.origin} asks for the host's: {'an error' if want.required else 'a warning'}"
    yield from (f"{which}: {why}" for why in fit.reasons)


def _plugins(context: hooks.Context) -> list[str]:
    """The names under which NCCL looks for its plugin."""
    said = context.environ.get("NCCL_NET_PLUGIN", "")
    return [said, f"libnccl-net-{said}.so"] if said else [PLUGINS[1]]


def _ways(fitting: Fitting, fit: Fit, host: Host) -> Iterator[str]:
    """Which provider there is for each device, in the libfabric that programs get."""
    if fit.part.want.part != "libfabric":
        return
    copies = [copy for copy in fitting.image.copies(LIBFABRIC) if copy.seen]
    if fit.part.want.origin and not fit.reasons:
        library, modules = fit.part.main[0].elf, [each.name for each in fit.brought.values() if each.folder]
    elif copies:
        library = copies[0].elf
        modules = fitting.context.list(f"{copies[0].path.rpartition('/')[0]}/libfabric")
    else:
        return
    have = {name for needed, name in _PROVIDERS.items() if needed in library.needed}
    have |= {name[3:-6] for name in modules if name.startswith("lib") and name.endswith("-fi.so")}
    yield f"providers: {', '.join(sorted({*have, 'tcp'}))}"
    if chosen := fitting.context.environ.get("FI_PROVIDER"):
        yield f"FI_PROVIDER={shown(chosen)} is set, and it takes no other"
    for provider, path in _devices(host):
        if provider not in have:
            yield f"none for {path}, which needs {provider}: programs go another way, as by tcp"


def _devices(host: Host) -> Iterator[tuple[str, str]]:
    """The network devices of the node, with the provider of libfabric that each is for."""
    for name in host.list("/dev"):
        if fabric.is_cxi(name):
            yield "cxi", f"/dev/{name}"
    for name in host.list("/sys/class/infiniband_verbs"):
        if name.startswith("uverbs"):
            vendor = host.read(f"/sys/class/infiniband_verbs/{name}/device/vendor").strip()
            yield "efa" if vendor == _EFA else "verbs", f"/dev/infiniband/{name}"


def _mpi(context: hooks.Context) -> Iterator[str]:
    """What the MPI of the image can go by, as what it needs and its modules tell."""
    image = ImageLibraries(context, (*_MPI, *_OF_MPI))
    for name in _MPI:
        for copy in image.copies(name)[:1]:
            inner = [library.needed for each in _OF_MPI if (library := image.first(each))]
            needed = {each for names in (copy.elf.needed, *inner) for each in names}
            ways = {way for each, way in ((LIBFABRIC, "libfabric"), (UCX[0], "UCX")) if each in needed}
            above = copy.path.rpartition("/")[0]
            for folder in ("openmpi", "openmpi/lib/openmpi3", "openmpi/lib/openmpi", "../openmpi3"):
                ways |= {_COMPONENTS[each] for each in context.list(f"{above}/{folder}") if each in _COMPONENTS}
            yield f"{copy.path} can go by {' and '.join(sorted(ways)) or 'neither libfabric nor UCX'}"
            return
    yield "none in the loader's directories"


def _say(what: str, lines: list[str]) -> None:
    for number, line in enumerate(lines):
        print(f"{what if not number else '':<10} {log.printable(line)}", flush=True)
