"""With ENROOT_STORE_FORM, the store keeps an image as one squashfs file. With ENROOT_UNPACK, it unpacks such files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from enroot_py.base import filesystems, trees
from enroot_py.config import settings
from enroot_py.store import onefile, unsquashfs
from tests import images
from tests.fakeregistry import Faulty, faulty
from tests.images import directory, entry
from tests.kernel.conftest import User, require
from tests.kernel.registry import Server
from tests.kernel.test_cache import running
from tests.waiting import until

SQUASHFS = {"ENROOT_STORE_FORM": "squashfs"}
UNPACK = {"ENROOT_UNPACK": "yes"}


@pytest.fixture(scope="module")
def registry(registry: Server) -> Server:
    more = [entry("number", b"7"), entry("closed/file", b"in", mode=0o600), directory("closed", 0o500)]
    more.append(entry("closed/secret", b"s", mode=0))
    registry.pusher.image("test/forms", "1", images.busybox(*more, entry("su", b"x", mode=0o4755)))
    return registry


def uri(registry: Server) -> str:
    return f"docker://{registry.host}/test/forms:1"


def files(user: User, pattern: str) -> list[Path]:
    return sorted((user.home / "cache").glob(pattern))


@pytest.fixture
def front(registry: Server) -> Iterator[Faulty]:
    """Serve the registry, and record its requests."""
    with faulty(registry.host) as proxy:
        yield proxy


@pytest.mark.clusters("Few inodes, or a quota of files")
@pytest.mark.parity("ENROOT_STORE_FORM")
def test_image_as_one_file(user: User, front: Faulty) -> None:
    image, temporary = f"docker://{front.host}/test/forms:1", user.home / "tmp"
    temporary.mkdir()
    user.own(temporary)
    user.environ.update({**SQUASHFS, "TMPDIR": str(temporary)})
    assert user.start(image, "cat", "/number", "/closed/file") == "7in"
    assert len(files(user, "images/*/image.sqsh")) == 1
    assert files(user, "layers/*") == files(user, "tmp/*") == []
    assert [path.name for path in temporary.glob("*/[li]*/*")] == []  # no unpacked trees
    before = front.asked("/blobs/")
    assert user.start("--rw", image, "sh", "-c", "echo 8 >/number; cat /number") == "8\n"
    assert front.asked("/blobs/") == before
    user.penroot("create", "--name", "box", image)
    assert user.start("--rw", "box", "sh", "-c", "echo 9 >/number; cat /etc/environment") == "PATH=/bin\n"
    assert user.start("box", "cat", "/number") == "9\n"
    user.penroot("cache", "verify")
    user.penroot("import", "-o", str(user.home / "x.sqsh"), image)
    listing = user.run("unsquashfs", "-lln", str(user.home / "x.sqsh")).stdout
    assert next(line for line in listing.splitlines() if line.endswith("/su")).startswith("-rwsr-xr-x 0/0")


def test_image_as_one_file_is_kept_while_in_use(user: User, registry: Server) -> None:
    user.environ.update(SQUASHFS)
    with running(user, uri(registry)) as process:
        assert "process" in user.penroot("cache", "prune").stderr
        assert len(files(user, "images/*")) == 1
        assert process.communicate("")[0] == "7"
    wait_until_pruned(user)
    user.penroot("create", "--name", "box", uri(registry))
    user.penroot("cache", "prune")
    assert user.start("box", "cat", "/number") == "7"
    user.penroot("remove", "-f", "box")
    wait_until_pruned(user)


def test_damage_of_the_one_file_is_found(user: User, registry: Server) -> None:
    user.environ.update(SQUASHFS)
    user.start(uri(registry), "true")
    path = files(user, "images/*/image.sqsh")[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "image.sqsh was changed" in user.penroot("cache", "verify", status=1).stderr
    user.penroot("cache", "verify", "--repair")
    assert user.start(uri(registry), "cat", "/number") == "7"
    user.penroot("cache", "verify")


@pytest.mark.parametrize("env", [SQUASHFS, UNPACK], ids=["one file", "copy"])
def test_entries_from_before_a_crash_are_checked(
    user: User, squashfs: str, registry: Server, env: dict[str, str]
) -> None:
    """The file ``boot`` of each entry names another boot. A start checks such entries, and no such file remains."""
    user.environ.update(env)
    name = squashfs if env is UNPACK else uri(registry)
    user.start(name, "true")
    (image,), layers = files(user, "images/*"), files(user, "layers/*")
    for stored in (image, *layers):
        mark = stored / "boot"
        sums = mark.read_text().splitlines(keepends=True)[1:] if mark.exists() else []
        mark.write_text("another\n" + "".join(sums))
        mark.chmod(0o666)
        user.own(mark)
    assert user.start(name, "cat", "/number") == "7"
    assert files(user, "*/*/boot") == []


def wait_until_pruned(user: User) -> None:
    """Prune until no image is left, because a container's FUSE server ends a moment after the container."""

    def pruned() -> bool:
        user.penroot("cache", "prune")
        return files(user, "images/*") == []

    until(pruned, "the image is pruned")


