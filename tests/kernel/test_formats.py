"""penroot runs enroot's images and containers, and writes images and containers in enroot's format."""

from __future__ import annotations

import io
import json
import os
import pathlib
import shutil
import stat
import subprocess

import pytest

from enroot_py.store import index, layertree
from tests import images
from tests.images import Image, Layer, directory, entry
from tests.kernel.conftest import User, require
from tests.kernel.registry import serve

GOLDEN = pathlib.Path(__file__).parent.parent / "unit/enroot"
CONFIGS = sorted(path.stem for path in GOLDEN.glob("*.json"))
# The options with which enroot calls mksquashfs by default.
ENROOT_SQUASH_OPTIONS = ("-all-root", "-comp", "lzo", "-noD")
ENTRY = b'#!/bin/sh\necho "$PWD" "$A" "$#" "$@"\n'


def unpacked(user: User, image: pathlib.Path) -> pathlib.Path:
    """Extract an image with unsquashfs. Root also gets the files' owners and modes."""
    target = user.home / f"{image.name}.tree"
    command = ["unsquashfs", "-quiet", "-no-progress", "-d", str(target), str(image)]
    subprocess.run(command, check=True, capture_output=True)
    return target


@pytest.mark.parity(
    "ENROOT_ALLOW_HTTP",
    "penroot makes the same image as enroot",
    "/etc/rc: comments name the image's source and labels",
)
@pytest.mark.parametrize("name", CONFIGS)
def test_import_writes_what_enroot_writes(user: User, name: str) -> None:
    require(shutil.which("mksquashfs"), "squashfs-tools is not installed")
    config = json.loads((GOLDEN / f"{name}.json").read_text())["config"]
    with serve(user.home / "registry") as server:
        server.pusher.image(f"library/{name}", "1", Image([Layer(images.tar([directory("bin")]))], config))
        user.own(user.home)
        uri = f"docker://{server.host}#library/{name}:1"
        user.penroot("import", "-o", "image.sqsh", uri, env={"ENROOT_ALLOW_HTTP": "y"})
    etc = unpacked(user, user.home / "image.sqsh") / "etc"
    assert sorted(path.name for path in etc.iterdir()) == ["environment", "fstab", "rc", "rc.local"]
    for file in ("rc", "fstab", "environment"):
        expected = (GOLDEN / f"{name}.{file}").read_bytes()
        expected = expected.replace(f"docker://registry-1.docker.io#library/{name}:1".encode(), uri.encode())
        assert (etc / file).read_bytes() == expected, file
    assert all(line.startswith("#") for line in (etc / "rc.local").read_text().splitlines())
    for path in etc.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        assert os.geteuid() != 0 or path.stat().st_uid == path.stat().st_gid == 0


@pytest.fixture
def tree(user: User, rootfs: pathlib.Path) -> pathlib.Path:
    """Return the container ``box`` with the files that enroot writes for the config ``full``."""
    for file in ("rc", "fstab", "environment"):
        shutil.copy(GOLDEN / f"full.{file}", rootfs / "etc" / file)
    (rootfs / "etc/rc.local").write_text("# nothing\n")
    (rootfs / "entry.sh").write_bytes(ENTRY)
    (rootfs / "entry.sh").chmod(0o755)
    for name in ("srv/app", "data", "var/lib/db"):
        (rootfs / name).mkdir(parents=True)
    os.setxattr(rootfs / "entry.sh", "user.note", b"kept")
    user.own(rootfs)
    return rootfs


@pytest.fixture
def enroots(user: User, tree: pathlib.Path) -> pathlib.Path:
    require(shutil.which("mksquashfs"), "squashfs-tools is not installed")
    if os.geteuid() == 0:
        os.chmod("/dev/fuse", 0o666)
    path = user.home / "full.sqsh"
    subprocess.run(["mksquashfs", str(tree), str(path), *ENROOT_SQUASH_OPTIONS, "-quiet", "-no-progress"], check=True)
    user.own(path)
    shutil.rmtree(tree)
    return path


def check_what_runs(user: User, target: str) -> None:
    assert user.start(target) == "/srv/app b c 4 --flag serve it's two words\n"
    assert user.start(target, "own", "words") == "/srv/app b c 3 --flag own words\n"
    script = user.home / "rc"
    script.write_text('echo "$A|$EMPTY|$EQ"; touch /data/volume /var/lib/db/volume && echo writable; ! touch /x\n')
    assert user.start("--rc", str(script), target) == "b c||a=b\nwritable\n"


