"""The files beside a tree ``fs``: ``index`` has attributes that the tree cannot hold, ``sums`` has checksums.

The index has one record per line. The path comes last, with ``\\`` and newline escaped::

    penroot-index 1
    layer DIFF-ID TAR-BYTES ENTRIES
    opaque                                  the layer hides everything below it
    file OCTAL-MODE UID GID PATH            a mode that differs from the tree, or an owner other than root
    implicit PATH                           a directory without an entry in the tar, made for an entry beneath it
    device c|b MAJOR MINOR OCTAL-MODE PATH
    xattr NAME HEX-VALUE PATH

The sums describe the tree as it was made: one line ``KIND OCTAL-MODE SIZE MTIME CRC PATH`` per name, sorted.
KIND is f (file), l (link; CRC of the target), d (directory), D (opaque directory), w (whiteout) or o (other). MTIME is
in nanoseconds.
CRC is a CRC-32: ten times as fast as SHA-256, and sufficient to find accidental changes. SHA-256 would not protect
against forgery: anyone who can change the tree can change the sums.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from enroot_py.base.compression import crc32, crc32_of_zeros
from enroot_py.base.errors import ImageError
from enroot_py.store.layout import INDEX, SUMS, TREE
from enroot_py.store.overlayfs import is_opaque, is_whiteout, look

_VERSION = b"penroot-index 1"


def write(directory: str, lines: Iterable[bytes], known: Mapping[int, bytes] | None = None) -> None:
    """Write index (``lines``) and sums of the tree in ``directory``. ``known``: see sums(). Raises OSError."""
    with open(f"{directory}/{INDEX}", "xb") as f:
        f.write(_VERSION + b"\n")
        f.writelines(lines)
    with open(f"{directory}/{SUMS}", "xb") as f:
        f.writelines(sums(f"{directory}/{TREE}", known))


# ---------------------------------------------------------------------------
# The index


@dataclass(frozen=True, slots=True)
class Index:
    """The fields of an index that compose and merge need."""

    opaque: bool = False
    modes: dict[str, int] = field(default_factory=dict)
    implicit: frozenset[str] = frozenset()


def read(directory: str) -> Index:
    """Read the index in ``directory``. Raises ImageError, OSError."""
    with open(f"{directory}/{INDEX}", "rb") as f:
        first, *lines = f.read().split(b"\n")
    if first != _VERSION:
        raise ImageError(f"{directory}/{INDEX}: unknown version", hint="remove the store and import again")
    opaque, modes, implicit = False, dict[str, int](), set[str]()
    for line in lines:
        kind, _, rest = line.partition(b" ")
        if kind == b"opaque":
            opaque = True
        elif kind == b"file":
            mode, _, _, path = rest.split(b" ", 3)
            modes[os.fsdecode(_unescape(path))] = int(mode, 8)
        elif kind == b"implicit":
            implicit.add(os.fsdecode(_unescape(rest)))
    return Index(opaque, modes, frozenset(implicit))


def size(directory: str) -> int:
    """Return the size of the tar from which the tree in ``directory`` was unpacked, or 0 without an index."""
    try:
        with open(f"{directory}/{INDEX}", "rb") as f:
            f.readline()
            words = f.readline().split()
    except FileNotFoundError:
        return 0
    return int(words[2]) if len(words) == 4 and words[0] == b"layer" else 0


def layer_line(name: str, size: int, entries: int = 0) -> bytes:
    """Return the first record of a layer's index."""
    return f"layer {name} {size} {entries}\n".encode()


def record_line(record: str, path: bytes) -> bytes:
    return record.encode() + b" " + escape(path) + b"\n"


def mode_lines(modes: Mapping[str, int]) -> Iterator[bytes]:
    """Yield a record ``file`` for each path and mode in ``modes``, with root as the owner."""
    for path, mode in modes.items():
        yield record_line(f"file {mode:o} 0 0", os.fsencode(path))


def escape(path: bytes) -> bytes:
    return path.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")


def _unescape(path: bytes) -> bytes:
    return b"\\".join(part.replace(b"\\n", b"\n") for part in path.split(b"\\\\"))


