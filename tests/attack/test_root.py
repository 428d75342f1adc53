"""Attacks on the node by a container that root starts."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
import subprocess
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import User, busybox_rootfs, require
from tests.slurm.lab import Lab
from tests.slurm.steps import ON_N1, sh

OWN = ("--pid", "--net", "--ipc", "--uts")
KINDS: dict[str, tuple[str, ...]] = {
    " ".join(kind) or "plain": kind
    for user in ((), ("--root",))
    for own in ((), *((option,) for option in OWN), OWN)
    for kind in ((*user, *own), (*user, *own, "--rw"))
}
# Each line is one harmless attempt, and prints a word if it succeeds.
CHANGE_THE_KERNEL = """
    for f in vm/swappiness kernel/core_pattern fs/suid_dumpable kernel/hotplug; do
        v=$(cat /proc/sys/$f 2>/dev/null) && (echo "$v" > /proc/sys/$f) 2>/dev/null && echo "wrote $f"
    done
    (echo h > /proc/sysrq-trigger) 2>/dev/null && echo "wrote sysrq-trigger"
    (head -c 1 /proc/kcore > /read) 2>/dev/null && echo "read kcore"
    (cat /proc/timer_list > /read) 2>/dev/null && echo "read timer_list"
    (echo 0 > /sys/kernel/mm/ksm/run) 2>/dev/null && echo "wrote /sys"
"""
UNDO_MOUNTS = """
    for m in /proc/sys /proc/sysrq-trigger /proc/kcore /proc /sys /dev; do
        umount $m 2>/dev/null && echo "unmounted $m"
        mount --move $m /tmp 2>/dev/null && echo "moved $m"
    done
    for m in /proc/sys /proc/sysrq-trigger /sys; do
        mount -o remount,bind,rw $m 2>/dev/null && echo "remounted $m"
    done
    mkdir -p /tmp/p && mount -t proc proc /tmp/p 2>/dev/null && echo "mounted another /proc"
    mkdir -p /tmp/s && mount -t sysfs sysfs /tmp/s 2>/dev/null && echo "mounted another /sys"