@pytest.mark.parity(
    "an image is a squashfs file", "/etc/rc: starts the entrypoint and command in the working directory"
)
def test_image_of_enroot_starts(user: User, enroots: pathlib.Path) -> None:
    check_what_runs(user, str(enroots))


@pytest.mark.parity(
    "create: keeps extended attributes user.*", "an image is a squashfs file", "a container is a directory"
)
def test_create_makes_the_same_container_as_enroot(user: User, enroots: pathlib.Path) -> None:
    user.penroot("create", "-n", "made", str(enroots))
    check_what_runs(user, "made")
    # As in enroot, unsquashfs runs with -user-xattrs.
    assert os.getxattr(user.data / "made/entry.sh", "user.note") == b"kept"
    assert os.listdir(user.data) == ["made"]
    expected = unpacked(user, enroots)
    assert outline(user.data / "made") == outline(expected)


def outline(tree: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    """Return the mode, and the content or link target, of each file in a tree."""
    files = {}
    for path in sorted(tree.rglob("*")):
        kind = path.lstat().st_mode
        content = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        files[str(path.relative_to(tree))] = (kind, content)
    return files


@pytest.mark.parity("export: root owns everything", "a container is a directory")
def test_container_of_enroot_is_used_and_exported(user: User, tree: pathlib.Path) -> None:
    """enroot leaves /.lock and mount points of mode 0000 in a container, and /.enroot in a bundle's container."""
    (tree / ".lock").write_text("")
    (tree / ".enroot/bin").mkdir(parents=True)
    (tree / "mnt/point").mkdir(parents=True)
    (tree / "mnt/file").write_text("")
    (tree / "mnt/empty").write_text("")
    (tree / "mnt/secret").write_text("not empty")
    user.own(tree)
    for name in ("point", "file", "secret"):
        (tree / "mnt" / name).chmod(0)
    assert user.penroot("list").stdout == "box\n"
    check_what_runs(user, "box")
    user.start("--rw", "-m", "/usr/share:/mnt/ours/deep", "-m", "/etc/hosts:/mnt/hosts", "box", "x")
    user.penroot("export", "--output", "again.sqsh", "box")
    names = set(outline(unpacked(user, user.home / "again.sqsh")))
    assert not names & {".lock", ".enroot", "mnt/point", "mnt/file", "mnt/ours/deep", "mnt/hosts"}
    assert {"mnt/empty", "mnt/secret", "entry.sh", "etc/rc"} <= names
    user.penroot("create", "again.sqsh")
    check_what_runs(user, "again")


@pytest.mark.parity("/etc/fstab: volumes of the image are mounted, and created if missing")
def test_missing_volume_is_created(user: User, tree: pathlib.Path) -> None:
    (tree / "data").rmdir()
    script = user.home / "rc"
    script.write_text("touch /data/volume && echo writable\n")
    assert user.start("--rc", str(script), "box") == "writable\n"


def test_config_replaces_files_of_a_layer(user: User) -> None:
    """Files written from the image's config replace files of the layers, as in enroot's images."""
    layer = Layer(images.tar([directory("etc"), entry("etc/rc", b"old"), entry("etc/environment", b"OLD=1\n")]))
    with serve(user.home / "registry") as server:
        server.pusher.image("library/x", "1", Image([layer], {"Env": ["NEW=1"], "Cmd": ["/bin/sh"]}))
        user.own(user.home)
        uri = f"docker://{server.host}#library/x:1"
        user.penroot("import", "-o", "x.sqsh", uri, env={"ENROOT_ALLOW_HTTP": "y"})
    etc = unpacked(user, user.home / "x.sqsh") / "etc"
    assert (etc / "environment").read_text() == "NEW=1\n"
    assert "old" not in (etc / "rc").read_text()


def test_more_links_than_the_file_system_has(tmp_path: pathlib.Path) -> None:
    """ext4 allows 65,000 names of a file. Further names belong to a copy with the same content, mode and time."""
    count = 66_000
    entries = [entry("f", b"data", mode=0o750, mtime=7), images.symlink("s", "f")]
    entries += [images.hardlink(f"d{n // 1000}/l{n}", "f") for n in range(count)]
    layertree.unpack(io.BytesIO(images.tar(entries)), str(tmp_path))
    links = [tmp_path / f"fs/d{n // 1000}/l{n}" for n in (0, count // 2, count - 2, count - 1)]
    assert {(link.read_bytes(), link.stat().st_mode & 0o777, link.stat().st_mtime) for link in links} == {
        (b"data", 0o750, 7)
    }
    assert links[-1].stat().st_ino == links[-2].stat().st_ino
    assert list(index.differences(str(tmp_path))) == []
