"""Images and containers in a directory whose default ACL names a group or a user: acl(5)."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from tests import images
from tests.images import Layer, directory, entry
from tests.kernel.conftest import User, require, squashed
from tests.kernel.registry import Server

USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
DEFAULT, ACCESS = "system.posix_acl_default", "system.posix_acl_access"
STRANGER = 2  # the ID of a user and of a group that no container maps


def set_default_acl(path: Path, named: int) -> None:
    """Give ``path`` a default ACL that lets in only its owner and STRANGER, as a user or as a group."""
    owner, group, other = (USER_OBJ, 7, 0xFFFFFFFF), (GROUP_OBJ, 0, 0xFFFFFFFF), (OTHER, 0, 0xFFFFFFFF)
    rows = sorted([owner, (named, 7, STRANGER), group, (MASK, 7, 0xFFFFFFFF), other])
    data = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows)
    try:
        os.setxattr(path, DEFAULT, data)
    except OSError as e:
        require(e.errno != errno.EOPNOTSUPP, f"{path} is on a file system without ACLs")
        raise


def with_acl(path: Path) -> list[str]:
    """Return the files beneath ``path`` that have an ACL."""
    files = []
    for file in path.rglob("*"):
        if not file.is_symlink() and {DEFAULT, ACCESS} & set(os.listxattr(file)):
            files.append(str(file))
    return files


@pytest.fixture(scope="module")
def registry(registry: Server) -> Server:
    image = images.busybox(directory("usr"), directory("usr/bin"), directory("usr/lib"), entry("usr/bin/gone", b"1"))
    image.layers.append(Layer(images.tar([entry("usr/bin/.wh.gone"), entry("deep/er/file", b"1", mode=0o640)])))
    registry.pusher.image("test/acl", "1", image)
    return registry


@pytest.fixture(params=[GROUP, USER], ids=["group", "user"])
def acl_directory(user: User, request: pytest.FixtureRequest) -> Path:
    """Return a directory with a default ACL. The user's store, containers and temporary files are in it."""
    path = user.home / "project"
    path.mkdir(mode=0o755)
    user.own(path)
    set_default_acl(path, request.param)
    for name in ("CACHE", "DATA", "RUNTIME", "TEMP"):
        user.environ[f"ENROOT_{name}_PATH"] = str(path / name.lower()) if name != "TEMP" else str(path)
    user.environ["TMPDIR"] = str(path)
    user.data = path / "data"
    return path


MODES = "busybox stat -c '%a %n' / /usr /usr/bin /deep/er/file"
EXPECTED = "755 /\n755 /usr\n755 /usr/bin\n640 /deep/er/file\n"
CHANGE = "touch /usr/bin/x && busybox mkdir /usr/lib/y && busybox stat -c %a /usr/bin/x /usr/lib/y"


@pytest.mark.parametrize("options", [(), ("--root",), ("--pid",)], ids=["plain", "root", "pid"])
def test_stored_image_starts_below_a_default_acl(
    user: User, registry: Server, acl_directory: Path, options: tuple[str, ...]
) -> None:
    uri = f"docker://{registry.host}/test/acl:1"
    assert user.start(*options, uri, "sh", "-c", MODES) == EXPECTED
    assert user.start("--rw", *options, uri, "sh", "-c", CHANGE) == "644\n755\n"
    assert with_acl(acl_directory / "cache/layers") == with_acl(acl_directory / "cache/images") == []


def test_container_below_a_default_acl_keeps_modes(user: User, registry: Server, acl_directory: Path) -> None:
    uri = f"docker://{registry.host}/test/acl:1"
    user.penroot("load", "-n", "loaded", uri)
    user.penroot("import", "-o", "x.sqsh", uri, cwd=acl_directory)
    user.penroot("create", "-n", "made", "x.sqsh", cwd=acl_directory)
    for name in ("loaded", "made"):
        assert user.start("--rw", name, "sh", "-c", MODES) == EXPECTED
        assert user.start("--rw", name, "sh", "-c", CHANGE) == "644\n755\n"
        assert with_acl(user.data / name) == []
        assert user.penroot("export", "-o", f"{name}.sqsh", name, cwd=acl_directory).stderr == ""
        assert user.start(str(acl_directory / f"{name}.sqsh"), "sh", "-c", MODES) == EXPECTED


def test_import_below_a_default_acl_has_no_warning(user: User, registry: Server, acl_directory: Path) -> None:
    uri = f"docker://{registry.host}/test/acl:1"
    done = user.penroot("import", "-o", "x.sqsh", uri, cwd=acl_directory)
    assert "WARN" not in done.stderr and "xattr" not in done.stderr
    for settings in ({}, {"ENROOT_UNPACK": "yes"}):
        assert user.start(str(acl_directory / "x.sqsh"), "sh", "-c", MODES, env=settings) == EXPECTED
    as_file = {"ENROOT_STORE_FORM": "squashfs", "ENROOT_CACHE_PATH": str(acl_directory / "files")}
    assert user.start(uri, "sh", "-c", MODES, env=as_file) == EXPECTED


def test_export_of_a_tree_with_acls_has_no_warning(user: User, rootfs: Path) -> None:
    """enroot exports images with the ACL that a container inherited from the data path."""
    for path in (rootfs, *rootfs.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            set_default_acl(path, GROUP)
    made = rootfs / "etc/made"
    made.mkdir()
    user.own(made)
    assert with_acl(rootfs)
    assert user.penroot("export", "-o", "x.sqsh", "box").stderr == ""
    assert user.start("x.sqsh", "echo", "well") == "well\n"


def test_doctor_reports_trees_with_an_acl(user: User, registry: Server, acl_directory: Path) -> None:
    user.penroot("load", "-n", "box", f"docker://{registry.host}/test/acl:1")
    before = user.penroot("doctor", status=None).stdout
    assert f"{acl_directory}/data has a default ACL" in before and "fail to start" not in before
    set_default_acl(user.data / "box/upper", GROUP)
    after = user.penroot("doctor", status=1).stdout
    assert f"bad  1 directory tree in {acl_directory}/data inherited a default ACL" in after
    assert f"setfacl -R -b {acl_directory}/data" in after


@pytest.mark.parametrize(("mode", "verdict", "right"), [(0o755, "warn", "read"), (0o775, "bad ", "change")])
def test_doctor_reports_a_store_with_an_acl(user: User, tmp_path: Path, mode: int, verdict: str, right: str) -> None:
    """Users named in the ACL can read or change layers. The ACL was set by hand, or inherited in an older version."""
    layers = user.home / "cache/layers"
    layers.mkdir(parents=True)
    user.own(user.home / "cache")
    set_default_acl(layers.parent, USER)
    (layers.parent / "blobs").mkdir()
    user.own(layers.parent)
    os.removexattr(layers.parent, DEFAULT)
    (layers.parent / "blobs").chmod(mode)
    out = user.penroot("doctor", status=None).stdout
    assert f"{verdict} {layers.parent}/blobs/ has an ACL: users named in it can {right} your images\n" in out


def test_squashfs_below_a_default_acl_starts(user: User, rootfs: Path, acl_directory: Path) -> None:
    image = squashed(user, rootfs)
    inside = acl_directory / "y.sqsh"
    user.run("cp", str(image), str(inside))
    assert ACCESS in os.listxattr(inside)
    assert user.start("--rw", str(inside), "sh", "-c", "touch /usr/bin/x; echo well") == "well\n"
