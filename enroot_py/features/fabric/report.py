"""``penroot fabric``: show which network libraries an image will use, its own or the host's, and why."""

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

# A library that libfabric needs -> the provider that libfabric then has built in: fi_provider(7).
_PROVIDERS = {
    "libcxi.so.1": "cxi",
    "libefa.so.1": "efa",
    "librdmacm.so.1": "verbs",
    "libpsm2.so.2": "psm2",
    "libpsm_infinipath.so.1": "psm",
    "libucp.so.0": "ucx",
}
# A module of Open MPI -> the network library that it uses.
_COMPONENTS = {"mca_mtl_ofi.so": "libfabric", "mca_btl_ofi.so": "libfabric", "mca_pml_ucx.so": "UCX"}
_MPI = ("libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi_cray.so.12")
_OF_MPI = ("libopen-pal.so.40", "libopen-pal.so.80")
_MAIN = {"libfabric": LIBFABRIC, "ucx": UCX[0]}
_ANNOTATIONS = {"libfabric": fabric.CXI, "nccl": fabric.OFI_NCCL}
_EFA = b"0x1d0f"  # Amazon's vendor, in sysfs
_WITHOUT = {
    "libfabric": "programs linked with it do not start",
    "ucx": "programs linked with it do not start",
    "nccl": "NCCL uses its built-in transports: InfiniBand verbs, or sockets",
}
_UNFIT_STATUS = 3  # exit status of the child if a required part does not fit


def report(options: start.Options) -> None:
    """Print the libraries of a start with these options. Without an image, print the libraries of this node.

    Raises ContainerError if the start would fail, and PenrootError.
    """
    start.read_description(options, "start")
    settings = start.read_settings(options, batch=False)
    host = {**settings.passed_on, **os.environ, **(options.file.host if options.file else {})}
    requested = {want.part: want for want in fabric.wanted(settings, host)}
    stock = Stock(settings, host)
    parts = [stock.part(requested.get(part) or Want(part, "", False, "")) for part in PARTS]
    devices = [f"{path} ({provider})" for provider, path in _devices(stock.host)]
    _print("node", [f"{os.uname().nodename}: {', '.join(devices) or 'no Slingshot, EFA or InfiniBand device'}"])
    if not options.target:
        for part in parts:
            _print(part.want.part, [part.lack or part.main[0].path])
        return
    source = start.find(options.target, settings)
    caller = hooks.caller(host, os.geteuid(), os.getegid())
    sys.stdout.flush()
    child = fork()
    if child:
        if status := wait(child):
            reason = "a required library does not fit" if status == _UNFIT_STATUS else "see the error above"
            raise ContainerError(f"cannot start {options.target}: {reason}", hint="run penroot start --explain")
        return
    status = 1
    try:
        container = _entered(source, settings, options)
        with Fd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
            context = hooks.Context(root, "/", settings, container.environ, caller)
            status = 0 if _print_parts(context, stock, parts) else _UNFIT_STATUS
        sys.stdout.flush()
    except PenrootError as e:
        log.error(str(e))
        if e.hint:
            log.hint(e.hint)
    os._exit(status)


def _entered(source: Source, settings: Settings, options: start.Options) -> Container:
    """Enter the container, but add no network libraries of the host."""
    os.environ.pop("PENROOT_ANNOTATIONS", None)
    if options.file:
        options.file.host = {}
    return start.entered(source, settings.replace("penroot fabric", fabric="", rootfs_writable=False), options)


def _print_parts(context: hooks.Context, stock: Stock, parts: Iterable[FabricPart]) -> bool:
    """Print for each part whether the image's or the host's library is used.

    Return False if a required part does not fit.
    """
    fitting, good = Fitting(context, stock), True
    for part in parts:
        fit = fitting.fit(part)
        if part.want.origin and not fit.reasons:
            fitting.added.update(fit.brought)
        good = good and not (fit.reasons and part.want.required)
        _print(part.want.part, [*_verdict(fitting, fit), *_providers(fitting, fit, stock.host)])
    _print("mpi", list(_mpi(context)))
    return good