@pytest.fixture
def squashfs(user: User, registry: Server) -> str:
    path = str(user.home / "x.sqsh")
    user.penroot("import", "-o", path, uri(registry), env={"ENROOT_CACHE_PATH": str(user.home / "other")})
    return path


@pytest.mark.parity("ENROOT_UNPACK")
def test_unpacked_copy_is_shared_and_follows_the_file(user: User, squashfs: str) -> None:
    user.environ.update(UNPACK)
    first = user.penroot("start", squashfs, "cat", "/number")
    assert first.stdout == "7"
    assert "unpacking" in first.stderr
    again = user.penroot("start", "--rw", squashfs, "sh", "-c", "echo 8 >/number; cat /number /closed/file")
    assert again.stdout == "8\nin"
    assert "unpacking" not in again.stderr
    assert len(files(user, "layers/*")) == 1
    assert not [path for path in files(user, "layers/**/su") if path.stat().st_mode & 0o6000]
    assert [path.stat().st_mode & 0o777 for path in files(user, "layers/**/secret")] == [0o400]
    assert user.penroot("cache", "list").stdout.split("\n")[1].split()[0].endswith("/x.sqsh")
    user.penroot("cache", "verify")
    os.utime(squashfs)  # with another mtime, the file counts as a new file
    assert "unpacking" in user.penroot("start", squashfs, "true").stderr
    assert len(files(user, "layers/*")) == 2
    assert user.start("--root", squashfs, "cat", "/number", "/closed/file") == "7in"
    user.penroot("cache", "prune")
    assert files(user, "layers/*") == files(user, "images/*") == files(user, "refs/*") == []


def test_unpacked_copy_is_kept_while_it_is_used(user: User, squashfs: str) -> None:
    find_server = ["pgrep", "-f", f"squashfuse.* {squashfs}"]
    with running(user, squashfs):
        assert subprocess.run(find_server, capture_output=True, check=False).returncode == 0
    user.environ.update(UNPACK)
    with running(user, squashfs) as process:
        until(
            lambda: subprocess.run(find_server, capture_output=True, check=False).returncode == 1,
            "the end of the first container's server",
        )
        Path(squashfs).unlink()
        user.penroot("cache", "prune")
        assert process.communicate("")[0] == "7"
    user.penroot("cache", "prune")
    assert files(user, "layers/*") == []


def test_eight_starts_at_once_unpack_once(user: User, squashfs: str) -> None:
    user.environ.update(UNPACK)
    command = f"for i in 1 2 3 4 5 6 7 8; do penroot start {squashfs} cat /number & done; wait"
    done = user.run("sh", "-c", command)
    assert done.stdout == "7" * 8
    assert done.stderr.count("unpacking") == 1


def test_attributes_of_overlayfs_are_not_unpacked(user: User, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "opaque").mkdir(parents=True)
    os.setxattr(root / "opaque", "user.overlay.opaque", b"y")
    os.setxattr(root / "opaque", "user.mine", b"1")
    path = user.home / "bad.sqsh"
    subprocess.run(["mksquashfs", root, path, "-quiet", "-no-progress"], check=True, capture_output=True)
    user.own(path)
    user.penroot("start", str(path), "true", env=UNPACK, status=127)
    directory = files(user, "layers/*/fs/opaque")[0]
    assert os.listxattr(directory) == ["user.mine"]


@pytest.mark.clusters("NFS or Lustre, and no local disk")
@pytest.mark.parity("ENROOT_STORE_FORM")
def test_store_on_a_network_file_system_has_files(squashfs: str, tmp_path: Path) -> None:
    """The test's file system is squashfuse, but the kernel shows the type fuse.sshfs, which squashfuse can choose."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system that the test process sees")
    subprocess.run(["squashfuse", "-o", "subtype=sshfs", squashfs, tmp_path], check=True)
    try:
        values = {"HOME": "/", "ENROOT_CACHE_PATH": f"{tmp_path}/bin"}
        assert filesystems.kind(f"{tmp_path}/bin") == "fuse.sshfs"
        assert onefile.image_form(settings.load(values)) == "squashfs"
        assert onefile.image_form(settings.load({**values, "ENROOT_STORE_FORM": "tree"})) == "tree"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("form", [{}, SQUASHFS, UNPACK], ids=["tree", "squashfs", "unpacked"])
def test_store_in_a_set_gid_directory(user: User, registry: Server, squashfs: str, form: dict[str, str]) -> None:
    """The project's directory is set-group-ID. The container's user namespace does not map the project's group."""
    require(os.geteuid() == 0, "only root can give a directory to another group")
    project = user.home / "project"
    project.mkdir()
    os.chown(project, user.home.stat().st_uid, 4242)
    project.chmod(0o2770)
    user.environ.update(form, ENROOT_CACHE_PATH=f"{project}/cache", ENROOT_DATA_PATH=f"{project}/data")
    user.penroot("create", "-n", "box", uri(registry))
    for image in ("box", squashfs, uri(registry)):
        assert user.start(image, "cat", "/number") == "7"
        script = "echo 8 >/number; mkdir /etc/d; echo 9 >/etc/d/e; cat /number /etc/d/e"
        assert user.start("--rw", image, "sh", "-c", script) == "8\n9\n"
        user.start("--rw", "box", "sh", "-c", "printf 7 >/number; rm -rf /etc/d")
    user.penroot("remove", "-f", "box")
    user.penroot("cache", "prune")


