"""Read the dynamic section of a shared library: its soname, needed libraries and symbol versions. See elf(5).

Files of an image are untrusted: each read has a size limit that no linker exceeds, and each loop has a bound.
Sources: System V ABI, "Dynamic Linking"; LSB, "Symbol Versioning"; glibc, elf/dl-version.c and elf/dl-lookup.c.
"""

from __future__ import annotations

import os
import sys
from itertools import islice
from struct import error as StructError
from struct import unpack_from

from enroot_py.base.frozen import Frozen

_NATIVE = 1 if sys.byteorder == "little" else 2
_ET_DYN, _PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 3, 1, 2, 3
_NEEDED, _STRTAB, _SYMTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH = 1, 5, 6, 10, 14, 15, 29
_GNU_HASH, _VERDEF, _VERDEFNUM, _VERNEED, _VERNEEDNUM = 0x6FFFFEF5, 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_BASE = 1  # VER_FLG_BASE: this entry names the file itself
# Limits. Of the libraries for features/fabric, libstdc++ is the largest: 11 headers, 35 entries, 300 KiB of names.
_HEADERS, _ENTRIES, _STRINGS, _VERSIONS, _SYMBOLS = 64, 4096, 4 << 20, 4096, 1 << 16
_MAX_SECTION_BYTES = 1 << 20  # limit for a list of versions or a table of symbols
_MAX_NEEDED_LIBRARIES = 256
MACHINES = {62: "x86_64", 183: "aarch64", 21: "ppc64le", 22: "s390x", 243: "riscv64", 258: "loongarch64"}


class NotElf(ValueError):
    """The file is not a shared library that a program of this machine could load."""


class Elf(Frozen):
    """The dynamic section of a shared library. ``needs`` are the needed symbol versions, by library."""

    machine: str
    soname: str
    needed: tuple[str, ...]
    paths: tuple[str, ...]  # DT_RUNPATH, or else DT_RPATH: the loader searches these directories first
    needs: dict[str, tuple[str, ...]]
    versions: frozenset[str]  # symbol versions that the library defines
    symbols: frozenset[str]  # exported symbols with the requested prefix


def read(fd: int, prefix: str = "") -> Elf:
    """Parse the library in an open regular file. Without ``prefix``, ``symbols`` stays empty.

    Raises NotElf, OSError.
    """
    try:
        return _ElfFile(fd).read(prefix.encode())
    except (StructError, IndexError, OverflowError) as e:
        raise NotElf("damaged file: it is shorter than its headers state") from e


