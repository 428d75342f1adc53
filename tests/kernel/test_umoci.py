"""Compare the files that penroot and umoci unpack from the same image."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tests import images
from tests.images import OCI, Image, Layer, busybox, directory, entry, hardlink, symlink
from tests.kernel.conftest import User, require
from tests.kernel.registry import Server
from tests.waiting import until

NOTE = {"SCHILY.xattr.user.note": "yes", "SCHILY.xattr.user.empty": ""}
FIRST = [
    directory("data"),
    *(directory(f"data/{name}") for name in ("kept", "opaque", "gone", "dir-file", "dir-link", "again", "share")),
    *(
        entry(f"data/{name}/hidden", name.encode())
        for name in ("kept", "opaque", "gone", "dir-file", "dir-link", "again")
    ),
    *(entry("data/kept/lower", b"1"), entry("data/file-dir", b"8"), entry("data/file-link", b"9")),
    *(
        symlink("data/link-dir", "share"),
        symlink("data/link-file", "share"),
        symlink("data/dangling", "/nowhere/at all"),
    ),
    entry("data/share/one", b"linked" * 1000, mode=0o640),
    hardlink("data/kept/two", "data/share/one"),
    hardlink("data/three", "data/share/one"),
    entry("data/su", b"#!/bin/sh\n", mode=0o4755),
    entry("data/sg", b"#!/bin/sh\n", mode=0o2711),
    hardlink("data/su2", "data/su"),
    directory("data/shared", 0o2775),
    directory("data/sticky", 0o1777),
    directory("data/zero", 0),
    entry("data/zero/file", b"closed", mode=0),
    directory("data/readonly", 0o555),
    entry("data/readonly/file", b"r", mode=0o444),
    entry("data/noted", b"n", pax_headers=NOTE),
    entry("data/noted.ro", b"n", mode=0o444, pax_headers=NOTE),
    directory("data/noted.d", pax_headers=NOTE),
    entry("data/fifo", type=tarfile.FIFOTYPE, mode=0o620),
    entry("data/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
    *(directory("data" + "/a-long-directory-name" * depth) for depth in range(1, 12)),
    entry("data" + "/a-long-directory-name" * 11 + "/" + "n" * 200, b"long"),
    entry("data/ümläut \\ new\nline", b"odd"),
    entry("data/owned", b"o", uid=1000, gid=1000),
    entry("data/file-dev", b"hidden"),
    directory("data/fresh"),
    entry("data/fresh/.wh.hidden"),  # a whiteout without a file below
    entry("data/large", bytes(range(256)) * 20_000),
]
SECOND = [
    entry("data/kept/.wh.hidden"),
    entry("data/kept/upper", b"10"),
    directory("data/opaque"),
    entry("data/opaque/.wh..wh..opq"),
    entry("data/opaque/new", b"11"),
    entry("data/.wh.gone"),
    entry("data/dir-file", b"12"),
    symlink("data/dir-link", "kept"),
    entry("data/.wh.again"),
    directory("data/again", 0o750),
    entry("data/again/new", b"13"),
    directory("data/file-dir"),
    entry("data/file-dir/new", b"14"),
    symlink("data/file-link", "owned"),
    directory("data/link-dir"),
    entry("data/link-dir/new", b"15"),
    entry("data/link-file", b"16"),
    entry("data/three", b"no longer linked"),
    entry("data/su", b"#!/bin/true\n", mode=0o6755),
    directory("data/zero", 0),
    entry("data/zero/other", b"17", mode=0o400),
    entry("data/opaque/.wh.hidden"),
    entry("data/noted.d/new", b"18"),  # the layer has no entry for the directory
    entry("data/file-dev", type=tarfile.BLKTYPE, devmajor=7, devminor=200),
    hardlink("data/fresh/dev", "data/file-dev"),
]


def sparse(parent: Path) -> Iterator[Layer]:
    """Yield one layer for each of GNU tar's sparse formats, except the one that umoci does not support."""
    for form in ("0.1", "1.0"):
        top = parent / form
        (top / "data/sparse").mkdir(parents=True)
        with open(top / "data/sparse" / form, "wb") as f:
            for at in (0, 1 << 20, 5 << 20):
                f.seek(at)
                f.write(os.urandom(5000))
            f.truncate(8 << 20)
        command = ["tar", "-C", top, "--format=posix", f"--sparse-version={form}", "--sparse", "--owner=0", "--group=0"]
        command += ["--mtime=@1700000000", "-cf", "-", "data/sparse"]
        yield Layer(subprocess.run(command, capture_output=True, check=True).stdout)


