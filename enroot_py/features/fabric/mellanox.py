"""Select InfiniBand and RoCE adapters by MELLANOX_VISIBLE_DEVICES, for the hook 99-mellanox.

Source of the layout: the kernel's Documentation/infiniband/user_verbs and user_mad.
"""

from __future__ import annotations

import os

from enroot_py.base import ldcache
from enroot_py.base.errors import HookError
from enroot_py.config.words import YES
from enroot_py.runtime.edits import Edits, Host, add_library, bits, library_directory, shared_dev, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context

CLASSES = ("infiniband", "infiniband_verbs", "infiniband_cm", "infiniband_mad")
# Libraries that the host's verbs providers need. A provider itself is found by name.
LIBRARIES = (
    b"libibverbs.so",
    b"librdmacm.so",
    b"libibumad.so",
    b"libmlx",
    b"libnl-3.so",
    b"libnl-route-3.so",
    b"libefa.so",
)


class HCA:
    """One verbs device: node name, device name, sysfs path and driver."""

    __slots__ = ("verbs", "name", "path", "driver")

    def __init__(self, verbs: str, name: str, path: str, driver: str) -> None:
        self.verbs = verbs
        self.name = name
        self.path = path
        self.driver = driver

    @property
    def order(self) -> tuple[bool, str, str, int, str]:
        """Sort key, as in enroot: Mellanox adapters by driver and address, then all others."""
        number = self.verbs.removeprefix("uverbs")
        return (
            not self.driver.startswith("mlx"),
            self.driver,
            self.path,
            int(number) if number.isdecimal() else 0,
            number,
        )


def hcas(host: Host) -> list[HCA]:
    """Return the host's adapters in enroot's order."""
    known = []
    for verbs in host.list("/sys/class/infiniband_verbs"):
        real = host.real(f"/sys/class/infiniband_verbs/{verbs}")
        device = real.partition("/infiniband_verbs/")[0]
        if not device or not verbs.startswith("uverbs"):
            continue
        name = host.read(f"{device}/infiniband_verbs/{verbs}/ibdev").decode("ascii", "replace").strip()
        driver = host.real(device + "/driver").rpartition("/")[2]
        known.append(HCA(verbs, name, device, driver))
    return sorted(known, key=lambda hca: hca.order)


def select(visible: str, known: list[HCA]) -> list[HCA]:
    """Return the adapters that ``visible`` names. Raises HookError for a number or name that this node lacks."""
    if visible == "all":
        return known
    chosen = []
    for word in filter(None, map(str.strip, visible.split(","))):
        for number, hca in enumerate(known):
            if word in (str(number), hca.name, hca.verbs):
                chosen.append(hca)
                break
        else:
            available = ", ".join(f"{number} ({hca.name})" for number, hca in enumerate(known))
            raise HookError(
                f"MELLANOX_VISIBLE_DEVICES={shown(visible)}: no device {shown(word)!r} on {os.uname().nodename}",
                hint=f"available: {available}" if known else "load the driver: /sys/class/infiniband is empty",
            )
    return chosen


def plan(context: Context, visible: str, sharing: tuple[str, ...]) -> Edits:
    """Return the edits that add the ``visible`` adapters and the device nodes in ``sharing``. Raises HookError."""
    host = Host.of(context.host)
    edits = Edits("99-mellanox")
    has_private_dev = not shared_dev(context)
    for path in sharing if has_private_dev else ():
        edits.node(host, path)
    if not visible:
        return edits
    known = hcas(host)
    chosen = select(visible, known)
    for hca in chosen if visible != "all" else ():
        if not host.exists(f"/dev/infiniband/{hca.verbs}"):
            node = f"{host.path('/dev/infiniband')}/{hca.verbs} on {os.uname().nodename}"
            raise HookError(
                f"MELLANOX_VISIBLE_DEVICES={shown(visible)}: {hca.name} has no node {node}",
                hint="as root: modprobe ib_uverbs, then udevadm trigger",
            )
    hidden = [hca for hca in known if hca not in chosen]
    superuser = is_superuser(context)
    mads = {hca.path: mad_devices(host, hca) for hca in known} if has_private_dev or hidden else {}
    if chosen and has_private_dev:
        edits.node(host, "/dev/infiniband/rdma_cm")
        for hca in chosen:
            edits.node(host, f"/dev/infiniband/{hca.verbs}")
            for name in mads[hca.path] if superuser else ():
                edits.node(host, f"/dev/infiniband/{name}")
    for hca in hidden:
        edits.hidden += [f"/dev/infiniband/{name}" for name in (hca.verbs, *mads[hca.path])]
    if hidden:
        filter_sysfs(host, edits, chosen, mads if superuser else {})
    if context.host.get("MELLANOX_MOUNT_DRIVER", "").lower() in YES:
        add_provider(context, host, edits, chosen)
    return edits


def is_superuser(context: Context) -> bool:
    """Check whether the host's root runs a container with root's rights: ENROOT_ALLOW_SUPERUSER."""
    if context.host.get("ENROOT_ALLOW_SUPERUSER", "").lower() not in YES:
        return False
    with open("/proc/self/uid_map") as f:
        return f.readline().split()[1:2] == ["0"]


def mad_devices(host: Host, hca: HCA) -> list[str]:
    """Return the management devices, umad and issm, of an adapter."""
    return host.list(hca.path + "/infiniband_mad")


def filter_sysfs(host: Host, edits: Edits, chosen: list[HCA], mads: dict[str, list[str]]) -> None:
    """Show only the chosen devices in sysfs classes, where verbs libraries look for devices."""
    for name in CLASSES:
        directory = f"/sys/class/{name}"
        if host.exists(directory):
            edits.tmpfs.append(directory)
            edits.file(host, f"{directory}/abi_version")
    for hca in chosen:
        edits.links[f"/sys/class/infiniband_verbs/{hca.verbs}"] = f"{hca.path}/infiniband_verbs/{hca.verbs}"
        edits.links[f"/sys/class/infiniband/{hca.name}"] = f"{hca.path}/infiniband/{hca.name}"
        for mad in mads.get(hca.path, ()):
            edits.links[f"/sys/class/infiniband_mad/{mad}"] = f"{hca.path}/infiniband_mad/{mad}"


def add_provider(context: Context, host: Host, edits: Edits, chosen: list[HCA]) -> None:
    """Add the host's libibverbs and the providers of the chosen devices, for MELLANOX_MOUNT_DRIVER."""
    try:
        libraries = ldcache.find(host.read("/etc/ld.so.cache"), LIBRARIES)
    except ldcache.DAMAGE:
        libraries = []
    for library in libraries:
        if bits(library[0]) == 64:
            add_library(edits, host, context, library)
    target = library_directory(context, 64)
    providers = {hca.driver.partition("_")[0] for hca in chosen}
    configured = context.host.get("MELLANOX_CONFIG_DIR", "/etc/libibverbs.d")
    for source in dict.fromkeys(path.rpartition("/")[0] for _, _, path in libraries):
        for name in host.list(source + "/libibverbs"):
            if name.removeprefix("lib").partition("-")[0] in providers:
                edits.file(host, f"{source}/libibverbs/{name}", f"{target}/libibverbs/{name}")
    for name in providers:
        edits.file(host, f"{configured}/{name}.driver", f"/etc/libibverbs.d/{name}.driver")