class _ElfFile:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.loads: list[tuple[int, int, int]] = []  # offset, address, size in the file
        self.tags: dict[int, int] = {}
        self.needed: list[int] = []
        self.strings = b""

    def read(self, prefix: bytes) -> Elf:
        machine = self._headers()
        size = self.tags.get(_STRSZ, 0)
        if size > _STRINGS:
            raise NotElf(f"its string table is too large ({size >> 20} MiB)")
        self.strings = self._at(self.tags.get(_STRTAB, -1), size) if size else b""
        path = self.tags.get(_RUNPATH, self.tags.get(_RPATH))
        return Elf(
            machine,
            self._name(self.tags[_SONAME]) if _SONAME in self.tags else "",
            tuple(dict.fromkeys(map(self._name, self.needed))),
            tuple(filter(None, self._name(path).split(":")[:_MAX_NEEDED_LIBRARIES])) if path is not None else (),
            dict(self._needs()),
            frozenset(self._versions()),
            frozenset(self._symbols(prefix)) if prefix else frozenset(),
        )

    def _pread(self, size: int, offset: int) -> bytes:
        if not 0 <= offset < 1 << 62:
            raise NotElf("damaged file: an offset points outside of it")
        data = os.pread(self.fd, size, offset)
        while 0 < len(data) < size and (more := os.pread(self.fd, size - len(data), offset + len(data))):
            data += more  # a FUSE server may return less than requested
        return data

    def _headers(self) -> str:
        """Read the headers and the dynamic section. Return the machine."""
        head = self._pread(64, 0)
        if head[:4] != b"\x7fELF":
            raise NotElf("not an ELF file")
        if head[4] != 2 or head[5] != _NATIVE:
            raise NotElf("a 32-bit file" if head[4] == 1 else "the byte order differs")
        kind, machine = unpack_from("=HH", head, 16)
        (at,) = unpack_from("=Q", head, 32)
        size, count = unpack_from("=HH", head, 54)
        if kind != _ET_DYN or size != 56 or not 0 < count <= _HEADERS:
            raise NotElf("not a shared library")
        headers = self._pread(size * count, at)
        dynamic = (0, 0)
        for number in range(count):
            # Type, flags, offset, address, physical address, size in the file.
            segment_type, _, offset, address, _, length = unpack_from("=IIQQQQ", headers, size * number)
            if segment_type == _PT_LOAD:
                self.loads.append((offset, address, length))
            elif segment_type == _PT_DYNAMIC:
                dynamic = offset, length
        section = self._pread(min(dynamic[1], 16 * _ENTRIES), dynamic[0])
        for place in range(0, len(section) - 15, 16):
            tag, value = unpack_from("=QQ", section, place)
            if tag == 0:
                break
            if tag == _NEEDED:
                self.needed.append(value)
            else:
                self.tags[tag] = value
        if not self.tags or len(self.needed) > _MAX_NEEDED_LIBRARIES:
            raise NotElf("not a shared library" if not self.tags else "it needs too many libraries")
        return MACHINES.get(machine, f"machine {machine}")

    def _at(self, address: int, size: int) -> bytes:
        """Read up to ``size`` bytes at a virtual address."""
        for offset, begin, length in self.loads:
            if begin <= address < begin + length:
                return self._pread(min(size, begin + length - address), offset + address - begin)
        raise NotElf("damaged file: an offset points outside of it")

    def _name(self, at: int) -> str:
        end = self.strings.find(b"\0", at, at + 4096)
        if not 0 <= at <= end:
            raise NotElf("damaged file: a name does not end")
        return self.strings[at:end].decode("utf-8", "surrogateescape")

    def _needs(self) -> list[tuple[str, tuple[str, ...]]]:
        """Read DT_VERNEED: a chain of libraries, each with a chain of versions."""
        count, left = self.tags.get(_VERNEEDNUM, 0), _VERSIONS
        if not count or _VERNEED not in self.tags:
            return []
        part = self._at(self.tags[_VERNEED], _MAX_SECTION_BYTES)
        listed, at = [], 0
        for _ in range(min(count, _MAX_NEEDED_LIBRARIES)):
            _, versions, file, first, following = unpack_from("=HHIII", part, at)
            names, place = [], at + first
            for _ in range(min(versions, left)):
                left -= 1
                _, flags, _, name, onward = unpack_from("=IHHII", part, place)
                if not flags & 2:  # VER_FLG_WEAK: the loader only warns if the version is missing
                    names.append(self._name(name))
                place += onward
            listed.append((self._name(file), tuple(sorted(names))))
            at += following
            if not following:
                break
        return listed

    def _versions(self) -> list[str]:
        """Read DT_VERDEF: a chain of versions, each with a chain of names. A version's first name is its own."""
        count = self.tags.get(_VERDEFNUM, 0)
        if not count or _VERDEF not in self.tags:
            return []
        part = self._at(self.tags[_VERDEF], _MAX_SECTION_BYTES)
        names, at = [], 0
        for _ in range(min(count, _VERSIONS)):
            _, flags, _, _, _, first, following = unpack_from("=HHHHIII", part, at)
            if not flags & _BASE:
                names.append(self._name(*unpack_from("=I", part, at + first)))
            at += following
            if not following:
                break
        return names

    def _symbols(self, prefix: bytes) -> list[str]:
        """Return the exported symbols that begin with ``prefix``. DT_GNU_HASH has their place in the symbol table."""
        if _GNU_HASH not in self.tags or _SYMTAB not in self.tags:
            return []
        table = self._at(self.tags[_GNU_HASH], _MAX_SECTION_BYTES)
        buckets, begin, bloom = unpack_from("=III", table)
        at = 16 + 8 * min(bloom, _SYMBOLS)
        last = max(unpack_from(f"={min(buckets, _SYMBOLS)}I", table, at), default=0)
        chain = at + 4 * buckets
        if last < begin:
            return []
        while last - begin < _SYMBOLS and not unpack_from("=I", table, chain + 4 * (last - begin))[0] & 1:
            last += 1
        entries = self._at(self.tags[_SYMTAB] + 24 * begin, 24 * min(last - begin + 1, _SYMBOLS))
        names = (unpack_from("=I", entries, place)[0] for place in range(0, len(entries) - 23, 24))
        listed = (self._name(name) for name in names if self.strings.startswith(prefix, name))
        return list(islice(listed, _ENTRIES))


def interpreter(path: str) -> str:
    """Return the loader that a 64-bit program names: elf(5), PT_INTERP. Returns "" for any other file.

    Only for programs of the host: the reads have no limit.
    """
    try:
        with open(path, "rb") as f:
            head = f.read(64)
            if head[:5] != b"\x7fELF\x02" or len(head) < 64:
                return ""
            start, size, count = (*unpack_from("Q", head, 32), *unpack_from("HH", head, 54))
            f.seek(start)
            table = f.read(size * count)
            for at in range(0, size * count, size):
                kind, _, offset, _, _, length = unpack_from("IIQQQQ", table, at)
                if kind == _PT_INTERP:
                    f.seek(offset)
                    return os.fsdecode(f.read(length).rstrip(b"\0"))
    except (OSError, StructError, ValueError):
        pass  # unreadable or truncated
    return ""
