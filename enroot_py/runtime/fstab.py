"""Parse enroot's fstab(5) grammar, in files and options.

A line is ``SOURCE TARGET TYPE OPTIONS FREQ PASSNO``. Trailing fields may be missing. The default of TARGET is SOURCE,
and the default of TYPE is ``none``. A mount with a negative passno, usually -1, comes before the hooks; any other mount
comes after the hooks. The type sqsh mounts the content of a squashfs file (see data.py).
mounting.py executes a mount.
"""

from __future__ import annotations

import errno
from _collections_abc import Iterable, Iterator, Mapping

from enroot_py.base import log, paths
from enroot_py.base.errors import ConfigError, MountError, PenrootError
from enroot_py.config.words import expand
from enroot_py.runtime.mounting import BIND, IGNORED, KNOWN, SEPARATORS, TRUSTED, LeftOut, Mount, escape

_KINDS = frozenset(("bind", "rbind", "remount", "x-move", "x-detach"))
_MAX_IMAGE_MOUNTS = 1000  # each takes kernel memory

SYSTEM = {
    "10-system.fstab": """\
/proc       /proc       none    x-create=dir,rbind,rw,nosuid,nodev,noexec,rslave   0   -1
/sys        /sys        none    x-create=dir,rbind,ro,nosuid,nodev,noexec,rslave   0   -1
/dev        /dev        none    x-create=dir,rbind,rw,nosuid,noexec,rslave         0   -1
tmpfs       /tmp        tmpfs   x-create=dir,rw,nosuid,nodev,mode=755,slave        0   -1
tmpfs       /var/run    tmpfs   x-create=dir,rw,nosuid,nodev,mode=755,slave        0   -1
tmpfs       /var/lock   tmpfs   x-create=dir,rw,nosuid,nodev,mode=755,slave        0   -1
/dev/shm    /dev/shm    none    x-create=dir,bind,rw,nosuid,nodev,noexec,rslave,nofail  0   -1
""",
    "20-config.fstab": """\
/etc/hosts          /etc/hosts          none    x-create=file,bind,ro,nosuid,nodev,noexec,private                0   -1
/etc/hostname       /etc/hostname       none    x-create=file,bind,ro,nosuid,nodev,noexec,private,nofail,silent  0   -1
/etc/resolv.conf    /etc/resolv.conf    none    x-create=file,bind,ro,nosuid,nodev,noexec,private,nofail,silent  0   -1
/etc/machine-id     /etc/machine-id     none    x-create=file,bind,ro,nosuid,nodev,noexec,private,nofail,silent  0   -1
""",
}


def execute(mount: Mount, root: int) -> None:
    """Execute a mount beneath the directory ``root``. Raises MountError, unless the mount has nofail."""
    if log.explain:
        log.explain(f"mount    {mount.describe()}  ({mount.origin})")
    try:
        mount.execute(root)
    except OSError as e:
        if isinstance(e, LeftOut) or mount.confined and isinstance(e, paths.Foreign):
            log.warn(f"{mount.origin}: {mount.target} is left out: {e.strerror}")
            return
        message = f"cannot mount {mount.source} on {mount.target}: {e.strerror}"
        if "x-detach" in mount.words:
            reason = "nothing is mounted there" if e.errno == errno.EINVAL else e.strerror  # umount(2)
            message = f"cannot unmount {mount.target}: {reason}"
        _fail(mount, message, e)
    except PenrootError as e:  # from the server of a squashfs file
        _fail(mount, str(e), e)


def _fail(mount: Mount, message: str, error: OSError | PenrootError) -> None:
    if "nofail" not in mount.words:
        from enroot_py.runtime import mount_errors

        raise MountError(message, hint=mount_errors.hint(mount, error)) from error
    if "silent" not in mount.words:
        log.warn(message)


