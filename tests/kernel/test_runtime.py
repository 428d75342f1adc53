"""An ordinary user's program in a container: its system call filter, limits, groups and overlays."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

from tests import images
from tests.images import Image, Layer, directory, entry
from tests.kernel.conftest import PREFIX, UID, User, mounts_under, require, servers
from tests.kernel.registry import serve
from tests.waiting import until

CALLS = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
int main(void)
{
    FILE *f = fopen("/tmp/file", "w");
    if (!f || fclose(f)) return 2;
    gid_t group = 7;
    printf("%d %d %d %d %d %d\n", chown("/tmp/file", 12, 34), lchown("/tmp/file", 12, 34), setgroups(1, &group),
           setresgid(5, 5, 5), setresuid(5, 5, 5), (int)sizeof(long));
    return 0;
}
"""


@pytest.mark.parity("32-bit programs run under the seccomp filter", "chown and set*id succeed without effect")
@pytest.mark.parametrize("bits", [32, 64])
def test_32_bit_program(user: User, rootfs: pathlib.Path, bits: int) -> None:
    """The filter knows the numbers of chown(2), setresuid(2) and similar calls in 32-bit and in 64-bit programs."""
    compiler = shutil.which("gcc")
    require(compiler, "gcc is not installed")
    source = user.home / "calls.c"
    source.write_text(CALLS)
    command = ["gcc", f"-m{bits}", "-static", "-o", str(rootfs / "bin/calls"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"gcc -m{bits} makes no static program: gcc-multilib is not installed")
    assert user.start("box", "calls") == f"0 0 0 0 0 {bits // 8}\n"
    assert user.start("--root", "box", "calls") == f"0 0 0 0 0 {bits // 8}\n"


@pytest.mark.parity(
    "scripts of packages can change owners and groups", "apt-get install works as root in the container"
)
def test_package_scripts(user: User, rootfs: pathlib.Path) -> None:
    """The commands of packages' maintainer scripts work for root in a writable container."""
    script = (
        "set -e; mkdir -p /var/lib/thing; touch /var/lib/thing/f; "
        "chown -R 101:102 /var/lib/thing; chgrp 43 /var/lib/thing/f; "
        "chmod 2755 /var/lib/thing/f; chmod 4755 /bin/busybox; "
        "echo 'thing:x:101:102::/:/bin/false' > /etc/passwd.new; cat /etc/passwd >> /etc/passwd.new; "
        "mv /etc/passwd.new /etc/passwd; ln /etc/passwd /etc/passwd-; mv /opt/work /opt/worked; rmdir /opt/worked; "
        "mkdir /opt/work; ln -s a /opt/link; rm -r /usr/bin; echo done"
    )
    names = ("chgrp", "chmod", "mv", "rmdir")
    for name in names:
        (rootfs / "bin" / name).symlink_to("busybox")
    assert user.start("--root", "--rw", "box", "sh", "-c", script) == "done\n"


@pytest.mark.parity("options after NAME are options of the command", "options after NAME belong to the command")
def test_options_behind_the_name(user: User, rootfs: pathlib.Path) -> None:
    """Options after the container's name belong to the command. A hint says so if the command does not exist."""
    stderr = user.penroot("start", "box", "--env", "X=1", "env", status=127).stderr
    assert "--env" in stderr and "put options before the name of the container" in stderr


@pytest.mark.parity("penroot list works while processes of containers exit")
def test_list_while_processes_vanish(user: User, rootfs: pathlib.Path) -> None:
    churn = "while :; do penroot start box true; done"
    with user.running("sh", "-c", churn), user.running("sh", "-c", churn):
        for _ in range(20):
            user.penroot("list", "-f")


def test_limits_and_priorities_are_the_callers(user: User, rootfs: pathlib.Path) -> None:
    """A container has the caller's limits and nice value, and the host's /dev/shm."""
    limits = ("--nofile=123:456", "--memlock=123456:234567", "--stack=4000000:unlimited")
    prefix = ("prlimit", *limits, "nice", "-n", "5")
    script = "cat /proc/self/limits; cut -d' ' -f19 /proc/self/stat; stat -f -c %b /dev/shm"
    inside = user.start("box", "sh", "-c", script, prefix=prefix)
    assert inside == user.run("sh", "-c", script, prefix=prefix).stdout
    assert "123456" in inside and f"\n{os.nice(0) + 5}\n" in inside


def test_container_does_not_ignore_signals_that_python_ignores(user: User, rootfs: pathlib.Path) -> None:
    command = ("grep", "SigIgn", "/proc/self/status")
    assert user.start("box", *command) == user.run(*command).stdout


@pytest.mark.parity("a user ID above 2^31 works")
def test_a_user_beyond_2_31(user: User, rootfs: pathlib.Path) -> None:
    require(os.geteuid() == 0, "needs root to become another user")
    user.uid = 2**31 + 5
    user.own(user.home)
    assert user.start("box", "id", "-u") == f"{user.uid}\n"


def as_root(user: User, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``penroot`` as root, with a store and runtime directory of root."""
    require(os.geteuid() == 0, "needs root")
    directories = {
        "ENROOT_RUNTIME_PATH": str(user.home / "root-run"),
        "ENROOT_CACHE_PATH": str(user.home / "root-cache"),
    }
    command = [f"{PREFIX}/bin/penroot", *arguments]
    environ = {**user.environ, **directories, **(env or {})}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parity("ENROOT_ALLOW_SUPERUSER")
@pytest.mark.parametrize("kind", ["directory", "image"])
def test_superuser_keeps_privileges_if_allowed(user: User, image: pathlib.Path, kind: str) -> None:
    target = "box" if kind == "directory" else str(image)
    (user.data / "box/bin/chmod").symlink_to("busybox")
    script = (
        "readlink /proc/self/ns/user; touch /opt/f; chown 12:34 /opt/f; busybox stat -c %u:%g /opt/f;"
        "grep -E '^(CapEff|Seccomp):' /proc/self/status; mount -t tmpfs none /mnt && echo mounted"
    )
    (user.data / "box/mnt").mkdir()
    subprocess.run(["chown", "-hR", "0:0", str(user.home)], check=True)  # root refuses containers of other users
    words = ("start", "--rw", "-m", "tmpfs:/mnt:tmpfs:x-create=dir", target, "sh", "-c", script)
    done = as_root(user, *words, env={"ENROOT_ALLOW_SUPERUSER": "y"})
    namespace, owner, caps, seccomp, mounted = done.stdout.splitlines() or pytest.fail(done.stderr)
    assert namespace == os.readlink("/proc/self/ns/user")
    assert (owner, mounted) == ("12:34", "mounted")
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    assert caps.split()[1] == next(line for line in status if line.startswith("CapEff")).split()[1]
    assert seccomp.split()[1] == next(line for line in status if line.startswith("Seccomp:")).split()[1]
    assert mounts_under(user.home) == []
    done = as_root(user, *words)
    assert done.stdout.splitlines()[0] != namespace, done.stderr
    assert "12:34" not in done.stdout


@pytest.mark.parity("ENROOT_ALLOW_SUPERUSER")
def test_user_gains_nothing_if_superusers_are_allowed(user: User, rootfs: pathlib.Path) -> None:
    out = user.start("box", "readlink", "/proc/self/ns/user", env={"ENROOT_ALLOW_SUPERUSER": "y"})
    assert out.strip() != os.readlink("/proc/self/ns/user")


@pytest.mark.parity("supplementary groups keep their access")
def test_supplementary_groups_keep_their_access(user: User, rootfs: pathlib.Path) -> None:
    """The user namespace does not map the groups, so they have no names. The kernel still grants their access."""
    require(os.geteuid() == 0, "needs root to have other groups")
    share = user.home / "share"
    share.mkdir()
    (share / "file").write_text("for the group\n")
    os.chown(share, 0, 4242)
    share.chmod(0o2770)
    arguments = ["start", "-m", f"{share}:/opt/work", "box", "sh", "-c", "cat /opt/work/file; touch /opt/work/mine"]
    user.groups = (4242,)
    assert user.penroot(*arguments).stdout == "for the group\n"
    made = (share / "mine").stat()
    assert (made.st_uid, made.st_gid) == (UID, 4242)
    user.groups = ()
    done = user.penroot(*arguments[:-1], "cat /opt/work/file", status=1)
    assert "denied" in done.stderr


def test_the_group_of_the_process_is_the_user_s_inside(user: User, image: pathlib.Path) -> None:
    """After newgrp(1), the container's passwd and group name the group of the process, not the user's first group."""
    require(os.geteuid() == 0, "needs root to have another group")
    user.gid = 4242
    out = user.start(str(image), "cat", "/etc/passwd", "/etc/group")
    assert f":x:{UID}:4242:" in out
    assert "\ngroup4242:x:4242:\n" in out


@pytest.fixture
def fuse_overlayfs() -> str:
    require(shutil.which("fuse-overlayfs"), "fuse-overlayfs is not installed")
    require(os.path.exists("/dev/fuse"), "this machine has no /dev/fuse")
    if os.geteuid() == 0:
        os.chmod("/dev/fuse", 0o666)
    return "fuse-overlayfs:"


@pytest.mark.parity("ENROOT_NATIVE_OVERLAYFS")
@pytest.mark.parametrize("options", [(), ("--root",)], ids=["self", "root"])
@pytest.mark.parametrize("kind", ["directory", "image"])
def test_overlays_by_fuse_overlayfs(
    user: User, image: pathlib.Path, fuse_overlayfs: str, kind: str, options: tuple[str, ...]
) -> None:
    target = "box" if kind == "directory" else str(image)
    environ = {"ENROOT_NATIVE_OVERLAYFS": "n"}
    script = "grep ' / ' /proc/mounts; cat /etc/hostname; touch /opt/x 2>/dev/null || echo closed"
    lines = user.start(*options, target, "sh", "-c", script, env=environ).splitlines()
    assert lines[-3].startswith(fuse_overlayfs)
    assert lines[-2:] == [pathlib.Path("/etc/hostname").read_text().strip(), "closed"]
    if kind == "image":
        script = "echo new > /opt/new; rm /etc/environment; mkdir /opt/d; mv /opt/new /opt/d/old; ls /etc /opt/d"
        out = user.start("--rw", *options, target, "sh", "-c", script, env=environ)
        assert out.endswith("/opt/d:\nold\n")
        assert "environment" not in out


def test_fuse_overlayfs_and_kernel_read_each_others_changes(user: User, fuse_overlayfs: str) -> None:
    """Both understand the whiteouts and opaque directories of layers, of fuse-overlayfs and of the kernel."""
    base = images.busybox(*(entry(name, b"old") for name in ("etc/gone", "old/a", "old/sub/x", "kept/y")))
    changed = [entry("etc/.wh.gone"), directory("old"), entry("old/.wh..wh..opq"), entry("old/b", b"new")]
    image = Image([*base.layers, Layer(images.tar(changed))], base.settings)
    with serve(user.home / "registry") as server:
        server.pusher.image("test/x", "1", image)
        user.own(user.home)
        user.penroot("load", "-n", "made", f"docker://{server.host}#test/x:1", env={"ENROOT_ALLOW_HTTP": "y"})
    by_fuse, by_kernel = {"ENROOT_NATIVE_OVERLAYFS": "n"}, {"ENROOT_NATIVE_OVERLAYFS": "y"}
    look = "cd /; ls old kept; ls etc/gone first second 2>/dev/null; true"
    for environ in (by_fuse, by_kernel):
        assert user.start("made", "sh", "-c", look, env=environ).split() == ["kept:", "y", "old:", "b"]
    change = "/bin/busybox rm /old/b; /bin/busybox rm -r /kept; /bin/busybox mkdir /kept; echo > /first"
    user.start("--rw", "made", "sh", "-c", change, env=by_fuse)
    for environ in (by_fuse, by_kernel):
        assert sorted(user.start("made", "sh", "-c", look, env=environ).split()) == ["first", "kept:", "old:"]
    user.start("--rw", "made", "sh", "-c", "/bin/busybox rm /first; echo > /second", env=by_kernel)
    for environ in (by_fuse, by_kernel):
        assert "second" in user.start("made", "sh", "-c", look, env=environ).split()
        assert "first" not in user.start("made", "sh", "-c", look, env=environ).split()
    user.start("--rw", "made", "sh", "-c", "/bin/busybox rm -r /old; /bin/busybox mkdir /old", env=by_fuse)
    user.penroot("export", "made", env=by_kernel)
    listed = subprocess.run(["unsquashfs", "-l", user.home / "made.sqsh"], capture_output=True, text=True, check=True)
    assert "squashfs-root/old\n" in listed.stdout
    assert "/old/" not in listed.stdout
    assert ".wh." not in listed.stdout


@pytest.mark.parity("ENROOT_NATIVE_OVERLAYFS")
def test_servers_of_an_overlay_end_with_the_container(user: User, image: pathlib.Path, fuse_overlayfs: str) -> None:
    user.environ["ENROOT_NATIVE_OVERLAYFS"] = "no"
    with user.running("penroot", "start", str(image), "sleep", "1000"):
        until(lambda: {*servers(user.home).values()} == {"fuse-overlayfs", "squashfuse"}, "the start of both servers")
    until(lambda: not servers(user.home), "the end of both servers")


@pytest.mark.parity("ENROOT_NATIVE_OVERLAYFS")
def test_fuse_overlayfs_that_is_missing_is_named(user: User, rootfs: pathlib.Path, fuse_overlayfs: str) -> None:
    require(os.geteuid() == 0, "needs root to hide a program")
    hide = f'mount --bind /dev/null {shutil.which("fuse-overlayfs")} && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", hide, "sh")
    done = user.penroot("start", "box", "true", env={"ENROOT_NATIVE_OVERLAYFS": "n"}, prefix=prefix, status=1)
    assert "fuse-overlayfs is not installed" in done.stderr
