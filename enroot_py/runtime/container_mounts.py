"""Parse SRC[:DST[:FLAGS]], the mounts of --container-mounts and of environment files.

Every step imports this module, so its imports must be cheap.
"""

from __future__ import annotations

from enroot_py.config.words import cut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from enroot_py.runtime.mounting import Mount

PATH_MAX = 4096  # with the final NUL; see limits.h
# Default flags if the source is a path, and default flags of each source that is a special word.
_BIND_FLAGS = ("x-create=auto", "rbind")
_SPECIAL_FLAGS = {"tmpfs": ("x-create=dir",), "umount": ("x-detach",)}
SQUASHFS = "sqsh"  # flag: mount the content of the squashfs file SRC; in an fstab, sqsh is the TYPE


class MountEntry:
    """One requested mount: ``source`` is a path, ``tmpfs`` or ``umount``; ``flags`` are fstab(5) options.

    ``origin`` is the line of the file that requests the mount, or "".
    """

    __slots__ = ("source", "target", "flags", "origin")

    def __init__(self, source: str, target: str, flags: tuple[str, ...], origin: str = "") -> None:
        self.source = source
        self.target = target
        self.flags = flags
        self.origin = origin

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MountEntry) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"MountEntry({self.source!r}, {self.target!r}, {self.flags!r})"

    def _key(self) -> tuple[str, str, tuple[str, ...]]:
        return self.source, self.target, self.flags

    def fstab(self, origin: str) -> Mount:
        """Return the entry as a Mount. ``origin`` is the default origin. Raises ConfigError for an unknown flag."""
        from enroot_py.runtime.mounting import Mount

        kind = "tmpfs" if self.source == "tmpfs" else SQUASHFS if self.is_squashfs else "none"
        flags = tuple(flag for flag in self.flags if flag != SQUASHFS)
        return Mount(self.source, self.target, kind, flags, 0, self.origin or origin)

    @property
    def is_squashfs(self) -> bool:
        """Return whether the source is a squashfs file whose content is mounted."""
        return SQUASHFS in self.flags

    def resolved(self, cwd: str, environ: Mapping[str, str]) -> MountEntry:
        """Expand variables, and prefix ``cwd`` to a relative source. Return the new entry. Raises ValueError."""
        source, target = self.source, self.target
        if "$" in source or "$" in target:
            source, target = _expand(source, environ), _expand(target, environ)
            MountEntry(source, target, self.flags).check("/")
        if source.startswith(".") or self.is_squashfs and not source.startswith("/"):
            source = f"{cwd.rstrip('/')}/{source}"
        return MountEntry(source, target, self.flags, self.origin)

    def check(self, variable: str = "$") -> None:
        """Raise ValueError for an invalid path. ``variable`` is "$" if resolved() will expand the paths, else "/"."""
        source, target = self.source, self.target
        if self.is_squashfs and source in _SPECIAL_FLAGS:
            raise ValueError(f"{source!r} is not a squashfs file", f"write ./{source} for a file of this name")
        is_file = self.is_squashfs and not source.startswith("~")
        if not source.startswith(("/", ".", variable)) and source not in _SPECIAL_FLAGS and not is_file:
            hint = f"write a relative path with a dot: ./{source}; write a comma in a path as \\,"
            if source.startswith("~"):
                hint = "no shell has replaced the ~: write $HOME"
            elif source.endswith((".sqsh", ".squashfs")):
                hint += f"; {source}:{target}:{SQUASHFS} mounts the content of a squashfs file"
            raise ValueError(f"the source {source!r} is neither a path nor tmpfs nor umount", hint)
        if target.startswith(".."):
            reason = f"the target {target!r} leads out of the container: Invalid cross-device link"
            raise ValueError(reason, f"write {source}:/PATH/IN/THE/CONTAINER")
        if not target.startswith(("/", variable)):
            hint = f"write {source}:/PATH/IN/THE/CONTAINER; write a colon in a path as \\:"
            if source == target and source.startswith("."):
                hint += "; write $PWD for the same path in the container"
            raise ValueError(f"the target {target!r} is not an absolute path", hint)


def parse(text: str) -> tuple[MountEntry, ...]:
    """Parse the value of --container-mounts. Raises ValueError with the reason, and optionally a hint."""
    return tuple(dict.fromkeys(parse_one(entry) for entry in split(text, ",")))


def parse_one(entry: str, origin: str = "") -> MountEntry:
    """Parse one mount. ``origin`` is its line in a file, or "". Raises ValueError as parse() does."""
    fields = split(entry, ":", 2)
    source = _unescape(fields[0])
    target = _unescape(fields[1]) if len(fields) > 1 else source
    flags = fields[2].split("+") if len(fields) > 2 and fields[2] else []
    if not source:
        raise ValueError(f"the source is empty in {entry!r}")
    if not target:
        raise ValueError(f"the target is empty in {entry!r}")
    for flag in flags:
        if not flag or any(c in " \t\n:,\\" for c in flag):
            raise ValueError(f"{flag!r} is not a mount flag", "separate flags with '+', such as ro+rprivate")
    words = (*(() if SQUASHFS in flags else _SPECIAL_FLAGS.get(source, _BIND_FLAGS)), *flags)
    mount = MountEntry(bounded(source), _beneath_root(bounded(target)), words, origin)
    mount.check()
    return mount


def _beneath_root(target: str) -> str:
    """Return the target. If it begins with a dot, it is relative to the container's root: ./data becomes /data."""
    plain = target.startswith(".") and not target.startswith("..") and target.strip("./")
    return "/" + target.removeprefix("./") if plain else target


def _expand(text: str, environ: Mapping[str, str]) -> str:
    """Expand $NAME and ${NAME} in ``text``; a backslash before the $ prevents the expansion.

    Options in #SBATCH lines need this, because no shell expands them. Raises ValueError for an unset variable.
    """
    done = before = ""
    for written, name, default, after in cut(text):
        if before.endswith("\\"):
            done = done[:-1]
        elif name and default is None:
            if name not in environ:
                hint = "export it before you submit the job; if the $ is part of a file's name, write \\$"
                raise ValueError(f"${name} is not set in the job's environment", hint)
            written = environ[name]
        done += written + after
        before = after
    return done


# A backslash quotes only these characters.
_QUOTED = ",: "


def split(text: str, separator: str, limit: int = -1) -> list[str]:
    """Split ``text`` at unquoted ``separator``, at most ``limit`` times."""
    parts = [""]
    at = 0
    while at < len(text):
        if text[at] == "\\" and text[at + 1 : at + 2] in _QUOTED and at + 1 < len(text):
            parts[-1] += text[at : at + 2]
            at += 2
        elif text[at] == separator and len(parts) - 1 != limit:
            parts.append("")
            at += 1
        else:
            parts[-1] += text[at]
            at += 1
    return parts


def _unescape(text: str) -> str:
    for character in _QUOTED:
        text = text.replace("\\" + character, character)
    return text


def bounded(text: str) -> str:
    if len(text.encode(errors="surrogateescape")) >= PATH_MAX:
        raise ValueError(f"is longer than {PATH_MAX - 1} bytes, the limit of a path")
    return text
