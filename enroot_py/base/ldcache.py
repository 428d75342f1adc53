"""Read the cache of the dynamic loader, ld.so(8), and add libraries to the cache of a container.

This module writes the cache without ldconfig: executing a program would slow a start, and an image may have no
ldconfig, or an ldconfig for another machine. The module uses glibc's new format (sysdeps/generic/dl-cache.h), which
every glibc since 2.2 reads. A cache file may begin with a part in the old format.
"""

from __future__ import annotations

import os
import sys

# Import _struct, because struct is one more file to load, and array imports collections: both would slow a start.
from _struct import error as StructError  # type: ignore[attr-defined]
from _struct import pack, unpack

_MAGIC = b"glibc-ld.so.cache1.1"
_EXTENSION_MAGIC = 0xEAA42174
_HWCAPS = 1  # tag of the extension section that holds offsets of strings
_HEADER, _ENTRY = 48, 24

# Cache flags of 64-bit libraries. Each machine has two keys: e_machine of elf(5), and the name from uname(2).
_FLAGS = {62: 0x303, "x86_64": 0x303, 183: 0xA03, "aarch64": 0xA03}
_OTHER_HWCAP = 0x3
NATIVE = _FLAGS.get(os.uname().machine, _OTHER_HWCAP)

_PT_LOAD, _PT_DYNAMIC, _DT_STRTAB, _DT_SONAME = 1, 2, 5, 14
_SHT_NOTE = 7
# _SECTION is the size of a section header in bytes. _TABLE and _NAME are limits in bytes that no linker exceeds: the
# headers of an untrusted image may state more.
_SECTION, _TABLE, _NAME = 64, 1 << 20, 4096
_MAX_SECTIONS = 64  # limit for a cache extension

# The exceptions that parsing a damaged cache raises: an image is untrusted.
DAMAGE = (ValueError, IndexError, StructError)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    # Flags (kind and architecture), soname, path.
    Library = tuple[int, str, str]


def find(data: bytes, parts: tuple[bytes, ...]) -> list[Library]:
    """Return the libraries of a cache whose names begin with one of ``parts``; [] if ``data`` is not a cache."""
    data = _new_part(data)
    entries = _entries(data)
    flags = dict(zip(entries[2::6], entries[0::6], strict=True))
    libraries = []
    for part in parts:
        at = _HEADER
        while (at := data.find(b"/" + part, at)) >= 0:
            start = data.rfind(b"\0", 0, at) + 1
            end = data.find(b"\0", at)
            path = data[start:end].decode("utf-8", "surrogateescape")
            # Skip a match in a directory name.
            if start in flags and path.rfind("/") == at - start:
                libraries.append((flags[start], path[at - start + 1 :], path))
            at = end
    return libraries


def soname(path: str) -> Library | None:
    """Read a library file of the host, see elf(5). Return its cache entry, or None if the file is not a library."""
    try:
        with open(path, "rb") as f:
            data = f.read(64)
            # Accept only this machine's byte order. Byte 4 is 2 in a 64-bit file, 1 in a 32-bit file.
            if data[:4] != b"\x7fELF" or data[5] != (1 if sys.byteorder == "little" else 2):
                return None
            wide = data[4] == 2
            machine = unpack("=H", data[18:20])[0]
            at = unpack("=Q", data[32:40])[0] if wide else unpack("=I", data[28:32])[0]
            size, count = unpack("=HH", data[54:58] if wide else data[42:46])
            f.seek(at)
            headers = [f.read(size) for _ in range(count)]
            # Type, offset in the file, address, size in the file.
            fields = [(unpack("=I4xQQ8xQ", h[:40]) if wide else unpack("=III4xI", h[:20])) for h in headers]
            [(begin, length)] = [(offset, size) for kind, offset, _, size in fields if kind == _PT_DYNAMIC]
            f.seek(begin)
            words = unpack(f"={length // (8 if wide else 4)}{'Q' if wide else 'I'}", f.read(length))
            tags = dict(zip(words[0::2], words[1::2], strict=True))
            strings = tags[_DT_STRTAB]
            [start] = [o + strings - a for kind, o, a, n in fields if kind == _PT_LOAD and a <= strings < a + n]
            f.seek(start + tags[_DT_SONAME])
            name = f.read(256).partition(b"\0")[0].decode("utf-8", "surrogateescape")
    except (OSError, KeyError, *DAMAGE):
        return None
    return _FLAGS.get(machine, _OTHER_HWCAP) if wide else _OTHER_HWCAP, name, path


