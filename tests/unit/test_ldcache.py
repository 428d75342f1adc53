"""Compare the loader cache that penroot writes with the cache that ldconfig(8) writes."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess

import pytest

from enroot_py.base import ldcache

# The flags of this machine's libraries, and ldconfig's word for them.
NATIVE, KIND = {"x86_64": (0x303, "x86-64"), "aarch64": (0xA03, "AArch64")}[os.uname().machine]


def listed(cache: pathlib.Path) -> list[str]:
    """Return the lines "name (kind) => path" that ldconfig lists for a cache."""
    done = subprocess.run(["/sbin/ldconfig", "-C", cache, "-p"], capture_output=True, text=True, check=True)
    return [line.strip() for line in done.stdout.splitlines() if "=>" in line]


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a root that contains libraries whose names are hard to sort, and ldconfig's cache of them."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.conf").write_text("/lib\n")
    names = "a.so.1 a.so.10 a.so.9 a-b.so.1 a2.so.1 a10.so.1 zz.so.1 A.so.1".split()
    for name in names:
        compile_library(tmp_path, f"lib/lib{name}", f"lib{name}")
    ldconfig(tmp_path)
    return tmp_path


def compile_library(tree: pathlib.Path, path: str, soname: str) -> None:
    target = tree / path
    target.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-o", target, "-x", "c", "/dev/null"]
    subprocess.run(command, check=True)


def ldconfig(tree: pathlib.Path, *options: str) -> None:
    as_root = [] if os.geteuid() == 0 else ["unshare", "-r"]
    subprocess.run([*as_root, "/sbin/ldconfig", "-r", tree, *options], check=True, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("form", ["new", "compat"])
def test_extended_cache_equals_that_of_ldconfig(tree: pathlib.Path, form: str) -> None:
    ldconfig(tree, "-c", form)
    before = (tree / "etc/ld.so.cache").read_bytes()
    more = ["liba.so.2", "liba.so.11", "libb.so.1", "liba3.so.1", "libzzz.so.1", "lib0.so.1", "liba.so.9x"]
    mine = tree / "mine"
    mine.write_bytes(ldcache.extend(before, [(NATIVE, name, f"/lib/{name}") for name in more]))
    for name in more:
        compile_library(tree, f"lib/{name}", name)
    ldconfig(tree)
    assert listed(mine) == listed(tree / "etc/ld.so.cache")


def test_libraries_of_the_driver_come_first(tree: pathlib.Path) -> None:
    mine = tree / "mine"
    library = (NATIVE, "liba.so.9", "/opt/driver/liba.so.9")
    mine.write_bytes(ldcache.extend((tree / "etc/ld.so.cache").read_bytes(), [library]))
    paths = [line.split(" => ")[1] for line in listed(mine) if line.startswith("liba.so.9 ")]
    assert paths == ["/opt/driver/liba.so.9", "/lib/liba.so.9"]
    assert ldcache.extend(mine.read_bytes(), [library]) == mine.read_bytes()


@pytest.mark.parametrize("form", ["new", "compat"])
def test_libraries_for_certain_processors_stay(tree: pathlib.Path, form: str) -> None:
    compile_library(tree, "lib/glibc-hwcaps/x86-64-v2/libfast.so.1", "libfast.so.1")
    ldconfig(tree, "-c", form)
    mine = tree / "mine"
    mine.write_bytes(ldcache.extend((tree / "etc/ld.so.cache").read_bytes(), [(NATIVE, "libb.so.1", "/lib/libb.so.1")]))
    ldconfig(tree)  # ldconfig 2.36 shows no processors for caches in its compat format
    assert [line for line in listed(mine) if 'hwcap: "x86-64-v2"' in line]
    assert set(listed(mine)) == {*listed(tree / "etc/ld.so.cache"), f"libb.so.1 (libc6,{KIND}) => /lib/libb.so.1"}


def test_cache_is_written_from_nothing(tmp_path: pathlib.Path) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(ldcache.extend(b"", [(NATIVE, "libb.so.1", "/x/libb.so.1"), (NATIVE, "liba.so", "/x/other.so")]))
    assert listed(mine) == [f"libb.so.1 (libc6,{KIND}) => /x/libb.so.1", f"liba.so (libc6,{KIND}) => /x/other.so"]


def test_libraries_are_found_by_name_prefix(tree: pathlib.Path) -> None:
    data = (tree / "etc/ld.so.cache").read_bytes()
    libraries = ldcache.find(data, (b"liba.", b"libz"))
    assert {(name, path) for _, name, path in libraries} == {
        (name, f"/lib/{name}") for name in ("liba.so.1", "liba.so.9", "liba.so.10", "libzz.so.1")
    }
    assert {flags for flags, _, _ in libraries} == {NATIVE}
    assert ldcache.find(b"no cache", (b"lib",)) == []


@pytest.mark.parametrize("cut", [21, 60, 200])
def test_truncated_cache_is_an_error(tree: pathlib.Path, cut: int) -> None:
    data = (tree / "etc/ld.so.cache").read_bytes()
    with pytest.raises(ldcache.DAMAGE):
        ldcache.extend(data[:cut], [(NATIVE, "libb.so.1", "/lib/libb.so.1")])


def test_damaged_cache_causes_no_hang_and_no_other_error(tree: pathlib.Path, rng: random.Random, soak: bool) -> None:
    """A damaged cache of an image is parsed, or raises ldcache.DAMAGE."""
    compile_library(tree, "lib/glibc-hwcaps/x86-64-v2/libfast.so.1", "libfast.so.1")
    ldconfig(tree)
    good = (tree / "etc/ld.so.cache").read_bytes()
    for _ in range(200_000 if soak else 3_000):
        data = bytearray(good[: rng.randrange(20, len(good) + 1)])
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(min(20, len(data) - 1), len(data))] = rng.choice((0, 255, rng.randrange(256)))
        try:
            ldcache.extend(bytes(data), [(NATIVE, "libb.so.1", "/lib/libb.so.1")])
            ldcache.find(bytes(data), (b"liba",))
        except ldcache.DAMAGE:
            pass
