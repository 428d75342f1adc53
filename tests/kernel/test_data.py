"""Mount squashfs files with data: ``--mount FILE:DIRECTORY:sqsh``, or a line of an fstab."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import pytest

from tests.kernel.conftest import PREFIX, User, require, servers
from tests.waiting import until


def squash(user: User, name: str, **files: str) -> pathlib.Path:
    """Make a squashfs file of ``files``, in which all files belong to another user."""
    require(shutil.which("mksquashfs") and shutil.which("squashfuse"), "squashfs-tools, squashfuse are not installed")
    tree, path = user.home / f"{name}.tree", user.home / name
    tree.mkdir()
    for file, content in files.items():
        (tree / file).write_text(content)
        (tree / file).chmod(0o600)
    owner = ("-force-uid", "4242", "-force-gid", "4242")
    subprocess.run(["mksquashfs", tree, path, *owner, "-root-mode", "700", "-quiet", "-no-progress"], check=True)
    user.own(path)
    return path


@pytest.fixture
def data(user: User) -> pathlib.Path:
    return squash(user, "data.sqsh", file="of data\n")


@pytest.mark.parity("the examples of docs/howto/mount-data.md")
def test_the_examples_of_the_documentation(user: User, rootfs: pathlib.Path) -> None:
    """The test replaces the example's image and command. tests/slurm/test_mounts.py runs the examples for Slurm."""
    text = (pathlib.Path(__file__).parents[2] / "docs/howto/mount-data.md").read_text()
    (example,) = re.findall(r"```console\n(\$ mksquashfs [^`]*)```", text)
    make, _, start = (line.removeprefix("$ ") for line in example.strip().splitlines())
    (user.home / "imagenet").mkdir()
    (user.home / "imagenet/one").write_text("of data\n")
    user.own(user.home / "imagenet")
    user.run("sh", "-c", make)
    squash(user, "more.sqsh", other="of more\n")
    command = start.replace("penroot", f"{PREFIX}/bin/penroot").replace("pytorch.sqsh", "box cat /data/one /more/other")
    assert user.run("sh", "-c", command).stdout == "of data\nof more\n"


def test_nested_mount_needs_an_existing_directory(user: User, rootfs: pathlib.Path, data: pathlib.Path) -> None:
    tree = user.home / "more"
    (tree / "within").mkdir(parents=True)
    subprocess.run(["mksquashfs", tree, user.home / "more.sqsh", "-quiet", "-no-progress"], check=True)
    user.own(user.home / "more.sqsh")
    words = ("--mount", "more.sqsh:/data:sqsh", "--mount")
    assert inside(user, "cat /data/within/file", *words, "data.sqsh:/data/within:sqsh") == "of data\n"
    stderr = user.penroot("start", *words, "data.sqsh:/data/none:sqsh", "box", "true", status=1).stderr
    assert "cannot mount data.sqsh on /data/none: Read-only file system" in stderr
    assert "/data/none does not exist on a read-only file system: choose another target; asked for" in stderr


def inside(user: User, script: str, *options: str, **more: object) -> str:
    return user.start(*options, "box", "sh", "-c", script, **more)


@pytest.mark.parity(
    "owners and modes in the file hide nothing from a user who can read the file", "read-only, nosuid and nodev"
)
def test_data_is_read_only_and_gives_no_privileges(user: User, rootfs: pathlib.Path, data: pathlib.Path) -> None:
    """A user who can read the squashfs file sees all its files, whatever their owners and modes are."""
    script = "cat /data/file; grep ' /data ' /proc/mounts | cut -d' ' -f4; touch /data/x 2> /dev/null || echo refused"
    for options, file in ((), data), (("--root",), "data.sqsh"), (("--root", "--rw"), data):
        content, flags, refused = inside(user, script, *options, "--mount", f"{file}:/data:sqsh").splitlines()
        assert (content, refused) == ("of data", "refused")
        assert {"ro", "nosuid", "nodev"} <= set(flags.split(","))


@pytest.mark.parity("penroot start --mount FILE:DIRECTORY:sqsh")
def test_several_files_and_one_twice(user: User, rootfs: pathlib.Path, data: pathlib.Path) -> None:
    squash(user, "more.sqsh", other="of more\n")
    mounts = ("data.sqsh:/a:sqsh:noexec", "more.sqsh:/b:sqsh", "data.sqsh:/c/d:sqsh")
    script = "cat /a/file /b/other /c/d/file; grep -e ' /a ' -e ' /c/d ' /proc/mounts | grep -c noexec"
    out = inside(user, script, *(word for mount in mounts for word in ("--mount", mount)))
    assert out == "of data\nof more\nof data\n1\n"


@pytest.mark.parametrize("options", [(), ("--rw",), ("--pid",)])
def test_beside_the_server_of_an_image(
    user: User, image: pathlib.Path, data: pathlib.Path, options: tuple[str, ...]
) -> None:
    """The image is a squashfs file too, so the container has two FUSE servers."""
    assert user.start(*options, "--mount", f"{data}:/data:sqsh", str(image), "cat", "/data/file") == "of data\n"


def test_beside_fuse_overlayfs(user: User, rootfs: pathlib.Path, data: pathlib.Path) -> None:
    require(shutil.which("fuse-overlayfs"), "fuse-overlayfs is not installed")
    env = {"ENROOT_NATIVE_OVERLAYFS": "n"}
    assert inside(user, "cat /data/file", "--mount", f"{data}:/data:sqsh", env=env) == "of data\n"


def fstab(user: User, text: str) -> None:
    user.write("etc/mounts.d/50-data.fstab", text)