Files = dict[str, tuple[object, ...]]


def describe(root: Path) -> Files:
    """Return type, mode, names, size, time, content and attributes of every file beneath ``root``.

    The names replace the link count, because the link count of overlayfs includes hidden names.
    """
    files: Files = {}
    names_of: dict[tuple[int, int], list[str]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        links = names_of.setdefault((status.st_dev, status.st_ino), [])
        links.append(str(path.relative_to(root)))
        mode, body, size = stat.S_IMODE(status.st_mode), "", 0
        if path.is_symlink():
            mode, body = 0, os.readlink(path)
        elif path.is_file():
            size, body = status.st_size, hashlib.sha256(path.read_bytes()).hexdigest()
        names = [] if path.is_symlink() else os.listxattr(path)
        attributes = {name: os.getxattr(path, name) for name in names if name.startswith("user.")}
        kind = stat.S_IFMT(status.st_mode)
        files[str(path.relative_to(root))] = (kind, mode, links, size, int(status.st_mtime), body, attributes)
    return files


def differences(ours: Files, theirs: Files) -> dict[str, tuple[object, object]]:
    names = sorted(ours.keys() | theirs.keys())
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


def in_a_tree(files: Files) -> Files:
    """Return the files with their modes in a layer's tree and in a container: u+rwX added, special bits removed."""
    added = {stat.S_IFDIR: 0o700, stat.S_IFREG: 0o400, stat.S_IFIFO: 0o600}
    return {
        name: (kind, mode & 0o777 | added.get(kind, 0), *rest)  # type: ignore[operator,call-overload]
        for name, (kind, mode, *rest) in files.items()
    }


def test_content_is_what_umoci_unpacks(user: User, registry: Server, tmp_path: Path) -> None:
    require(shutil.which("umoci") and shutil.which("skopeo"), "umoci and skopeo are not installed")
    require(os.geteuid() == 0, "umoci keeps owners and closed directories only if root runs it")
    layers = [Layer(images.tar(FIRST)), Layer(images.tar(SECOND)), *sparse(tmp_path)]
    registry.pusher.image("test/umoci", "1", Image([*busybox().layers, *layers], busybox().settings, OCI))
    name = f"docker://{registry.host}/test/umoci:1"

    copy = ["skopeo", "--insecure-policy", "copy", "-q", "--src-tls-verify=false", name, f"oci:{tmp_path}/oci:x"]
    subprocess.run(copy, check=True)
    unpack = ["umoci", "--log=error", "unpack", "--image", f"{tmp_path}/oci:x", f"{tmp_path}/bundle"]
    subprocess.run(unpack, check=True)
    theirs = describe(tmp_path / "bundle/rootfs/data")
    assert {"kept/upper", "again/new", "sparse/1.0", "null"} < theirs.keys()
    assert not [path for path in theirs if "hidden" in path]
    for device in ("null", "file-dev", "fresh/dev"):  # a container gets devices from its runtime
        del theirs[device]

    # An imported squashfs file has the modes of the image.
    user.penroot("import", "-o", "x.sqsh", name)
    command = ["unsquashfs", "-quiet", "-no-progress", "-user-xattrs", "-dest", f"{tmp_path}/ours"]
    subprocess.run([*command, user.home / "x.sqsh"], check=True)
    assert differences(describe(tmp_path / "ours/data"), theirs) == {}

    # A container has the modes of a layer's tree. This process reads them through /proc.
    ready = user.home / "ready"
    script = f"touch {ready}; while test -e {ready}; do sleep 0.1; done"
    with user.begin("penroot", "start", "--mount", f"{user.home}:{user.home}", name, "sh", "-c", script) as process:
        try:
            until(lambda: ready.exists() or process.poll() is not None, "the container runs")
            assert ready.exists()
            assert differences(describe(Path(f"/proc/{process.pid}/root/data")), in_a_tree(theirs)) == {}
        finally:
            ready.unlink(missing_ok=True)
    assert process.returncode == 0
