"""Mutated layers and documents of images end in bounded time with a result or an error, and change nothing outside."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enroot_py.base import trees
from enroot_py.base.errors import PenrootError
from enroot_py.config import settings
from enroot_py.registry.platforms import architecture
from enroot_py.registry.reference import LocalImage
from enroot_py.store import layertree
from enroot_py.store import pull as engine
from enroot_py.store.index import differences
from tests import images
from tests.images import digest, directory, entry, hardlink, symlink

pytestmark = pytest.mark.soak

SECONDS = 90  # for each test case with --soak: ten minutes in all
MUTANT_TIMEOUT_S = 60  # a mutant normally takes milliseconds


class Hang(BaseException):
    """Processing a mutant took too long."""


@pytest.fixture
def rounds(soak: bool) -> Callable[[int], Iterator[int]]:
    """Return a function that yields round numbers: ``few``, or with --soak as many as fit into SECONDS.

    It raises Hang if a round takes longer than MUTANT_TIMEOUT_S.
    """

    def count(few: int) -> Iterator[int]:
        def late(number: int, frame: object) -> None:
            raise Hang(f"more than {MUTANT_TIMEOUT_S} s")

        before = signal.signal(signal.SIGALRM, late)
        end = time.monotonic() + SECONDS
        number = 0
        try:
            while time.monotonic() < end if soak else number < few:
                signal.alarm(MUTANT_TIMEOUT_S)
                yield number
                number += 1
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    return count


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Path]:
    """Return the directory ``in``, and check after the test that nothing beside it has changed."""
    (tmp_path / "in").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("untouched")
    before = os.stat(outside / "file"), os.stat(outside).st_mtime_ns
    yield tmp_path / "in"
    assert sorted(os.listdir(tmp_path)) == ["in", "outside"]
    assert os.listdir(outside) == ["file"]
    assert (outside / "file").read_text() == "untouched"
    assert (os.stat(outside / "file").st_mode, os.stat(outside).st_mtime_ns) == (before[0].st_mode, before[1])


# -- layers


def sparse(name: str, version: str) -> bytes:
    """Return a tar member in a GNU format for sparse files. The file has one piece of data in the middle of a hole."""
    if version == "old":
        header = bytearray(images.tar([entry(name, b"d" * 512)], tarfile.GNU_FORMAT)[:1024])
        header[156:157] = b"S"
        header[386:410] = b"%011o\0%011o\0" % (4096, 512)
        header[483:495] = b"%011o\0" % 65536
        return reseal(header)
    maps = {
        "0.1": ({"GNU.sparse.size": "65536", "GNU.sparse.map": "4096,512"}, b"d" * 512),
        "1.0": ({"GNU.sparse.realsize": "65536"}, b"1\n4096\n512\n".ljust(512, b"\0") + b"d" * 512),
    }
    records, data = maps[version]
    major, minor = version.split(".")
    names = {"GNU.sparse.major": major, "GNU.sparse.minor": minor, "GNU.sparse.name": name}
    return unended(images.tar([entry(name, data, pax_headers={**names, **records})]))


def unended(tar: bytes) -> bytes:
    """Return a tar without its end mark, so that another tar can follow."""
    used = len(tar.rstrip(b"\0"))
    return tar[: -(-used // 512) * 512]


def reseal(tar: bytearray) -> bytes:
    """Correct the header checksums of a tar."""
    for at in range(0, len(tar) - 511, 512):
        if tar[at + 257 : at + 262] == b"ustar":
            tar[at + 148 : at + 156] = b" " * 8
            tar[at + 148 : at + 156] = b"%06o\0 " % sum(tar[at : at + 512])
    return bytes(tar)


def seed() -> bytes:
    pax = {"SCHILY.xattr.user.x": "1", "mtime": "1.5"}
    entries = [directory("a"), entry("a/b", b"data" * 300), symlink("a/l", ".."), hardlink("h", "a/b")]
    entries += [symlink("out", "../../../outside"), entry("out/file", b"reached"), entry("n" * 150, b"1")]
    entries += [entry("a/.wh.c"), entry("a/.wh..wh..opq"), entry("x", b"1", pax_headers=pax)]
    entries += [entry("fifo", type=tarfile.FIFOTYPE), entry("long", type=tarfile.SYMTYPE, linkname="l" * 200)]
    parts = [unended(images.tar(entries[:8])), unended(images.tar(entries[8:], tarfile.GNU_FORMAT))]
    return b"".join(parts) + b"".join(sparse(f"sparse{v}", v) for v in ("old", "0.1", "1.0")) + bytes(1024)


def mutated(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out))
        kind = rng.random()
        if kind < 0.5:
            out[at] = rng.randrange(256)
        elif kind < 0.8:
            some = rng.choice((b"7" * 11, b"9" * 20, b"\x80" + bytes(7), b"\xff" * 12, b"../", b"S", b"\0", b"-1"))
            out[at : at + len(some)] = some
        elif kind < 0.9:
            block = at // 512 * 512
            out[block:block] = out[(other := rng.randrange(len(out)) // 512 * 512) : other + 512]
        else:
            del out[at : at + rng.randint(1, len(out) // 2 + 1)]
            out += b"}" * (not out)
    return bytes(out)


def test_mutated_layers(inside: Path, rng: random.Random, rounds: Callable[[int], Iterator[int]]) -> None:
    tar = seed()
    layertree.unpack(io.BytesIO(tar), str(inside))
    assert (inside / "fs/sparseold").stat().st_size == 65536 == (inside / "fs/sparse1.0").stat().st_size
    for number in rounds(300):
        data = mutated(tar, rng)
        if rng.random() < 0.9:  # most mutants must pass the checksum
            data = reseal(bytearray(data))
        if rng.random() < 0.3:
            data = images.COMPRESSIONS[rng.choice(("gzip", "bzip2", "xz"))](data)
            data = mutated(data, rng) if rng.random() < 0.5 else data
        layer = inside / "layer"
        layer.mkdir()
        try:
            layertree.unpack(io.BytesIO(data), str(layer))
            assert next(differences(str(layer)), None) is None
        except PenrootError as e:
            assert str(e)
        except BaseException as e:
            (inside.parent / "in/mutant").write_bytes(data)
            raise AssertionError(f"round {number}: {inside}/mutant") from e
        finally:
            remove(inside, "layer")


def remove(inside: Path, name: str) -> None:
    parent = os.open(inside, os.O_RDONLY)
    try:
        trees.remove_in(parent, name)
    finally:
        os.close(parent)


# -- documents

ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**63, 10**30, 1.5, 1e308, "", "x", "../../outside", "a\0b", "\ud800", "sha256:", "é\n"),
    *("sha256:" + "0" * 64, "sha256:" + "../" * 21 + "a", [], {}, [[]], [None], {"": ""}, ["a"] * 3, "9" * 40),
)


def spots(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) for each value in a document."""
    keys = document.keys() if isinstance(document, dict) else range(len(document) if isinstance(document, list) else 0)
    for key in list(keys):
        yield document, key
        yield from spots(document[key])


