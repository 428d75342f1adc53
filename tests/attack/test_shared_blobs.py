"""Another user writes to, or reads from, the directory in which nodes share downloads."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import time

import pytest

from tests import images
from tests.attack.conftest import UID
from tests.fakeregistry import Faulty, faulty
from tests.images import entry
from tests.kernel.conftest import PREFIX, User, require
from tests.kernel.registry import Server

GROUP = 27009


@pytest.fixture(scope="module")
def registry(registry: Server) -> Server:
    image = images.busybox(entry("number", b"7"))
    registry.pusher.image("test/shared", "1", image)
    return registry


@pytest.fixture
def blobs(user: User, bob: User, scratch: pathlib.Path) -> pathlib.Path:
    """Return the directory of shared blobs, which all users can write to."""
    for who in (user, bob):
        who.environ.update(ENROOT_SHARED_BLOBS=str(scratch), ENROOT_ALLOW_HTTP="yes")
    return scratch


def start(user: User, registry: Server | Faulty, **env: str) -> str:
    """Run a start that succeeds within a minute, and return its messages."""
    began = time.monotonic()
    done = user.penroot("start", f"docker://{registry.host}/test/shared:1", "cat", "/number", env=env)
    assert done.stdout == "7"
    assert time.monotonic() - began < 50  # a start waits 60 s for a lock
    return done.stderr


def names(registry: Server, place: pathlib.Path) -> list[str]:
    """Return the file names of the image's blobs in the shared directory."""
    return sorted(path.name for path in (place / "sha256").iterdir())


PLANTED = [("blob", what) for what in ("fifo", "directory")]
PLANTED += [("lock", what) for what in ("fifo", "directory", "link", "of the future", "closed")]


@pytest.mark.parity("ENROOT_SHARED_BLOBS")
@pytest.mark.security("U7")
@pytest.mark.parametrize(("which", "what"), PLANTED)
def test_special_files_of_bobs_cost_a_warning(
    user: User, bob: User, blobs: pathlib.Path, registry: Server, which: str, what: str
) -> None:
    """A FIFO, directory, link or file of bob's is in the place of a blob or of its lock."""
    start(bob, registry)
    for name in names(registry, blobs):
        path = blobs / "sha256" / name
        size = path.stat().st_size
        path.unlink()
        path = path.with_suffix(".lock") if which == "lock" else path
        if what == "fifo":
            os.mkfifo(path, 0o666)
        elif what == "directory":
            path.mkdir()
        elif what == "link":
            path.symlink_to("/dev/zero")
        else:
            path.write_bytes(b"x" * size)
            path.chmod(0o600 if what == "closed" else 0o666)
            os.utime(path, (time.time() + 1e6,) * 2)  # a lock with a future date never expires
        os.chown(path, bob.uid, bob.uid, follow_symlinks=False)
    assert str(blobs) in start(user, registry)


@pytest.mark.security("U7")
@pytest.mark.parametrize("what", ["closed", "link", "fifo", "file"])
@pytest.mark.parametrize("which", ["sha256", "tmp"])
def test_directories_that_bob_has_changed(
    user: User, bob: User, blobs: pathlib.Path, registry: Server, what: str, which: str
) -> None:
    """sha256 or tmp is a directory, link, FIFO or file of bob's. Nothing is written through the link."""
    path = blobs / which
    target = user.home / "precious"
    target.mkdir()
    user.own(target)
    if what == "closed":
        path.mkdir(0o755)
    elif what == "link":
        path.symlink_to(target)
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.touch()
    os.chown(path, bob.uid, bob.uid, follow_symlinks=False)
    before = target.stat().st_mtime_ns
    assert str(blobs) in start(user, registry)
    assert list(target.iterdir()) == [] and target.stat().st_mtime_ns == before


@pytest.mark.parity("ENROOT_SHARED_BLOBS_FOR")
@pytest.mark.security("U8")
def test_layers_of_a_user_or_a_group_are_read_by_nobody_else(
    user: User, bob: User, blobs: pathlib.Path, registry: Server
) -> None:
    """Private layers stay private in a shared directory, even if bob has created the victim's directory before."""
    bob.run("mkdir", "-m", "777", f"{blobs}/user-{UID}")
    assert str(blobs) not in start(user, registry, ENROOT_SHARED_BLOBS_FOR="user")
    kept = [path for path in blobs.rglob("sha256/*") if len(path.name) == 64]
    assert len(kept) == 3 and all(path.stat().st_uid == UID for path in kept)
    for path in kept:
        bob.run("cat", str(path), status=1)
    with faulty(registry.host) as front:
        start(user, front, ENROOT_SHARED_BLOBS_FOR="user", ENROOT_CACHE_PATH=f"{user.home}/other-node")
    assert front.seen and front.asked("/blobs/") == 0

    assert str(blobs) not in start(bob, registry, ENROOT_SHARED_BLOBS_FOR="group")
    (group,) = blobs.glob("group-*")
    assert group.stat().st_mode & 0o7777 == 0o3770 and group.stat().st_gid == bob.uid
    user.run("ls", str(group), status=2)
    stolen = f"group-{UID}"
    bob.run("mkdir", "-m", "777", f"{blobs}/{stolen}")
    assert stolen in start(user, registry, ENROOT_SHARED_BLOBS_FOR="group", ENROOT_CACHE_PATH=f"{user.home}/third")
    assert list((blobs / stolen).iterdir()) == []


@pytest.mark.security("U8")
def test_a_store_that_root_fills_for_all(user: User, blobs: pathlib.Path, registry: Server) -> None:
    """Starts succeed if root stores images as squashfs files, and fail if root stores them as unpacked trees."""
    require(shutil.which("squashfuse") or shutil.which("squashfuse_ll"), "squashfuse is not installed")
    image = f"docker://{registry.host}/test/shared:1"
    words = ("start", "--rw", image, "sh", "-c", "cat /number; echo 1 > /etc/new")
    done = {}
    for form in ("squashfs", "tree"):
        store = str(blobs / form)
        env = {**user.environ, "HOME": "/root", "ENROOT_CACHE_PATH": store, "TMPDIR": str(blobs)}
        env |= {f"ENROOT_{name}_PATH": f"{blobs}/{name}" for name in ("DATA", "RUNTIME")} | {"ENROOT_STORE_FORM": form}
        subprocess.run([f"{PREFIX}/bin/penroot", "create", "-n", form, image], env=env, check=True)
        subprocess.run(["chmod", "-R", "a+rX", store], check=True)
        done[form] = user.penroot(*words, env={"ENROOT_CACHE_PATH": store}, status=int(form == "tree"))
    assert done["squashfs"].stdout == "7"
    assert "belongs to uid 0, and only its owner can use its trees" in done["tree"].stderr
    assert "ENROOT_STORE_FORM=squashfs" in done["tree"].stderr