@pytest.mark.parity("in an fstab of mounts.d")
def test_in_an_fstab_of_the_site(user: User, rootfs: pathlib.Path, data: pathlib.Path) -> None:
    fstab(user, "${HOME}/data.sqsh /data sqsh ro,noexec 0 0\n${HOME}/data.sqsh /early sqsh defaults 0 -1\n")
    assert inside(user, "cat /data/file /early/file") == "of data\nof data\n"


@pytest.mark.parity("in an fstab of mounts.d")
@pytest.mark.parametrize(("options", "warnings"), [("nofail", 3), ("nofail,silent", 0)])
def test_nofail_and_silent(user: User, rootfs: pathlib.Path, data: pathlib.Path, options: str, warnings: int) -> None:
    """The sources are a missing file, a directory, and a file that squashfuse cannot mount."""
    damage(data)
    fstab(user, "".join(f"{path} /x sqsh {options}\n" for path in ("/no/such", user.home, data)))
    done = user.penroot("start", "box", "echo", "started")
    assert done.stdout == "started\n"
    assert done.stderr.count("[WARN]") == warnings


def damage(path: pathlib.Path) -> None:
    """Overwrite a squashfs file with zeros after its superblock."""
    content = path.read_bytes()
    path.write_bytes(content[:96] + bytes(len(content) - 96))


@pytest.mark.parity("a directory, a device")
@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        ("{home}:/x:sqsh", "{home} is a directory, not a squashfs file"),
        ("{home}/script:/x:sqsh", "{home}/script is not a squashfs file"),
        ("{home}/short:/x:sqsh", "{home}/short is truncated: 200 of"),
        ("{home}/pipe:/x:sqsh", "{home}/pipe is not a regular file"),
        ("/dev/null:/x:sqsh", "/dev/null is not a regular file"),
        ("{home}/none:/x:sqsh", "cannot mount {home}/none: No such file or directory"),
        ("{home}/closed:/x:sqsh", "cannot mount {home}/closed: Permission denied"),
        ("{home}/damaged:/x:sqsh", "{home}/damaged is damaged: squashfuse cannot read its root directory"),
        ("{home}/data.sqsh:/x:sqsh:rw", "a squashfs file is mounted read-only"),
        ("{home}/data.sqsh:/x:sqsh:rbind", "a squashfs file cannot be mounted with 'rbind'"),
        ("{home}/data.sqsh:/bin/busybox:sqsh", "the target is a file, but the source is a directory"),
    ],
)
def test_unmountable_data_is_an_error(
    user: User, rootfs: pathlib.Path, data: pathlib.Path, mount: str, expected: str
) -> None:
    require(os.geteuid() == 0 or "closed" not in mount, "only root can make a file that belongs to another user")
    (user.home / "script").write_text("#!/bin/sh\n")
    (user.home / "short").write_bytes(data.read_bytes()[:200])
    os.mkfifo(user.home / "pipe")
    shutil.copy(data, user.home / "damaged")
    damage(user.home / "damaged")
    user.own(user.home)
    shutil.copy(data, user.home / "closed")
    (user.home / "closed").chmod(0)
    done = user.penroot("start", "--mount", mount.format(home=user.home), "box", "echo", "started", status=1)
    error_line, hint = done.stderr.splitlines()
    assert expected.format(home=user.home) in error_line
    assert done.stdout == "" and hint.startswith("[HINT] ")


def test_file_mounted_on_a_directory_hints_at_sqsh(user: User, rootfs: pathlib.Path, data: pathlib.Path) -> None:
    hint = user.penroot("start", "--mount", f"{data}:/etc", "box", "true", status=1).stderr.splitlines()[-1]
    assert f"to mount its content: {data}:/etc:sqsh" in hint


def test_a_configuration_script_comes_too_late(user: User, rootfs: pathlib.Path, data: pathlib.Path) -> None:
    """mounts() of a configuration script runs when the container exists already, and cannot add data to it."""
    script = user.write("conf", f"mounts() {{ echo {data} /data sqsh; }}\n")
    stderr = user.penroot("start", "--conf", str(script), "box", "true", status=1).stderr
    assert f"cannot mount {data} on /data: the container exists already" in stderr
    assert f"it cannot be added later; asked for by mounts() of {script}:1" in stderr


def test_image_cannot_mount_data(user: User, rootfs: pathlib.Path, data: pathlib.Path) -> None:
    (rootfs / "etc/fstab").write_text(f"{data} /data sqsh ro\n")
    stderr = user.penroot("start", "box", "true", status=1).stderr
    assert "an image may mount a tmpfs and its own directories" in stderr


@pytest.mark.parity("the file's server ends with the container")
def test_the_server_ends_with_the_container(user: User, rootfs: pathlib.Path, data: pathlib.Path) -> None:
    words = ("penroot", "start", "--mount", f"{data}:/data:sqsh", "box", "sh", "-c", "echo; sleep 600")
    with user.running(*words, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stdout.readline() == "\n"
        assert len(servers(data)) == 1
    until(lambda: not servers(data), "the server ends")


def test_file_replaced_after_the_check_is_not_mounted(user: User, rootfs: pathlib.Path, data: pathlib.Path) -> None:
    """penroot opens the file once. A hook that replaces the file later changes nothing."""
    squash(user, "other.sqsh", file="of another\n")
    user.write("etc/hooks.d/50-swap.sh", f"#!/bin/sh\nmv {user.home}/other.sqsh {data}\n", 0o755)
    assert inside(user, "cat /data/file", "--mount", f"{data}:/data:sqsh") == "of data\n"


def test_explain_shows_data_as_a_line_of_fstab(user: User, rootfs: pathlib.Path, data: pathlib.Path) -> None:
    out = user.start("--explain", "--mount", f"{data}:/data:sqsh:noexec", "box", "true")
    assert f"{data} /data sqsh noexec 0 0  (--mount {data}:/data:sqsh:noexec)" in out