def drivers_of_compat(file: BinaryIO) -> set[int]:
    """Return the driver branches in the ELF note of a libcuda from CUDA's compatibility package, or an empty set."""
    try:
        data = file.read(64)
        if data[:5] != b"\x7fELF\2":
            return set()
        file.seek(unpack("=Q", data[40:48])[0])
        size, count, index = unpack("=HHH", data[58:64])
        if size != _SECTION:
            return set()
        # Name, type, offset, size.
        sections = [unpack("=II16xQQ", file.read(size)[:40]) for _ in range(count)]
        file.seek(sections[index][2])
        names = file.read(min(sections[index][3], _TABLE))
        for name, kind, offset, length in sections:
            if kind == _SHT_NOTE and names.startswith(b".note.cuda.fwd_compatibility\0", name):
                file.seek(offset)
                listed = file.read(min(length, _TABLE)).partition(b'"Driver"')[2].partition(b"[")[2].partition(b"]")[0]
                return {int(word) for word in listed.split(b",") if word.strip().isdigit()}
        return set()
    except (OSError, *DAMAGE):
        return set()


def extend(data: bytes, libraries: list[Library]) -> bytes:
    """Insert ``libraries`` into the cache ``data``, before existing entries of the same names.

    Returns only the part in the new format, unchanged if it already has all libraries.
    """
    data = _new_part(data) or _MAGIC + pack("=IIBxxx16x", 0, 0, 2 if sys.byteorder == "little" else 3)
    entries = _entries(data)
    names = _Names(data, entries)
    ordered = sorted(set(libraries), key=lambda library: _order(library[1].encode()), reverse=True)
    places = [(names.index_for(name.encode()), flags, name, path) for flags, name, path in ordered]
    places = [p for p in places if not names.holds(p[0], p[2].encode(), p[3].encode())]
    if not places:
        return data
    shift = _ENTRY * len(places)
    for field in (1, 2):
        entries[field::6] = [offset + shift for offset in entries[field::6]]
    merged: list[int] = []
    strings = bytearray()
    last, end = 0, len(data) + shift
    for place, flags, name, path in places:
        merged.extend(entries[6 * last : 6 * place])
        last = place
        value = end + len(strings)
        text = path.encode("utf-8", "surrogateescape")
        # As in glibc, the name is not stored again if the path ends with it.
        key = value + len(text) - len(name) if path.endswith("/" + name) else value + len(text) + 1
        strings += text + b"\0" + (b"" if path.endswith("/" + name) else name.encode() + b"\0")
        merged.extend((flags, key, value, 0, 0, 0))
    merged.extend(entries[6 * last :])
    count = _count(data)
    made = bytearray(b"".join((data[:_HEADER], pack(f"={len(merged)}I", *merged), data[_HEADER + _ENTRY * count :])))
    made[20:24] = pack("=I", count + len(places))
    _shift_extension(made, shift)
    return bytes(made + strings)


def _new_part(data: bytes) -> bytes:
    """Return the new-format part of a cache, with all offsets relative to that part; b"" if ``data`` is not a cache.

    If an old-format part precedes the new-format part, the offsets of extensions count from the start of the file. This
    function adjusts them. All other offsets count from the start of the new-format part.
    """
    if data.startswith(_MAGIC):
        return data
    at = data.find(_MAGIC)
    if at < 0 or not data.startswith(b"ld.so-1.7.0"):
        return b""
    part = bytearray(data[at:])
    extension = _extension(part)
    if extension:
        part[32:36] = pack("=I", extension - at)
        for section in _sections(part, extension - at):
            part[section + 8 : section + 12] = pack("=I", _number(part, section + 8) - at)
    return bytes(part)


