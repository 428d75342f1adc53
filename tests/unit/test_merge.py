"""Merged layers show the same files as the stack of layers."""

from __future__ import annotations

import io
import os
import random
import stat
from pathlib import Path

from enroot_py.store import index, layertree, merge
from enroot_py.store.overlayfs import look
from tests import images
from tests.images import digest, directory, entry, symlink

NAMES = ["a", "b", "d", "d/a", "d/e", "d/e/f", "d/e/g", "h"]


def layer(rng: random.Random) -> bytes:
    """Return files, directories, symlinks, whiteouts and opaque directories under few names, so that they collide."""
    entries = []
    for name in rng.sample(NAMES, rng.randint(1, 5)):
        if any(name.startswith(f"{other.name}/") for other, _ in entries if not other.isdir()):
            continue
        parent, _, last = name.rpartition("/")
        mtime = 1_600_000_000 + rng.randrange(10**6)
        entries.append(
            rng.choice(
                (
                    entry(name, rng.randbytes(3), mtime=mtime, mode=rng.choice((0o644, 0o4755, 0o600))),
                    directory(name, rng.choice((0o755, 0o700, 0o1777)), mtime=mtime),
                    directory(name, mtime=mtime),
                    symlink(name, "h"),
                    entry(f"{parent}/.wh.{last}".lstrip("/")),
                    entry(f"{name}/.wh..wh..opq"),
                )
            )
        )
    return images.tar(entries)


def visible(lowerdirs: list[str], implicit: list[frozenset[str]]) -> dict[str, tuple[object, ...]]:
    """Return type, mode, time and content of a stack's visible entries; only the type of undescribed directories."""
    found: dict[str, tuple[object, ...]] = {}
    for name in NAMES:
        seen = look(lowerdirs, name)
        if seen is None:
            continue
        status, path = seen.status, seen.layers[0][1]
        if stat.S_ISDIR(status.st_mode):
            said = [os.stat(holder) for number, holder in seen.layers if name not in implicit[number]]
            found[name] = ("d", said[0].st_mode, said[0].st_mtime_ns) if said else ("d",)
        elif stat.S_ISLNK(status.st_mode):
            found[name] = ("l", os.readlink(path))
        else:
            found[name] = ("f", status.st_mode, status.st_mtime_ns, Path(path).read_bytes())
    return found


def test_merged_layers_show_what_the_stack_shows(tmp_path: Path, rng: random.Random) -> None:
    for number in range(40):
        place = tmp_path / str(number)
        directories = []
        for count in range(rng.randint(2, 6)):
            directories.insert(0, place / f"layer{count}")
            directories[0].mkdir(parents=True)
            layertree.unpack(io.BytesIO(layer(rng)), str(directories[0]))
        indexes = [index.read(str(path)) for path in directories]
        for at, its in enumerate(indexes):
            if its.opaque:  # the layers below are not part of an image's stack
                del directories[at + 1 :], indexes[at + 1 :]
                break
        lowerdirs = [f"{path}/fs" for path in directories]
        merged = place / "merged"
        merged.mkdir()
        merge.merge(lowerdirs, indexes, str(merged), digest(b"x"), 7)
        before = visible(lowerdirs, [index.implicit for index in indexes])
        after = visible([f"{merged}/fs"], [frozenset()])
        assert {name: said[: len(before[name])] for name, said in after.items()} == before
        assert dict(index.special_modes([f"{merged}/fs"])) == dict(index.special_modes(lowerdirs))
        assert list(index.differences(str(merged))) == []


def test_name_is_the_chain_of_the_layers() -> None:
    """The example of the OCI image specification: ChainID(A|B) = Digest(ChainID(A) + " " + DiffID(B))."""
    first, second = digest(b"1"), digest(b"2")
    assert merge.chain_id([first]) == first
    assert merge.chain_id([first, second]) == digest(f"{first} {second}".encode())
