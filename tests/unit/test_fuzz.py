"""Mutated files and options lead to a result or a clear error, and never to a traceback."""

from __future__ import annotations

import json
import os
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

from enroot_py.base.errors import PenrootError
from enroot_py.config import words
from enroot_py.runtime import environ, etc, fstab

pytestmark = pytest.mark.soak

SEEDS = {
    "fstab": "/a /b none x-create=auto,rbind,ro,rslave 0 -1\ntmpfs /t tmpfs size=1m\n${HOME} \\040 bind,nofail\n",
    "rc": etc.write_rc("docker://x", {"k": "v"}, etc.Exec("/w", ("a b", "c'd"), ("e",))),
    "environment": etc.write_environment({"A": "1", "B": "two\nlines", "C": "${HOME}"}),
    "setting": "ENROOT_X ${A:-${B}}$(id -u)$C\n",
}


def mutate(text: str, rng: random.Random) -> str:
    """Delete some characters of a text, and insert characters that have a meaning for the parsers."""
    characters = list(text)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(characters) + 1)
        character = rng.choice("\0\n\t \\'\"$(){}=,:#-/rbx\udc80é")
        if rng.random() < 0.4:
            characters[at : at + rng.randint(0, 4)] = []
        else:
            characters[at:at] = character * rng.choice((1, 1, 1, 3))
    return "".join(characters)


_LONG = "a number of 5000 digits"
_ODD = (
    *(None, True, -1, 0, 1.5, 1 << 70, "", "x", "9" * 40, "a b\r\nc", "../../x", "\ud800", "sha256:x", _LONG),
    *([], {}, [None], [[]], {"a": None}, ["x"], {"digest": 7}),
)


def retyped(document: object) -> Iterator[bytes]:
    """Yield copies of a JSON document. In each copy, one value has another type or is beyond all limits."""
    whole = {"document": json.loads(json.dumps(document))}

    def at(node: Any) -> Iterator[bytes]:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            value = node[key]
            yield from at(value)
            for odd in _ODD:
                node[key] = odd
                yield json.dumps(whole["document"]).replace(f'"{_LONG}"', "9" * 5000).encode()
            node[key] = value

    return at(whole)


@pytest.mark.parametrize("kind", SEEDS)
def test_mutated_text(kind: str, rng: random.Random, soak: bool) -> None:
    for _ in range(300_000 if soak else 3_000):
        text = mutate(SEEDS[kind], rng)
        try:
            if kind == "fstab":
                for mount in fstab.parse_file(text, {"HOME": "/h"}, "fuzz"):
                    mount.describe()
            elif kind == "rc":
                etc.read_rc(text, "")
            elif kind == "environment":
                etc.read_environment(text)
                environ.of_options(tuple(text.split("\n")[:1]), {})
            else:
                words.expand(text, {"A": ""})
        except (PenrootError, ValueError) as e:
            assert str(e)


VOLUMES = fstab.write_image(["/data", "/a b", "/run/$x", "/srv/deep"]) + "tmpfs /t tmpfs size=1m 0 0\n"


def test_image_mounts_only_its_own_paths(rng: random.Random, soak: bool) -> None:
    """The fstab of an image can only mount a tmpfs, or a path that is resolved beneath the image's root."""
    for _ in range(300_000 if soak else 3_000):
        try:
            for mount in fstab.parse_image(mutate(VOLUMES, rng), "/scratch/root", "fuzz"):
                assert mount.confined and (mount.inside or mount.fstype == "tmpfs"), mount.describe()
                assert not mount.words & {"remount", "x-move", "x-detach"}, mount.describe()
        except (PenrootError, ValueError) as e:
            assert str(e)


def test_an_image_gets_no_secret_of_its_caller(rng: random.Random, soak: bool, tmp_path: pathlib.Path) -> None:
    """No spelling of a variable in the image's /etc/environment gives the image a secret of the caller."""
    host = {"HF_TOKEN": "hidden", "MY_PASSWORD": "hidden", "PROXY": "http://me:hidden@proxy", "HOME": "/h"}
    (tmp_path / "etc").mkdir()
    text = "".join(f"A{number}=${{{name}}} '${name}' ${{{name}:-}}\n" for number, name in enumerate(host))
    root = os.open(tmp_path, os.O_PATH)
    try:
        for _ in range(100_000 if soak else 1_000):
            (tmp_path / "etc/environment").write_text(mutate(text, rng), errors="surrogateescape")
            assert "hidden" not in "".join(environ.of_image(root, host).values())
    finally:
        os.close(root)
