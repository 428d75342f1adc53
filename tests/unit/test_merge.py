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
    """Return a tar of files, directories, symlinks, whiteouts and opaque directories. Few names make them collide."""
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
    """Return type, mode, time and content of each visible entry of a stack.

    For a directory without an entry in any layer, return only the type. ``implicit`` lists such directories per layer.
    """
    entries: dict[str, tuple[object, ...]] = {}
    for name in NAMES:
        seen = look(lowerdirs, name)
        if seen is None:
            continue
        status, path = seen.status, seen.layers[0][1]
        if stat.S_ISDIR(status.st_mode):
            states = [os.stat(holder) for number, holder in seen.layers if name not in implicit[number]]
            entries[name] = ("d", states[0].st_mode, states[0].st_mtime_ns) if states else ("d",)
        elif stat.S_ISLNK(status.st_mode):
            entries[name] = ("l", os.readlink(path))
        else:
            entries[name] = ("f", status.st_mode, status.st_mtime_ns, Path(path).read_bytes())
    return entries


def test_merged_layers_show_what_the_stack_shows(tmp_path: Path, rng: random.Random) -> None:
    for number in range(40):
        round_directory = tmp_path / str(number)
        directories = []
        for count in range(rng.randint(2, 6)):
            directories.insert(0, round_directory / f"layer{count}")
            directories[0].mkdir(parents=True)
            layertree.unpack(io.BytesIO(layer(rng)), str(directories[0]))
        indexes = [index.read(str(path)) for path in directories]
        for at, layer_index in enumerate(indexes):
            if layer_index.opaque:  # an opaque layer hides all layers below, so the stack ends here
                del directories[at + 1 :], indexes[at + 1 :]
                break
        lowerdirs = [f"{path}/fs" for path in directories]
        merged = round_directory / "merged"
        merged.mkdir()
        merge.merge(lowerdirs, indexes, str(merged), digest(b"x"), 7)
        before = visible(lowerdirs, [index.implicit for index in indexes])
        after = visible([f"{merged}/fs"], [frozenset()])
        assert {name: facts[: len(before[name])] for name, facts in after.items()} == before
        assert dict(index.special_modes([f"{merged}/fs"])) == dict(index.special_modes(lowerdirs))
        assert list(index.differences(str(merged))) == []


def test_merged_layers_are_named_by_their_chain_id() -> None:
    """The OCI image specification defines ChainID(A|B) = Digest(ChainID(A) + " " + DiffID(B))."""
    first, second = digest(b"1"), digest(b"2")
    assert merge.chain_id([first]) == first
    assert merge.chain_id([first, second]) == digest(f"{first} {second}".encode())