def parse(line: str, variables: Mapping[str, str], origin: str = "") -> Mount:
    """Parse one line of fstab. Expand ``${VAR}``, and decode ``\\040`` and other octal numbers.

    Raises ConfigError that names ``origin`` (file and line, or the option).
    """
    literal = variables
    if "$" in line and any("\\" in value for value in variables.values()):
        # Keep the backslash in the value of a variable: the line is unescaped after expansion.
        literal = {name: value.replace("\\", "\\134") for name, value in variables.items()}
    try:
        # Split only at tabs and spaces: a path can contain other white space of Unicode.
        words = filter(None, line.replace("\t", " ").split(" "))
        fields = [expand(word, literal) for word in words]
        if any("\\" in field for field in fields):
            from enroot_py.base.mountinfo import unescape

            fields = list(map(unescape, fields))
    except ValueError as e:
        raise ConfigError(f"{origin}: {e}") from None
    if "\0" in "".join(fields):
        raise ConfigError(f"{origin}: a path contains a NUL byte")
    if not fields:
        raise ConfigError(f"{origin}: there is nothing to mount", hint="write SOURCE:TARGET")
    if len(fields) > 6:
        raise ConfigError(
            f"{origin}: {len(fields)} fields in {line.strip()!r}, at most 6 are allowed", hint="write a space as \\040"
        )
    try:
        # A line may have only one number, which is then the passno. So take the last number that is not 0. If this is a
        # dump frequency, it is positive: as passno, a positive number has the same effect as 0.
        passno = next((number for number in map(int, fields[:3:-1]) if number), 0)
    except ValueError:
        raise ConfigError(f"{origin}: passno must be a number, not {fields[-1]!r}") from None
    source, rest = fields[0], fields[1:4]
    target = source if not rest or _is_options(rest[0]) else rest.pop(0)
    if target == "none" and rest and _is_options(rest[0]):
        target = source
    fstype = "none" if not rest or _is_options(rest[0]) else rest.pop(0)
    options = tuple(filter(None, rest.pop(0).split(","))) if rest else ()
    if source == "tmpfs" and fstype == "none" and options:
        fstype = "tmpfs"
    if not options and fstype == "none":
        if source.startswith(("/", ".")):
            options = BIND
        else:
            fstype, options = source, ("x-create=dir",)
    mount = Mount(source, target, fstype, options, passno, origin)
    rootfs = variables.get("ENROOT_ROOTFS", "")
    if rootfs.startswith("/") and (source == rootfs or source.startswith(rootfs + "/")):
        mount.inside = source[len(rootfs) :] or "/"
    return mount


def _is_options(field: str) -> bool:
    is_word = "," in field or field in KNOWN or field in IGNORED or field.startswith("x-create=")
    return is_word and not field.startswith("/")


def parse_file(text: str, variables: Mapping[str, str], origin: str) -> Iterator[Mount]:
    """Yield the mounts of an fstab, without blank lines and comments."""
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip(" \t\r")
        if line and not line.startswith("#"):
            yield parse(line, variables, f"{origin}:{number}")


def parse_image(text: str, rootfs: str, origin: str) -> Iterator[Mount]:
    """Yield the mounts of an image's fstab. Mount.confine() refuses files of the host. Raises ConfigError.

    Only the variable ``${ENROOT_ROOTFS}`` is expanded.
    """
    known = "${ENROOT_ROOTFS}"
    text = known.join(part.replace("$", "\\044") for part in text.split(known))
    for number, mount in enumerate(parse_file(text, {"ENROOT_ROOTFS": rootfs}, origin)):
        if number == _MAX_IMAGE_MOUNTS:
            raise ConfigError(
                f"{mount.origin}: an image may mount {_MAX_IMAGE_MOUNTS} directories, no more", hint=TRUSTED
            )
        mount.confine()
        yield mount


def write_image(volumes: Iterable[str]) -> str:
    """Return the fstab of an image for parse_image(): each volume is a writable bind mount on itself."""
    lines = []
    for volume in sorted(volumes):
        path = escape("/" + volume.strip("/"))
        lines.append(f"${{ENROOT_ROOTFS}}{path} {path} none x-create=dir,bind,rw,nosuid,nodev\n")
    return "".join(lines)


def parse_option(text: str, variables: Mapping[str, str], origin: str) -> Mount:
    """Parse a mount option: a line of fstab with ``:`` between the fields, such as ``--mount SRC:DST:none:OPTIONS``.

    ``SRC:DST:OPTIONS`` is a bind mount, as in docker and srun. Raises ConfigError.
    """
    if text.startswith(":"):
        raise ConfigError(f"{origin}: SOURCE is missing", hint="check whether a variable in SOURCE is unset or empty")
    try:
        mount = parse(text.replace(":", " "), variables, origin)
    except ConfigError as e:
        if " " not in text.strip() and text.count(":") < 4:
            raise
        raise ConfigError(str(e), hint=SEPARATORS) from e
    if mount.fstype != "none" or not mount.source.startswith(("/", ".")) or mount.words & _KINDS:
        return mount
    if mount.source == mount.target and mount.propagation and not mount.attributes:
        return mount  # change the propagation of an existing mount: mount(2)
    added = BIND[:1] if any(word.startswith("x-create=") for word in mount.words) else BIND
    bind = Mount(mount.source, mount.target, "none", (*added, *mount.options), mount.passno, origin)
    bind.inside = mount.inside
    return bind
