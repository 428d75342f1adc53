"""An earlier and a later version of penroot use one store. penroot runs from a read-only installation."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.images import Image, Layer, directory, tar
from tests.installation import IS_INSTALLED, LIBRARY, copy_tree
from tests.kernel.conftest import PREFIX, User, require
from tests.kernel.registry import Server, serve

REFUSED = r"the store /\S+ has format 2, which a later penroot made: penroot \S+ reads 1"


@pytest.fixture
def registry(user: User) -> Iterator[Server]:
    with serve(user.home / "registry") as server:
        layers = [Layer(tar([directory("bin"), directory("tmp")]))]
        for tag in ("1", "2"):
            server.pusher.image("library/small", tag, Image(layers, {"Env": [f"TAG={tag}"]}))
        yield server


@pytest.fixture
def later(user: User) -> str:
    """Return the program of a later version. It writes store format 2, and also reads format 1."""
    program = copy_tree(user.home / "later")
    layout = user.home / "later/enroot_py/store/layout.py"
    text, count = re.subn(r'^FORMATS = \("1",\)', 'FORMATS = ("1", "2")', layout.read_text(), flags=re.MULTILINE)
    assert count == 1
    layout.write_text(text)
    return str(program)


def test_store_of_an_earlier_version_is_read(user: User, registry: Server, later: str) -> None:
    """The earlier version refuses a store to which the later version has written."""
    uri = f"docker://{registry.host}/library/small"
    user.penroot("create", "--name", "one", f"{uri}:1")
    mark = user.home / "cache/format"
    assert os.readlink(mark) == "1"
    assert "TAG=1" in user.run(later, "start", "--explain", "one").stdout
    assert "library/small:1" in user.run(later, "cache", "list").stdout
    assert os.readlink(mark) == "1"  # the later version does not convert a store that it only reads
    user.run(later, "create", "--name", "two", f"{uri}:2")
    assert os.readlink(mark) == "2"
    for verb in (
        *(("start", "one"), ("start", f"{uri}:1"), ("create", "--name", "three", f"{uri}:1")),
        *(("cache", verb) for verb in ("list", "metrics", "prune", "verify")),
        ("import", "--output", str(user.home / "small.sqsh"), f"{uri}:1"),
        ("export", "--output", str(user.home / "one.sqsh"), "one"),
    ):
        lines = user.penroot(*verb, status=1).stderr.splitlines()
        assert re.search(REFUSED, lines[0]), verb
        assert "use that penroot, or set ENROOT_CACHE_PATH to another directory" in lines[1], verb
        assert len(lines) == 2, verb
    assert "has format 2" in user.run(f"{PREFIX}/bin/penroot", "doctor", status=1).stdout
    assert user.penroot("list").stdout.split() == ["one", "two"]
    user.run(later, "start", "--explain", "two")


def test_an_installation_that_is_read_only(user: User, rootfs: pathlib.Path) -> None:
    require(os.geteuid() == 0, "only root can make a read-only mount")
    require(IS_INSTALLED, "the test needs an installation: set PENROOT_PREFIX")
    script = f'mount --bind {PREFIX} {PREFIX} && mount -o remount,bind,ro {PREFIX} && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", script, "sh")
    done = user.run(f"{PREFIX}/bin/penroot", "start", "box", "echo", "up", prefix=prefix)
    assert (done.stdout, done.stderr) == ("up\n", "")
    library = os.path.realpath(LIBRARY)
    code = f"import sys; sys.path.insert(0, '{library}'); from enroot_py.base import versions; versions.use()"
    refused = subprocess.run([*prefix, "python3", "-IS", "-c", code], capture_output=True, text=True, check=False)
    assert "Read-only file system" in refused.stderr
    assert user.penroot("version").returncode == 0
