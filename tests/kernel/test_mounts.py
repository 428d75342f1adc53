"""Mounts with enroot's extensions of fstab(5), on the real kernel."""

from __future__ import annotations

import os
import pathlib

import pytest

from tests.kernel.conftest import User, require


def fstab(user: User, text: str) -> None:
    user.write("etc/mounts.d/50-test.fstab", text)


def inside(user: User, script: str) -> str:
    return user.start("box", "sh", "-c", script)


@pytest.mark.parity("fstab: x-move")
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
def test_detaching_without_a_mount_is_an_error(user: User, rootfs: pathlib.Path, target: str, why: str) -> None:
    fstab(user, f"umount {target} none x-detach\n")
    assert f"cannot unmount {target}: {why}" in user.penroot("start", "box", "true", status=1).stderr


@pytest.mark.parity("fstab: nofail")
@pytest.mark.parametrize(
    ("options", "status", "tag"),
    [
        ("bind", 1, "[ERROR]"),
        ("bind,nofail", 0, "[WARN]"),
        ("bind,nofail,loud", 0, "[WARN]"),
        ("bind,nofail,silent", 0, ""),
    ],
)
def test_nofail_and_silent(user: User, rootfs: pathlib.Path, options: str, status: int, tag: str) -> None:
    fstab(user, f"/no/such /opt none {options}\n")
    done = user.penroot("start", "box", "true", status=status)
    assert ("cannot mount /no/such" in done.stderr) == bool(tag)
    assert tag in done.stderr


@pytest.mark.parity("fstab: passno -1 mounts before the hooks")
def test_mounts_before_and_after_the_hooks(user: User, rootfs: pathlib.Path) -> None:
    """Lines of fstab with passno -1 are mounted before the hooks. With passno 0 or no passno, they follow later."""
    passes = (("before", " 0 -1"), ("after", " 0 0"), ("none", ""))
    fstab(user, "".join(f"tmpfs /{name} tmpfs x-create=dir{number}\n" for name, number in passes))
    hook = (
        "#!/bin/sh\nfor n in before after none; do\n"
        '    [ ! -d "$ENROOT_ROOTFS/$n" ] || echo "SEEN=$n" >> "$ENROOT_ENVIRON"\ndone\n'
    )
    user.write("etc/hooks.d/50-look.sh", hook, 0o755)
    assert inside(user, "echo $SEEN; ls -d /before /after /none") == "before\n/after\n/before\n/none\n"


@pytest.mark.parametrize(
    ("mount", "fix"),
    [
        ("/etc/hosts:/etc", "name the file: /etc/hosts:/etc/hosts"),
        ("/etc:/bin/busybox", "mount a directory on a directory"),
        ("/etc:/x:nope", "no file system of type 'nope' here"),
        ("etc:/x", "SOURCE on the host begins with / or ./"),
        ("/no/such:/x", f"the source must exist on the node {os.uname().nodename}"),
        ("/a b:/x", "a space in a path is \\040"),
        ("/etc:/no/such:bind,ro", "the container has no /no/such; create it with x-create=auto"),
        ("proc:/x:x-create=dir", "name the type: proc:/x:proc:x-create=dir"),
        ("nope:/x:ro", "no file system of type 'nope' here"),
        ("/x:/no:remount,ro", "the container has no /no"),
        ("/x:/opt:remount,ro", "nothing is mounted on /opt"),
    ],
)
def test_failed_mount_has_a_hint(user: User, rootfs: pathlib.Path, mount: str, fix: str) -> None:
    hint = user.penroot("start", "-m", mount, "box", "true", status=1).stderr.splitlines()[-1]
    assert fix in hint
    assert f"asked for by --mount {mount}" in hint


@pytest.mark.parametrize(
    ("options", "flags"),
    [("ro", "ro"), ("rw", "rw"), ("none:ro", "ro"), ("ro,rslave", "ro"), ("x-create=dir,ro", "ro"), ("nofail", "rw")],
)
@pytest.mark.parametrize("target", ["/new/data", None])
def test_source_target_ro_is_a_bind_mount(
    user: User, rootfs: pathlib.Path, options: str, flags: str, target: str | None
) -> None:
    source = user.home / "data"
    (source / "sub").mkdir(parents=True)
    user.own(source)
    target = target or str(source)
    script = f"test -d {target}/sub && grep ' {target} ' /proc/mounts"
    out = user.start("--mount", f"{source}:{target}:{options}", "box", "sh", "-c", script)
    assert out.split()[3].split(",")[0] == flags