def special_modes(lowerdirs: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield (path, mode) for each file of the merged view that has another mode in its tree than in the image.

    The mode comes from the index beside each tree named ``fs``. A container's upper directory has no index.
    """
    for number, directory in enumerate(lowerdirs):
        parent, name = os.path.split(directory)
        if name != TREE or not os.path.isfile(f"{parent}/{INDEX}"):
            continue
        for path, mode in read(parent).modes.items():
            shown = look(lowerdirs, path)
            if shown is None or shown.layers[0][0] != number or stat.S_ISLNK(shown.status.st_mode):
                continue
            if stat.S_IMODE(shown.status.st_mode) != mode:
                yield path, mode


# ---------------------------------------------------------------------------
# The sums


def sums(root: str, known: Mapping[int, bytes] | None = None) -> Iterator[bytes]:
    """Yield the lines of the sums. ``known`` maps the inode of a file to its file_sum(), so that the file is not read.

    Raises OSError.
    """
    known = known or {}
    pending = _scan(os.fsencode(root), b"")
    while pending:
        path, entry = pending.pop()
        known_sum = known.get(entry.inode())
        if known_sum is not None and entry.is_file(follow_symlinks=False):
            yield known_sum + escape(path) + b"\n"
            continue
        status = entry.stat(follow_symlinks=False)
        kind, size, crc = "o", 0, 0
        if stat.S_ISREG(status.st_mode):
            kind, size = "f", status.st_size
            crc = _checksum(entry.path)
        elif stat.S_ISLNK(status.st_mode):
            kind, crc = "l", crc32(os.readlink(entry.path))
        elif stat.S_ISDIR(status.st_mode):
            kind = "D" if is_opaque(os.fsdecode(entry.path)) else "d"
            pending += _scan(entry.path, path + b"/")
        elif is_whiteout(status):
            kind = "w"
        yield _sum(kind, status, size, crc) + escape(path) + b"\n"


def file_sum(status: os.stat_result, crc: int) -> bytes:
    """Return the line of a file in the sums, without its path."""
    return _sum("f", status, status.st_size, crc)


def _sum(kind: str, status: os.stat_result, size: int, crc: int) -> bytes:
    return f"{kind} {status.st_mode & 0o7777:o} {size} {status.st_mtime_ns} {crc:08x} ".encode()


def _scan(directory: bytes, inside: bytes) -> list[tuple[bytes, os.DirEntry[bytes]]]:
    """Return the entries of a directory with their paths in the tree, the last name first."""
    with os.scandir(directory) as entries:
        return sorted(((inside + entry.name, entry) for entry in entries), key=itemgetter(0), reverse=True)


def differences(directory: str) -> Iterator[str]:
    """Yield a phrase for each difference between the tree in ``directory`` and its sums. Raises OSError."""
    try:
        with open(f"{directory}/{SUMS}", "rb") as f:
            before = dict(_by_path(f))
    except FileNotFoundError:
        yield "it has no checksums: an older version made it"
        return
    now = dict(_by_path(sums(f"{directory}/{TREE}")))
    for name in sorted(before.keys() | now.keys()):
        path = "/" + name.decode("utf-8", "backslashreplace")
        if name not in now:
            yield f"{path} is gone"
        elif name not in before:
            yield f"{path} was added"
        elif now[name] != before[name]:
            yield f"{path} was changed: {_difference(before[name], now[name])}"


def whiteouts(directory: str) -> set[str]:
    """Return the directories of the tree in ``directory`` that hold whiteouts. Raises OSError."""
    with open(f"{directory}/{SUMS}", "rb") as f:
        paths = {path for path, _ in _by_path(line for line in f if line.startswith(b"w "))}
    return {os.fsdecode(os.path.dirname(_unescape(path))) for path in paths}


def _by_path(lines: Iterable[bytes]) -> Iterator[tuple[bytes, list[bytes]]]:
    for line in lines:
        *words, path = line.rstrip(b"\n").split(b" ", 5)
        yield path, words


def _difference(before: Sequence[bytes], now: Sequence[bytes]) -> str:
    names = ("type", "mode", "size", "time", "content")
    return ", ".join(name for name, a, b in zip(names, before, now, strict=True) if a != b)


def _checksum(path: bytes) -> int:
    """Return the CRC-32 of a file without reading its holes: a sparse file may claim to be larger than any disk."""
    crc = at = 0
    with open(path, "rb", buffering=0) as f:
        end = os.fstat(f.fileno()).st_size
        while at < end:
            try:
                start = os.lseek(f.fileno(), at, os.SEEK_DATA)
            except OSError as e:
                if e.errno != errno.ENXIO:
                    raise
                start = end  # the rest is a hole
            crc = crc32_of_zeros(start - at, crc)
            at = min(os.lseek(f.fileno(), start, os.SEEK_HOLE), end) if start < end else end
            f.seek(start)
            while start < at:
                data = f.read(min(1 << 20, at - start))
                if not data:
                    return crc  # the file was truncated meanwhile
                crc = crc32(data, crc)
                start += len(data)
    return crc