def _number(data: bytes | bytearray, at: int) -> int:
    return int.from_bytes(data[at : at + 4], sys.byteorder)


def _extension(data: bytes | bytearray) -> int:
    """Return the offset of the extension that glibc 2.33 and later write, or 0."""
    return _number(data, 32)


def _sections(data: bytes | bytearray, extension: int) -> range:
    """Return the offsets of an extension's section headers. A header holds tag, flags, offset and size."""
    if _number(data, extension) != _EXTENSION_MAGIC:
        raise ValueError("the cache of the loader has an unknown extension")
    count = _number(data, extension + 4)
    end = extension + 8 + 16 * count
    if end > len(data) or count > _MAX_SECTIONS:
        raise ValueError("the extension of the loader's cache ends early")
    return range(extension + 8, end, 16)


def _count(data: bytes) -> int:
    return int.from_bytes(data[20:24], sys.byteorder)


def _entries(data: bytes) -> list[int]:
    """Return six numbers per library: flags, offsets of name and path, kernel version, and hwcap (two numbers)."""
    part = data[_HEADER : _HEADER + _ENTRY * _count(data)]
    if len(part) != _ENTRY * _count(data):
        raise ValueError("the cache of the loader ends early")
    return list(unpack(f"={len(part) // 4}I", part))


def _shift_extension(data: bytearray, shift: int) -> None:
    """Add ``shift`` to the offset of the extension and to all offsets in it."""
    old = _extension(data)
    if not old:
        return
    data[32:36] = pack("=I", old + shift)
    for section in _sections(data, old + shift):
        tag, offset, size = _number(data, section), _number(data, section + 8) + shift, _number(data, section + 12)
        data[section + 8 : section + 12] = pack("=I", offset)
        if offset + size > len(data):
            raise ValueError("a section of the loader's cache ends early")
        for string in range(offset, offset + size, 4) if tag == _HWCAPS else ():
            data[string : string + 4] = pack("=I", _number(data, string) + shift)


def _order(name: bytes) -> list[int]:
    """Return the sort key of a name for the loader's binary search: numbers sort by value, after other characters."""
    order = []
    number = -1
    for c in name:
        if 48 <= c <= 57:
            number = max(number, 0) * 10 + c - 48
            continue
        if number >= 0:
            order.append(256 + number)
            number = -1
        order.append(c)
    if number >= 0:
        order.append(256 + number)
    return order


class _Names:
    """The sorted names of a cache. Each sort key is computed when needed."""

    def __init__(self, data: bytes, entries: list[int]) -> None:
        self.data = data
        self.keys = entries[1::6]
        self.values = entries[2::6]
        self.known: dict[int, list[int]] = {}

    def name(self, index: int) -> bytes:
        start = self.keys[index]
        return self.data[start : self.data.index(b"\0", start, start + _NAME)]

    def index_for(self, name: bytes) -> int:
        """Return the index at which to insert ``name``. The order is descending. A new entry precedes equal names."""
        order = _order(name)
        low, high = 0, len(self.keys)
        while low < high:
            middle = (low + high) // 2
            if middle not in self.known:
                self.known[middle] = _order(self.name(middle))
            if self.known[middle] > order:
                low = middle + 1
            else:
                high = middle
        return low

    def holds(self, index: int, name: bytes, path: bytes) -> bool:
        """Return whether the entry at ``index`` has this ``name`` and ``path``."""
        if index >= len(self.keys) or self.name(index) != name:
            return False
        value = self.values[index]
        return self.data[value : self.data.index(b"\0", value)] == path