@pytest.mark.parametrize(
    "mount",
    [
        "{home}/f:/opt",
        "{home}/f:/opt:ro",
        "{home}/f:/opt:bind,ro",
        "{home}/a b/f:/opt",
        "{home}/a\\040b/f:/opt:ro",
        "ramfs:/new:x-create=dir",
        "/etc:/new:none:bind",
        "{home}/f:/new:rbind,ro",
        "tmpfs:/new:tmpfs:mode=700",
    ],
)
def test_hint_of_a_failed_mount_works(user: User, rootfs: pathlib.Path, mount: str) -> None:
    for name in ("f", "a b/f"):
        user.write(name, "x\n")
    mount = mount.format(home=user.home)
    hint = user.penroot("start", "-m", mount, "box", "true", status=1).stderr.splitlines()[-1]
    fix = hint.partition("; asked for by")[0]
    if "a space in a path" in fix:
        words = mount.replace(" ", "\\040").removesuffix("/opt") + "/opt/f"
    else:
        words = fix.rpartition(": ")[2]
    assert user.penroot("start", "-m", words, "box", "true").stderr == ""


def test_hint_for_a_line_of_fstab_works(user: User, rootfs: pathlib.Path) -> None:
    fstab(user, "/usr/share /new none ro\n")
    hint = user.penroot("start", "box", "true", status=1).stderr.splitlines()[-1]
    fstab(user, "${ENROOT_ROOTFS}/no /new none x-create=dir,bind\n")
    missing = user.penroot("start", "box", "true", status=1).stderr
    assert "the source must exist in the container: /no; asked for by" in missing
    fstab(user, hint.partition("rbind: ")[2].partition(";")[0] + "\n")
    assert inside(user, "grep ' /new ' /proc/mounts").split()[3].startswith("ro")


@pytest.mark.parametrize("link", ["/usr/share/zone", "../no/such/place", "/proc/version"])
def test_file_mount_covers_the_link_not_its_target(user: User, rootfs: pathlib.Path, link: str) -> None:
    (rootfs / "usr/share").mkdir()
    (rootfs / "usr/share/zone").write_text("of the image\n")
    (rootfs / "etc/tz").symlink_to(link)
    (user.home / "f").write_text("mounted\n")
    user.own(user.home)
    script = "cat /etc/tz /usr/share/zone; ls -d /no /no/such"
    done = user.run("penroot", "start", "--rw", "-m", f"{user.home}/f:/etc/tz:ro", "box", "sh", "-c", script, status=1)
    assert done.stdout == "mounted\nof the image\n"
    assert (rootfs / "etc/tz").readlink() == pathlib.Path(link)


@pytest.mark.parametrize("mount", [".", "/etc:/", "/etc:/../.", "/etc:/link"])
def test_nothing_is_mounted_on_the_root_directory(user: User, rootfs: pathlib.Path, mount: str) -> None:
    """Such a mount would cover the container. penroot would look for the program in the mounted file system."""
    (rootfs / "link").symlink_to("/")
    stderr = user.penroot("start", "--mount", mount, "box", "true", status=1).stderr
    assert "the target is the root directory of the container" in stderr


def test_mount_target_of_three_dots_is_a_directory(user: User, rootfs: pathlib.Path) -> None:
    assert user.start("--mount", "/usr/share:/...", "box", "ls", "-d", "/.../doc") == "/.../doc\n"


def test_node_without_dev_shm_starts_containers(user: User, rootfs: pathlib.Path) -> None:
    require(os.geteuid() == 0, "only root can make another /dev")
    nodes = "for n in null zero full random urandom tty; do touch /dev/$n; mount --bind /mnt/$n /dev/$n; done"
    script = f"mount --rbind /dev /mnt && mount -t tmpfs none /dev && mkdir /dev/pts && {nodes}; exec "
    for options in ((), ("--root",), ("--ipc",)):
        prefix = ("unshare", "-m", "sh", "-c", f'{script}"$@"', "sh")
        done = user.run("penroot", "start", *options, "box", "echo", "up", prefix=prefix)
        assert done.stdout == "up\n"
        assert done.stderr == "[WARN] cannot mount /dev/shm on /dev/shm: No such file or directory\n"