def disturbed(document: Any, rng: random.Random) -> bytes:
    document = json.loads(json.dumps(document))
    for _ in range(rng.randint(1, 3)):
        values = list(spots(document))
        if not values:
            break
        container, key = rng.choice(values)
        kind = rng.random()
        if kind < 0.6:
            container[key] = copy.deepcopy(rng.choice(ODD))
        elif kind < 0.8:
            del container[key]
        elif isinstance(container, list):
            container *= 2
        else:
            container[rng.choice(("size", "digest", "config", "layers", "manifests"))] = container.pop(key)
    data = json.dumps(document).encode()
    if rng.random() < 0.2:
        data = mutated(data, rng)
    return data


def index(manifest: bytes) -> bytes:
    """Return an index.json that names the manifest for this machine's architecture and for another architecture."""
    named = {"mediaType": images.OCI["manifest"], "digest": digest(manifest), "size": len(manifest),
             "annotations": {"org.opencontainers.image.ref.name": "a"}}  # fmt: skip
    platforms = [{"os": "linux", "architecture": name} for name in (architecture(), "s390x")]
    return json.dumps({"schemaVersion": 2, "manifests": [{**named, "platform": each} for each in platforms]}).encode()


def write(inside: Path, image: images.Image, kind: str, spoil: Callable[[bytes], bytes]) -> LocalImage:
    """Write an image as an OCI layout or a docker archive. ``spoil`` mutates the document that ``kind`` names."""
    config, manifest, blob = image.config(), image.manifest(), image.layers[0].blob
    if kind.startswith("docker"):
        saved = {"Config": "config.json", "RepoTags": ["test/a:b"], "Layers": ["layer.tar"] * len(image.layers)}
        listing = json.dumps([saved]).encode()
        listing, config = (spoil(listing), config) if kind == "docker manifest" else (listing, spoil(config))
        members = (("manifest.json", listing), ("config.json", config), ("layer.tar", blob))
        archive = images.tar([entry(name, data) for name, data in members])
        (inside / "image").write_bytes(spoil(archive) if kind == "docker archive" else archive)
        return LocalImage("docker-archive:", str(inside / "image"), "test/a:b")
    if kind == "config":
        config = spoil(config)
        changed = json.loads(manifest)
        changed["config"] |= {"digest": digest(config), "size": len(config)}
        manifest = json.dumps(changed).encode()
    elif kind == "manifest":
        manifest = spoil(manifest)
    data = index(manifest)
    images.write_layout(inside / "layout", (config, manifest, blob), spoil(data) if kind == "index" else data)
    return LocalImage("oci:", str(inside / "layout"), "a")


@pytest.mark.parametrize("kind", ["index", "manifest", "config", "docker manifest", "docker config", "docker archive"])
def test_mutated_documents(inside: Path, kind: str, rng: random.Random, rounds: Callable[[int], Iterator[int]]) -> None:
    layer = images.Layer(images.tar([directory("etc"), entry("etc/passwd", b"root"), symlink("w", "../outside")]))
    settings_of_image = {"Env": ["A=1", "B"], "Cmd": ["a", "b"], "Entrypoint": ["c"], "WorkingDir": "/w/x", "User": "u",
            "Labels": {"k": "v"}, "Volumes": {"/vol": {}}}  # fmt: skip
    image = images.Image([layer, layer], settings_of_image, images.OCI)
    values = settings.load({"HOME": str(inside), "ENROOT_CACHE_PATH": str(inside / "store"), "TMPDIR": str(inside)})
    spoilt: list[bytes] = []

    def spoil(data: bytes) -> bytes:
        spoilt.append(mutated(data, rng) if kind == "docker archive" else disturbed(json.loads(data), rng))
        return spoilt[-1]

    engine.pull(write(inside, image, kind, lambda data: data), values).release()
    for number in rounds(25):
        try:
            pulled = engine.pull(write(inside, image, kind, spoil), values)
            pulled.release()
            assert all(Path(path).is_relative_to(inside / "store") for path in pulled.lowerdirs)
        except PenrootError as e:
            assert str(e)
        except BaseException as e:
            raise AssertionError(f"round {number}: {spoilt[-1]!r}") from e
        assert os.listdir(inside / "store/tmp") == []
        if number % 100 == 99:
            for name in {"layout", "store"} & set(os.listdir(inside)):
                remove(inside, name)