def test_a_process_of_another_group(user: User, registry: Server) -> None:
    """After newgrp(1), images start, but a container of the other group fails with a hint that names newgrp."""
    require(os.geteuid() == 0, "only root can take another group")
    user.penroot("create", "-n", "box", uri(registry))
    user.gid = 4242
    for _ in range(2):
        assert user.start("--rw", uri(registry), "sh", "-c", "echo 8 >/number; cat /number; id -g") == "8\n4242\n"
    user.gid = None
    assert user.start(uri(registry), "cat", "/number") == "7"
    user.gid = 4242
    done = user.penroot("start", "box", "true", status=1)  # the container's changes belong to the other group
    assert "newgrp" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("older", [False, True], ids=["new", "of an older version"])
def test_set_gid_store_after_newgrp(user: User, registry: Server, older: bool) -> None:
    """In a set-group-ID store, each group of a user gets its own trees, whichever group starts the image first."""
    require(os.geteuid() == 0, "only root can take another group")
    project = user.home / "project"
    project.mkdir()
    os.chown(project, user.uid, 4242)
    project.chmod(0o2775)
    user.environ["ENROOT_CACHE_PATH"] = f"{project}/cache"
    for gid in (None, 4242, None):
        user.gid = gid
        user.groups = (user.uid, 4242)
        user.environ["ENROOT_DATA_PATH"] = f"{project}/data-{gid}"
        script = "echo 8 >/number; mkdir -p /etc/d; cat /number; id -g"
        expected = f"8\n{gid or user.uid}\n"
        for _ in range(2):
            assert user.start("--rw", uri(registry), "sh", "-c", script) == expected
            assert user.start(uri(registry), "cat", "/number") == "7"
        if older:  # an older version gave its directories the project's group
            for path in (project / "cache", *(project / "cache").iterdir()):
                if path.is_dir() and not path.is_symlink():
                    os.chown(path, -1, 4242)
                    path.chmod(0o2700)


def test_forbidden_entries_are_not_unpacked(user: User, squashfs: str) -> None:
    """Skip device nodes, which need root, and overlayfs attributes. Unpack trees deeper than Python's stack."""
    require(os.geteuid() == 0, "only root can make a device node")
    tree = user.home / "tree"
    subprocess.run(["unsquashfs", "-quiet", "-no-progress", "-dest", tree, squashfs], check=True)
    os.mknod(tree / "null", 0o20666, os.makedev(1, 3))
    os.mknod(tree / "disk", 0o60666, os.makedev(8, 0))
    os.setxattr(tree / "tmp", "user.overlay.opaque", b"y")
    (tree / "su").write_text("")
    (tree / "su").chmod(0o6755)
    fd = os.open(tree, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    path = f"{user.home}/devices.sqsh"
    subprocess.run(["mksquashfs", tree, path, "-quiet", "-no-progress"], check=True, capture_output=True)
    subprocess.run(["rm", "-r", tree], check=True)
    assert user.start(path, "cat", "/number", env=UNPACK) == "7"
    user.penroot("create", "-n", "box", path)
    unsquashfs.unpack(path, f"{user.home}/as-root")
    for root in (*files(user, "layers/*/fs"), user.data / "box", user.home / "as-root"):
        assert not (root / "null").exists() and not (root / "disk").exists(), root
        assert (root / "su").stat().st_mode & 0o7777 == 0o755
    assert [os.listxattr(root / "tmp") for root in files(user, "layers/*/fs")] == [[]]
    user.penroot("remove", "-f", "box")
    trees.remove(f"{user.home}/as-root")
    user.penroot("cache", "prune")


def test_damaged_file_is_not_unpacked(user: User, squashfs: str) -> None:
    with open(squashfs, "r+b") as f:
        f.truncate(5000)
    stderr = user.penroot("start", squashfs, "true", env=UNPACK, status=1).stderr
    assert "truncated" in stderr
    assert files(user, "layers/*") == files(user, "tmp/*") == []