"""


@contextlib.contextmanager
def running(user: User, *start: str) -> Iterator[int]:
    """Run a container that waits until the ``with`` block ends. Yield the pid of its start."""
    command = user.command("penroot", "start", *start, "sh", "-c", "echo up; cat")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=user.environ, cwd=user.home, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process.pid
        process.communicate(timeout=60)


@pytest.fixture
def root(user: User) -> User:
    """Return root of the node, with a container ``box``."""
    require(os.geteuid() == 0, "only root can start these containers")
    user.uid = 0
    user.own(user.home)
    busybox_rootfs(user.data / "box")
    return user


@pytest.mark.security("C3")
@pytest.mark.parametrize("kind", KINDS)
def test_a_container_of_roots_changes_nothing_of_the_kernel(root: User, kind: str) -> None:
    """The files of /proc belong to root, who needs no capability for sysctls, /proc/sysrq-trigger and /proc/kcore."""
    script = CHANGE_THE_KERNEL + UNDO_MOUNTS + CHANGE_THE_KERNEL + "cat /proc/sys/kernel/ostype"
    assert root.start(*KINDS[kind], "box", "sh", "-c", script) == "Linux\n"


@pytest.mark.security("C3")
@pytest.mark.parametrize("kind", KINDS)
def test_exec_into_roots_container_changes_nothing(root: User, kind: str) -> None:
    script = UNDO_MOUNTS + CHANGE_THE_KERNEL + "cat /proc/sys/kernel/ostype"
    with running(root, *KINDS[kind], "box"):
        assert root.penroot("exec", "box", "sh", "-c", script).stdout == "Linux\n"


@pytest.mark.security("C4")
@pytest.mark.parametrize("kind", KINDS)
def test_roots_container_opens_no_disk_of_the_host(root: User, kind: str) -> None:
    """Root of the host owns the device nodes of disks and /dev/kmsg, and needs no capability to open them."""
    script = """
        for f in $(busybox find /dev -type b) /dev/kmsg /dev/mem /dev/port /dev/rtc0 /dev/loop-control /dev/fuse; do
            (: < $f) 2>/dev/null && echo "opened $f"
        done
        busybox mknod /tmp/b b 7 0 2>/dev/null && echo "made a node"
        head -c 1 /dev/zero > /dev/null && echo "zero works"
    """
    assert root.start(*KINDS[kind], "box", "sh", "-c", script) == "zero works\n"


@pytest.mark.security("C4")
def test_root_widens_dev_by_a_setting(root: User) -> None:
    count = ("box", "sh", "-c", "ls /dev")
    assert "mem" not in root.start(*count).split() or not os.path.exists("/dev/mem")
    widened = root.start(*count, env={"ENROOT_RESTRICT_DEV": "no"}).split()
    assert set(os.listdir("/dev")) <= set(widened)


@pytest.mark.security("C4")
def test_root_gives_one_device_by_an_option(root: User) -> None:
    node = root.home / "node"
    os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    read = ("box", "sh", "-c", "head -c 2 /dev/given | busybox od -An -tx1; ls /dev")
    words = root.start("-m", f"{node}:/dev/given:none:x-create=file,bind", *read).split()
    assert words[:2] == ["00", "00"]
    assert "kmsg" not in words


@pytest.mark.security("U13")
@pytest.mark.parametrize("remap", [(), ("--root",)])
def test_root_execs_nothing_in_another_users_container(
    user: User, rootfs: pathlib.Path, remap: tuple[str, ...]
) -> None:
    """The other user would choose the program, and could trace a process of root."""
    require(os.geteuid() == 0, "only root can enter the container")
    with running(user, *remap, rootfs.name) as pid:
        root = User(user.home, 0)
        assert f"is in a container of user {user.uid}\n" in root.penroot("exec", str(pid), "id", status=1).stderr
        assert user.penroot("exec", str(pid), "id", "-u").stdout == f"{0 if remap else user.uid}\n"


@pytest.mark.security("U13")
def test_root_finds_no_container_that_another_user_names(user: User) -> None:
    """A user can give a mount any source name, such as the one by which penroot finds root's container."""
    require(os.geteuid() == 0, "only root sees the mounts of others")
    root = User(user.home, 0)
    forge = f"mount -t tmpfs fuse-overlayfs:{root.data}/box/upper /mnt && cd /mnt && mkdir old && pivot_root . old"
    command = user.command("unshare", "-Urm", "sh", "-c", f"PATH=/usr/sbin:$PATH; {forge} && echo up && read -r end")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert "no running container box" in root.penroot("exec", "box", "id", status=1).stderr
        process.communicate("\n", timeout=60)


@pytest.mark.security("C2")
@pytest.mark.parametrize("own", ["", *OWN])
def test_root_rules_its_own_namespaces(user: User, own: str) -> None:
    """The container's namespaces belong to the user namespace of its program, so the program can configure them."""
    busybox_rootfs(user.data / "box")
    user.own(user.data)
    script = """
        hostname inside 2>/dev/null && echo uts
        ip link set lo down 2>/dev/null && echo net
        mkdir /tmp/q && mount -t mqueue none /tmp/q 2>/dev/null && echo ipc
        test $$ = 1 && echo pid
        mount -t tmpfs none /tmp && echo mounts
    """
    options = ["--root", *filter(None, [own])]
    wanted = [*([own.strip("-")] if own else []), "mounts"]
    assert user.start(*options, "box", "/bin/busybox", "sh", "-c", script).split() == wanted
    with running(user, *options, "box"):
        joined = user.penroot("exec", "box", "/bin/busybox", "sh", "-c", script.replace("mkdir", "mkdir -p")).stdout
    assert joined.split() == [word for word in wanted if word != "pid"]


