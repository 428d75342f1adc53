"""The reader of ELF files is right about real shared libraries. Damaged libraries cause no crash, loop or delay."""

from __future__ import annotations

import os
import pathlib
import random
import re
import struct
import subprocess

import pytest

from enroot_py.base import elf
from enroot_py.base.elf import Elf, NotElf
from tests.fakefabric import build


def read(path: pathlib.Path, prefix: str = "") -> Elf:
    fd = os.open(path, os.O_RDONLY)
    try:
        return elf.read(fd, prefix)
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Build libneeds.so.1, which needs two symbol versions of libgives.so.1, and libplain.so, which has no versions."""
    root = tmp_path_factory.mktemp("libraries")
    gives = build(root, "/libgives.so.1.2", soname="libgives.so.1", versions=["GIVES_1.0", "GIVES_1.1"])
    plain = build(root, "/libplain.so", symbols=["api_one", "api_two", "other"])
    build(root, "/libneeds.so.1", needs=[gives, plain])
    return root


def test_names_versions_and_needs(tree: pathlib.Path) -> None:
    gives = read(tree / "libgives.so.1.2")
    assert (gives.soname, gives.needed, gives.needs) == ("libgives.so.1", (), {})
    assert gives.versions == {"GIVES_1.0", "GIVES_1.1"} and gives.machine == os.uname().machine
    needs = read(tree / "libneeds.so.1")
    assert needs.needed == ("libgives.so.1", "libplain.so")
    assert needs.needs == {"libgives.so.1": ("GIVES_1.0", "GIVES_1.1")} and not needs.versions
    assert read(tree / "libplain.so", "api_").symbols == {"api_one", "api_two"}


@pytest.mark.parametrize("name", ["libc.so.6", "libm.so.6", "libfabric.so.1", "libibverbs.so.1", "libucp.so.0"])
def test_reader_agrees_with_readelf(name: str) -> None:
    path = pathlib.Path(f"/usr/lib/{os.uname().machine}-linux-gnu", name)
    if not path.exists():
        pytest.skip(f"{name} is not installed")
    stdout = subprocess.run(["readelf", "-dVW", path], capture_output=True, text=True, check=True).stdout
    ours = read(path, "ucp_")
    assert list(ours.needed) == re.findall(r"\(NEEDED\).*\[(.*)\]", stdout)
    assert [ours.soname] == re.findall(r"\(SONAME\).*\[(.*)\]", stdout)
    parts = stdout.partition("Version needs section")
    assert ours.versions == set(re.findall(r"Flags: (?:none|WEAK) .*Cnt: \d+ +Name: (\S+)", parts[0]))
    assert {v for each in ours.needs.values() for v in each} == set(re.findall(r"Name: (\S+) +Flags: none", parts[2]))
    symbols = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    assert ours.symbols == set(re.findall(r" (ucp_\S+)", symbols))


def test_invalid_libraries(tmp_path: pathlib.Path) -> None:
    for number, (content, why) in enumerate([
        (b"", "not an ELF file"),
        (b"\x7fELF", "damaged|byte order"),
        (b"INPUT(-lcurses)\n", "not an ELF file"),
        (b"\x7fELF\1\1" + bytes(100), "32-bit"),
        (b"\x7fELF\2\2" + bytes(100), "byte order"),
        (b"\x7fELF\2\1" + bytes(100), "not a shared library"),
    ]):  # fmt: skip
        path = tmp_path / str(number)
        path.write_bytes(content)
        with pytest.raises(NotElf, match=why):
            read(path)


@pytest.mark.parity("files that others could have made are not added")
@pytest.mark.security("I5")
def test_damage_at_any_offset(tree: pathlib.Path, tmp_path: pathlib.Path, rng: random.Random, soak: bool) -> None:
    """Change bytes of the headers and lists, one or many at a time. The reader soon returns or raises NotElf."""
    path = tmp_path / "damaged"
    for name in ("libneeds.so.1", "libgives.so.1.2"):
        whole = (tree / name).read_bytes()
        offsets = range(0x1000 if len(whole) > 0x1000 else len(whole))
        for offset in offsets if soak else rng.sample(offsets, 500):
            damaged = bytearray(whole)
            damaged[offset] = rng.choice((0, 1, 0x7F, 0xFF))
            for _ in range(rng.choice((0, 0, 3, 30))):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            path.write_bytes(damaged[: rng.choice((None, None, rng.randrange(len(damaged))))])
            try:
                read(path, "lib")
            except NotElf:
                pass


def crafted(path: pathlib.Path, tags: dict[int, int], content: bytes, *, size: int = 1 << 40) -> pathlib.Path:
    """Write a sparse library of 1 TiB with these dynamic ``tags``, and ``content`` at address 0x1000."""
    dynamic = b"".join(struct.pack("=QQ", tag, value) for tag, value in tags.items()) + bytes(16)
    head = b"\x7fELF\2\1\1" + bytes(9) + struct.pack("=HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    loads = struct.pack("=IIQQQQQQ", 1, 4, 0, 0, 0, size, size, 0)
    loads += struct.pack("=IIQQQQQQ", 2, 4, 0x800, 0x800, 0, len(dynamic), len(dynamic), 0)
    path.write_bytes((head + loads).ljust(0x800, b"\0") + dynamic.ljust(0x800, b"\0") + content)
    os.truncate(path, size)
    return path


NAMES, TABLE, SIZE, HASH = 5, 6, 10, 0x6FFFFEF5
DEFINES, DEFINED, NEEDS, NEEDED = range(0x6FFFFFFC, 0x70000000)


@pytest.mark.parity("files that others could have made are not added")
@pytest.mark.security("I5")
def test_lists_that_do_not_end_are_read_to_a_limit(tmp_path: pathlib.Path) -> None:
    """Lists can form a loop, or continue through a hole of 1 TiB."""
    strings = {NAMES: 0x1000, SIZE: 16}
    loop = struct.pack("=HHIII", 1, 65535, 0, 16, 0) + struct.pack("=IHHII", 0, 0, 0, 0, 0)
    library = crafted(tmp_path / "needs", {**strings, NEEDS: 0x1010, NEEDED: 1 << 62}, b"lib\0".ljust(16, b"\0") + loop)
    assert read(library).needs == {"lib": ("lib",) * 4096}
    entries = struct.pack("=HHHHIII", 1, 0, 1, 1, 0, 20, 28) + struct.pack("=II", 0, 0)
    library = crafted(tmp_path / "gives", {**strings, DEFINES: 0x1010, DEFINED: 1 << 60}, bytes(16) + entries * 100_000)
    assert read(library).versions == {""}
    hashed = struct.pack("=IIII", 1, 1, 0, 0) + struct.pack("=I", 1) + bytes(64)
    tags = {**strings, HASH: 0x1010, TABLE: 0x1000, SIZE: 1 << 40}
    with pytest.raises(NotElf, match="its string table is too large"):
        read(crafted(tmp_path / "names", tags, bytes(16) + hashed), "x")
    tags[SIZE] = 4 << 20
    with pytest.raises(NotElf, match="damaged|names"):
        read(crafted(tmp_path / "hash", {**tags, HASH: 1 << 50}, bytes(16)), "x")
    assert len(read(crafted(tmp_path / "symbols", tags, bytes(16) + hashed), "x").symbols) == 0