def _verdict(fitting: Fitting, fit: Fit) -> Iterator[str]:
    """Yield lines that say which library is used, the host's or the image's, and why."""
    part, want = fit.part, fit.part.want
    names = _plugins(fitting.context) if want.part == "nccl" else [_MAIN[want.part]]
    image = next((copy for name in names for copy in fitting.image.copies(name) if copy.seen), None)
    if want.origin and not fit.reasons:
        effect = f"replaces the image's {image.path}" if image else "the image has none"
        if image and want.part == "nccl":
            effect = f"added beside the image's {image.path}"
        yield f"the host's {part.main[0].path}, {effect}: requested by {want.origin}"
        main = {library.name for library in part.main}
        if others := [each.name for each in fit.brought.values() if not each.folder and each.name not in main]:
            yield f"with its dependencies {', '.join(sorted(others))}"
        yield from (f"left out: {reason}" for reason in fit.left_out)
        return
    yield f"the image's {image.path}" if image else f"none: {_WITHOUT[want.part]}"
    if not fit.reasons:
        annotation = f', or {_ANNOTATIONS[want.part]} = "true"' if want.part in _ANNOTATIONS else ""
        yield f"the host's {part.main[0].path} would fit: set ENROOT_FABRIC={want.part}{annotation}"
        return
    conclusion = "the host's library does not fit"
    if want.origin:
        conclusion += f", but {want.origin} requests it ({'error' if want.required else 'warning'})"
    yield from (f"{conclusion}: {reason}" for reason in fit.reasons)


def _plugins(context: hooks.Context) -> list[str]:
    """Return the file names under which NCCL looks for its plugin."""
    name = context.environ.get("NCCL_NET_PLUGIN", "")
    return [name, f"libnccl-net-{name}.so"] if name else [PLUGINS[1]]


def _providers(fitting: Fitting, fit: Fit, host: Host) -> Iterator[str]:
    """Yield the providers of the libfabric in use, and the devices without a provider."""
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
    provided = {name for needed, name in _PROVIDERS.items() if needed in library.needed}
    provided |= {name[3:-6] for name in modules if name.startswith("lib") and name.endswith("-fi.so")}
    yield f"providers: {', '.join(sorted({*provided, 'tcp'}))}"
    if chosen := fitting.context.environ.get("FI_PROVIDER"):
        yield f"FI_PROVIDER={shown(chosen)} is set: libfabric uses no other provider"
    for provider, path in _devices(host):
        if provider not in provided:
            yield f"no {provider} provider for {path}: programs use another provider, such as tcp"


def _devices(host: Host) -> Iterator[tuple[str, str]]:
    """Yield the network devices of the node, each after its libfabric provider."""
    for name in host.list("/dev"):
        if fabric.is_cxi(name):
            yield "cxi", f"/dev/{name}"
    for name in host.list("/sys/class/infiniband_verbs"):
        if name.startswith("uverbs"):
            vendor = host.read(f"/sys/class/infiniband_verbs/{name}/device/vendor").strip()
            yield "efa" if vendor == _EFA else "verbs", f"/dev/infiniband/{name}"


def _mpi(context: hooks.Context) -> Iterator[str]:
    """Yield a line with the transports that the image's MPI supports, judged by its dependencies and modules."""
    image = ImageLibraries(context, (*_MPI, *_OF_MPI))
    for name in _MPI:
        for copy in image.copies(name)[:1]:
            inner = [library.needed for each in _OF_MPI if (library := image.first(each))]
            needed = {each for names in (copy.elf.needed, *inner) for each in names}
            transports = {name for each, name in ((LIBFABRIC, "libfabric"), (UCX[0], "UCX")) if each in needed}
            above = copy.path.rpartition("/")[0]
            for folder in ("openmpi", "openmpi/lib/openmpi3", "openmpi/lib/openmpi", "../openmpi3"):
                transports |= {_COMPONENTS[each] for each in context.list(f"{above}/{folder}") if each in _COMPONENTS}
            yield f"{copy.path} can use {' and '.join(sorted(transports)) or 'neither libfabric nor UCX'}"
            return
    yield "none in the loader's directories"


def _print(title: str, lines: list[str]) -> None:
    for number, line in enumerate(lines):
        print(f"{title if not number else '':<10} {log.printable(line)}", flush=True)