@pytest.mark.security("C2")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("--root")])
@pytest.mark.parametrize("way", ["start", "exec"])
def test_root_inside_lifts_no_mount_of_its_user(user: User, kind: str, way: str) -> None:
    """A read-only mount stays read-only, and a mount that covers a directory stays on it."""
    busybox_rootfs(user.data / "box")
    (user.home / "data").mkdir(exist_ok=True)
    for name in ("kept", "secret"):
        (user.home / name).mkdir()
        (user.home / name / "file").write_text(name)
    user.own(user.home)
    mounts = [
        *("-m", f"{user.home}/kept:/kept:none:x-create=dir,bind,ro"),
        *("-m", f"{user.home}/secret:/secret:none:x-create=dir,bind"),
        *("-m", "tmpfs:/secret:tmpfs:ro"),
    ]
    script = """
        for m in /kept /secret; do
            for flags in "" -l -f -r; do umount $flags $m 2>/dev/null && echo "unmounted $m"; done
            for o in remount,rw remount,bind,rw; do mount -o $o $m 2>/dev/null && echo "$o $m"; done
            mount --move $m /tmp 2>/dev/null && echo "moved $m"
            mkdir -p /tmp/b && mount --bind $m /tmp/b 2>/dev/null
            mount -o remount,bind,rw /tmp/b 2>/dev/null && echo "rw $m"
        done
        unshare -Urm sh -c 'umount /secret && echo nested' 2>/dev/null
        (echo x > /kept/file) 2>/dev/null && echo "wrote"
        cat /kept/file; ls /secret
    """
    if way == "start":
        output = user.start(*KINDS[kind], *mounts, "box", "/bin/busybox", "sh", "-c", script)
    else:
        with running(user, *KINDS[kind], *mounts, "box"):
            output = user.penroot("exec", "box", "/bin/busybox", "sh", "-c", script).stdout
    assert output == "kept"
    assert (user.home / "kept/file").read_text() == "kept"


@pytest.mark.security("C3")
def test_a_superusers_container_changes_nothing_by_accident(root: User) -> None:
    """With ENROOT_ALLOW_SUPERUSER, a sysctl is read-only until root deliberately unmounts /proc/sys."""
    path = "/proc/sys/vm/swappiness"
    script = f"v=$(cat {path}); echo $v > {path} || umount -l /proc/sys && echo uncovered"
    assert root.start("box", "sh", "-c", script, env={"ENROOT_ALLOW_SUPERUSER": "yes"}) == "uncovered\n"


@pytest.mark.security("C3")
def test_root_may_mount_a_writable_proc_sys(root: User) -> None:
    """A mount on /proc/sys that the caller requests stays writable."""
    script = "v=$(cat /proc/sys/vm/swappiness); echo $v > /proc/sys/vm/swappiness && echo wrote"
    environ = {"ENROOT_ALLOW_SUPERUSER": "yes"}
    assert root.start("-m", "/proc/sys:/proc/sys", "box", "sh", "-c", script, env=environ) == "wrote\n"


@pytest.mark.security("C5")
def test_only_root_of_the_node_is_a_superuser(user: User) -> None:
    """An ordinary user who is root in the container has no_new_privs and the system call filter."""
    busybox_rootfs(user.data / "box")
    user.own(user.data)
    script = ("grep", "-e", "NoNewPrivs", "-e", "Seccomp:", "/proc/self/status")
    output = user.start("--root", "box", *script, env={"ENROOT_ALLOW_SUPERUSER": "yes"})
    assert output.split() == ["NoNewPrivs:", "1", "Seccomp:", "2"]


@pytest.mark.security("C3")
@pytest.mark.parametrize("unshare", ["", "net", "ipc", "uts"])
@pytest.mark.parametrize("remap", ["--container-remap-root", "--no-container-remap-root"])
def test_a_step_of_roots_changes_nothing_of_the_kernel(lab: Lab, remap: str, unshare: str) -> None:
    """In a step of root, the first task cannot change the kernel. A task that joins the container cannot either."""
    script = """
        v=$(cat /proc/sys/vm/swappiness); (echo $v > /proc/sys/vm/swappiness) 2> /dev/null && echo wrote
        umount /proc/sys 2> /dev/null && echo uncovered
        test -e /dev/kmsg && echo kmsg
        cat /proc/sys/kernel/ostype
    """
    own = [f"--container-unshare={unshare}"] if unshare else []
    step = ["srun", *ON_N1, "-n2", "--container-image=registry:5000#minimal:1", remap, *own, *sh(script)]
    try:
        assert lab.run(step, user="root").stdout == "Linux\n" * 2
    finally:
        lab.run("rm -rf /var/tmp/enroot-*-0 /tmp/enroot-run-0 /run/pyxis/0", node="n1", user="root")
