"""Hints for failed mounts."""

from __future__ import annotations

import errno
import os

from enroot_py.base import paths
from enroot_py.base.errors import PenrootError
from enroot_py.runtime.mounting import BIND, SEPARATORS, SQUASHFS, Mount


def hint(mount: Mount, error: OSError | PenrootError) -> str:
    """Return how to fix the failed ``mount``, and the option or line that requested it."""
    fix = error.hint if isinstance(error, PenrootError) else _fix(mount, error)
    return "; ".join(filter(None, (fix, mount.origin and f"asked for by {mount.origin}")))


def _fix(mount: Mount, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return _fix_missing(mount, error)
    if isinstance(error, IsADirectoryError):
        name = f"{mount.target.rstrip('/')}/{os.path.basename(mount.source)}"
        named = f"name the file: {_spelled(mount, name, _options_for_file(mount))}"
        if mount.source.endswith((".sqsh", ".squashfs")):
            return f"to mount its content: {_spelled(mount, mount.target, (), SQUASHFS)}; {named}"
        return named
    if isinstance(error, NotADirectoryError):
        return "mount a directory on a directory, or a file on a file"
    if error.errno == errno.ENODEV:
        return _fix_type(mount)
    if error.errno == errno.EROFS:
        return f"{mount.target} does not exist on a read-only file system: choose another target"
    if error.errno == errno.EINVAL and "remount" in mount.words:
        return f"remount changes a mount of the container, and nothing is mounted on {mount.target}"
    if error.errno == errno.EPERM and mount.fstype == "proc":
        from enroot_py.runtime import pods

        return pods.too_revealing()
    return paths.foreign_group(error)


def _fix_missing(mount: Mount, error: FileNotFoundError) -> str:
    if mount.binds and not (mount.inside or os.path.exists(mount.source)):
        separators = f"; {SEPARATORS}" if " " in mount.origin.partition(" ")[2] else ""
        return f"the source must exist on the node {os.uname().nodename}{separators}"
    if mount.inside and error.filename == mount.inside.lstrip("/"):
        return f"the source must exist in the container: {mount.inside}"
    if not mount.creates:
        return f"the container has no {mount.target}"
    fstype = "" if mount.fstype == "none" else mount.fstype
    whole = _spelled(mount, mount.target, ("x-create=auto", *mount.options), fstype)
    return f"the container has no {mount.target}; create it with x-create=auto: {whole}"


def _fix_type(mount: Mount) -> str:
    """Return the hint for a mount whose type is missing or unknown."""
    if mount.fstype == "none" and mount.source.startswith(("/", ".")):
        whole = _spelled(mount, mount.target, (*BIND, *_caller_options(mount)))
        return f"a bind mount needs the option bind or rbind: {whole}"
    with open("/proc/filesystems") as known:
        if mount.fstype == "none" and mount.source in known.read().split():
            return f"name the type: {_spelled(mount, mount.target, mount.options, mount.source)}"
    fstype = mount.source if mount.fstype == "none" else mount.fstype
    form = "SOURCE:TARGET[:TYPE:OPTIONS], where a SOURCE on the host begins with / or ./"
    space = f"; {SEPARATORS}" if "/" in fstype else ""
    return f"no file system of type {fstype!r} here: write {form}{space}"


def _caller_options(mount: Mount) -> tuple[str, ...]:
    """Return the caller's options, without x-create and without the options that parse_option() adds."""
    options = mount.options[len(BIND) if _has_default(mount) else 0 :]
    return tuple(option for option in options if not option.startswith("x-create="))


def _has_default(mount: Mount) -> bool:
    """Return whether the options begin with BIND, the default options of a bind mount."""
    return mount.options[: len(BIND)] == BIND


def _options_for_file(mount: Mount) -> tuple[str, ...]:
    """Return the options of a bind mount that creates its target, in the shortest form."""
    implied = mount.words.isdisjoint(("bind", "rbind")) or _has_default(mount)
    return (*(() if implied else BIND[1:]), *_caller_options(mount))


def _spelled(mount: Mount, target: str, options: tuple[str, ...], fstype: str = "") -> str:
    """Return a corrected mount in the caller's form: an option, or a line of fstab(5)."""
    shown = options or (() if fstype else BIND)
    fixed = Mount(mount.source, target, fstype or "none", shown).describe()
    if not mount.origin.startswith("--"):
        return " ".join(fixed.split(" ")[:4])
    words = [word.replace(":", "\\072") for word in fixed.split(" ")]
    return ":".join(filter(None, (*words[:2], fstype, words[3] if options else "")))
