"""The words that enroot adds to fstab(5), on the real kernel."""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess

import pytest

from tests.kernel.conftest import User, require


def fstab(user: User, text: str) -> None:
    path = user.home / "etc/mounts.d/50-test.fstab"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def inside(user: User, script: str) -> str:
    return user.start("box", "sh", "-c", script)


def test_create_directories_files_and_what_the_source_is(user: User, rootfs: pathlib.Path) -> None:
    fstab(
        user,
        "/usr/share /a/dir none x-create=dir,bind\n"
        "/etc/hosts /a/file none x-create=file,bind\n"
        "/usr/share /auto/dir none x-create=auto,bind\n"
        "/etc/hosts /auto/file none x-create=auto,bind\n",
    )
    assert inside(user, "for x in a auto; do test -d /$x/dir/doc && test -s /$x/file && echo $x; done") == "a\nauto\n"


def test_move_and_detach(user: User, rootfs: pathlib.Path) -> None:
    fstab(
        user,
        "tmpfs /one tmpfs x-create=dir\n"
        "/usr/share /one/share none x-create=dir,bind\n"
        "${ENROOT_ROOTFS}/one/share /two none x-create=dir,x-move\n"
        "tmpfs /three tmpfs x-create=dir\n"
        "none /three none x-detach\n",
    )
    out = inside(user, "ls -d /two/doc; ls /one/share; grep -c ' /three ' /proc/mounts || true")
    assert out == "/two/doc\n0\n"


@pytest.mark.parametrize(("target", "why"), [("/no", "No such file"), ("/usr", "nothing is mounted there")])
def test_what_is_not_mounted_cannot_be_detached(user: User, rootfs: pathlib.Path, target: str, why: str) -> None:
    fstab(user, f"umount {target} none x-detach\n")
    assert f"cannot unmount {target}: {why}" in user.penroot("start", "box", "true", status=1).stderr


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ("bind", 1, "[ERROR]"),
        ("bind,nofail", 0, "[WARN]"),
        ("bind,nofail,loud", 0, "[WARN]"),
        ("bind,nofail,silent", 0, ""),
    ],
)
def test_nofail_and_silent(user: User, rootfs: pathlib.Path, options: str, status: int, said: str) -> None:
    fstab(user, f"/no/such /opt none {options}\n")
    done = user.penroot("start", "box", "true", status=status)
    assert ("cannot mount /no/such" in done.stderr) == bool(said)
    assert said in done.stderr


def test_mounts_before_and_after_the_hooks(user: User, rootfs: pathlib.Path) -> None:
    """A passno of -1 is before, none or 0 after."""
    fstab(
        user,
        "tmpfs /before tmpfs x-create=dir 0 -1\ntmpfs /after tmpfs x-create=dir 0 0\ntmpfs /none tmpfs x-create=dir\n",
    )
    hook = user.home / "etc/hooks.d/50-look.sh"
    hook.parent.mkdir(parents=True)
    hook.write_text(
        "#!/bin/sh\nfor n in before after none; do\n"
        '    [ ! -d "$ENROOT_ROOTFS/$n" ] || echo "SEEN=$n" >> "$ENROOT_ENVIRON"\ndone\n'
    )
    hook.chmod(0o755)
    assert inside(user, "echo $SEEN; ls -d /before /after /none") == "before\n/after\n/before\n/none\n"


@pytest.mark.parametrize(
    ("mount", "way_out"),
    [
        ("/etc/hosts:/etc", "name the file: /etc/hosts:/etc/hosts"),
        ("/etc:/bin/busybox", "a directory mounts on a directory"),
        ("/etc:/x:nope", "no file system of type 'nope' here"),
        ("etc:/x", "SOURCE on the host begins with / or ./"),
        ("/no/such:/x", "the source must exist on the node"),
        ("/a b:/x", "a space in a path is \\040"),
        ("/etc:/no/such:bind,ro", "the container has no /no/such: x-create=auto makes it"),
        ("/etc:/no/such:ro", "without bind or a TYPE there is nothing to mount: /etc:/no/such:rbind,ro"),
        ("proc:/x:x-create=dir", "there is nothing to mount: proc:/x:proc:x-create=dir"),
        ("/etc:/tmp:ro", "without bind or a TYPE there is nothing to mount: /etc:/tmp:rbind,ro"),
    ],
)
def test_a_failed_mount_says_the_way_out(user: User, rootfs: pathlib.Path, mount: str, way_out: str) -> None:
    hint = user.penroot("start", "-m", mount, "box", "true", status=1).stderr.splitlines()[-1]
    assert way_out in hint
    assert f"asked for by --mount {mount}" in hint


def test_omitted_fields_on_the_command_line(user: User, rootfs: pathlib.Path) -> None:
    (user.home / "a b").mkdir()
    (user.home / "a b/f").write_text("spaced\n")
    user.own(user.home)
    options = (
        "-m",
        "/usr/share",
        "-m",
        "/etc/hosts:/h",
        "-m",
        "tmpfs:/t",
        "-m",
        f"{user.home}/a\\040b:/c\\040d:none:bind,x-create=dir",
    )
    script = "ls -d /usr/share/doc; test -s /h && echo h; grep -c ' /t tmpfs' /proc/mounts; cat '/c d/f'"
    assert user.start(*options, "box", "sh", "-c", script) == "/usr/share/doc\nh\n1\nspaced\n"


def test_variables_of_the_caller_and_the_rootfs(user: User, rootfs: pathlib.Path) -> None:
    fstab(user, "${SHARE} /s none x-create=dir,bind\n${ENROOT_ROOTFS}/etc /copy none x-create=dir,bind\n")
    user.environ["SHARE"] = "/usr/share"
    assert inside(user, "ls -d /s/doc; grep FROM /copy/environment") == "/s/doc\nFROM_IMAGE=yes\n"


def test_node_without_dev_shm_starts_containers(user: User, rootfs: pathlib.Path) -> None:
    require(os.geteuid() == 0, "only root can make another /dev")
    nodes = "for n in null zero full random urandom tty; do touch /dev/$n; mount --bind /mnt/$n /dev/$n; done"
    script = f"mount --rbind /dev /mnt && mount -t tmpfs none /dev && mkdir /dev/pts && {nodes}; exec "
    for options in ((), ("--root",), ("--ipc",)):
        words = shlex.join(user.command("penroot", "start", *options, "box", "echo", "up"))
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script + words],
            env=user.environ, cwd=user.home, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "up\n"), done.stderr
        assert done.stderr == "[WARN] cannot mount /dev/shm on /dev/shm: No such file or directory\n"
