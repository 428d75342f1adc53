"""Root in a container cannot use /proc/PID/root and similar files of processes that serve or enter the container.

A program of the image is root of its user namespace, and passes all checks of ptrace(2) there. A process in that
namespace with access to the node would give the program that access too.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import User, require, servers, squashed
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, sh, srun

SPY = pathlib.Path(__file__).parent / "spy.c"
MARK = "the node's own"


@pytest.fixture(scope="session")
def spy() -> Iterator[pathlib.Path]:
    """Yield a static program that inspects all processes and, through them, the node."""
    with tempfile.TemporaryDirectory(prefix="penroot-spy-", dir="/var/tmp") as directory:
        path = pathlib.Path(directory) / "spy"
        subprocess.run(["cc", "-static", "-O2", "-Wall", "-Werror", "-o", str(path), str(SPY)], check=True)
        yield path


@pytest.fixture
def rootfs(rootfs: pathlib.Path, spy: pathlib.Path, user: User) -> pathlib.Path:
    shutil.copy(spy, rootfs / "bin/spy")
    user.own(user.data)
    return rootfs


@pytest.fixture
def image(user: User, rootfs: pathlib.Path) -> pathlib.Path:
    """Return the squashfs image of a container with the spy."""
    return squashed(user, rootfs)


@pytest.fixture
def mark(user: User) -> str:
    """Return a file of the node that no container of these tests shows."""
    path = user.home / "mark"
    path.write_text(MARK)
    user.own(path)
    return str(path)


def seen_programs(out: str) -> set[str]:
    """Return the spy's lines except those about the image's own programs. Outside programs and the mark remain."""
    lines = out.splitlines()
    assert "looking" in lines
    return {line for line in lines if line not in ("looking", "sees /bin/busybox", "sees /bin/spy")}


@pytest.mark.security("C1")
def test_root_does_not_reach_the_node_by_the_server_of_an_image(user: User, image: pathlib.Path, mark: str) -> None:
    """With start --root IMAGE.sqsh, /proc/PID/root of squashfuse would be the node's root."""
    out = user.start("--root", "--env", "MARK", str(image), "spy", env={"MARK": mark})
    assert seen_programs(out) == set()


@pytest.mark.security("C1")
def test_root_does_not_reach_the_node_by_a_shared_server(user: User, image: pathlib.Path, mark: str) -> None:
    """A server that another container has started gives no access to the node either."""
    command = ("penroot", "start", "--root", "--env", "MARK", str(image), "spy")
    with user.running(*command, "60", env={"MARK": mark}, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == "looking\n"
        assert seen_programs(user.start(*command[2:], env={"MARK": mark})) == set()
        assert len(servers(user.home)) == 1
        other.terminate()
        assert seen_programs("looking\n" + other.communicate(timeout=60)[0]) == set()


@pytest.mark.parity("the file's server ends with the container")
@pytest.mark.security("C1")
def test_root_does_not_reach_the_node_by_the_server_of_data(
    user: User, rootfs: pathlib.Path, image: pathlib.Path, mark: str
) -> None:
    """With --mount FILE:DIRECTORY:sqsh, only the data needs a server."""
    out = user.start("--root", "--mount", f"{image}:/data:sqsh", "--env", "MARK", "box", "spy", env={"MARK": mark})
    assert seen_programs(out) == set()


@pytest.mark.security("C1")
@pytest.mark.parametrize("source", ["directory", "image"])
def test_root_does_not_reach_the_node_by_fuse_overlayfs(
    user: User, rootfs: pathlib.Path, image: pathlib.Path, mark: str, source: str
) -> None:
    """With ENROOT_NATIVE_OVERLAYFS=n, one server has every source of the container."""
    require(shutil.which("fuse-overlayfs"), "fuse-overlayfs is not installed")
    env = {"MARK": mark, "ENROOT_NATIVE_OVERLAYFS": "n"}
    what = str(image) if source == "image" else "box"
    assert seen_programs(user.start("--root", "--env", "MARK", what, "spy", env=env)) == set()


@pytest.mark.security("C1")
def test_root_of_a_bundle_does_not_reach_the_node(user: User, image: pathlib.Path, mark: str) -> None:
    """With --root, the program of a bundle shares the user namespace with its server as well."""
    bundle = str(user.home / "box.run")
    user.penroot("bundle", "--output", bundle, str(image))
    assert seen_programs(user.run(bundle, "--root", "--env", "MARK", "spy", env={"MARK": mark}).stdout) == set()


@pytest.mark.security("C1")
def test_root_cannot_use_the_parent_of_its_pid_namespace(user: User, rootfs: pathlib.Path, mark: str) -> None:
    """With --pid, a process waits outside the PID namespace. A container that mounts the node's /proc sees it."""
    script = "mount -o rbind /node /proc && exec spy"  # /proc/sys/fs/binfmt_misc may be a mount
    options = ("--root", "--pid", "--env", "MARK", "--mount", "/proc:/node:none:rbind,x-create=dir")
    assert seen_programs(user.start(*options, "box", "sh", "-c", script, env={"MARK": mark})) == set()


@pytest.mark.security("C1")
@pytest.mark.parametrize(("options", "of_exec"), [(["--root"], []), ([], ["--user", "root"])])
def test_exec_is_not_looked_at_while_it_enters(
    user: User, image: pathlib.Path, options: list[str], of_exec: list[str]
) -> None:
    """During penroot exec, the process briefly has the caller's variables.

    A process in the container has all capabilities in the user namespace of ``exec --user root``, so it can look at
    penroot-init, which creates this namespace and has nothing of the caller.
    """
    command = ("start", *options, str(image), "spy", "120")
    spying = subprocess.Popen(
        user.command("penroot", *command),
        env=user.environ,
        cwd=user.home,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert spying.stdout is not None
    assert spying.stdout.readline() == "looking\n"
    for _ in range(30):
        assert user.penroot("exec", *of_exec, str(spying.pid), "echo", "in").stdout == "in\n"
    spying.terminate()
    out = "looking\n" + spying.communicate(timeout=60)[0]
    assert seen_programs(out) - {"sees /memfd:penroot-init (deleted)"} == set()


def test_tracer_does_not_hold_up_a_timeout(user: User, rootfs: pathlib.Path) -> None:
    """Only a tracer can reap a process that it traces. The command of penroot exec has ended all the same."""
    tracer = rootfs / "bin/tracer"
    subprocess.run(["cc", "-static", "-O2", "-Wall", "-Werror", "-o", tracer, SPY.with_name("tracer.c")], check=True)
    user.own(user.data)
    with user.running("penroot", "start", "box", "tracer", "sleep", stdout=subprocess.PIPE) as tracing:
        assert tracing.stdout is not None and tracing.stdout.readline() == "looking\n"
        user.penroot("exec", "--timeout", "4", str(tracing.pid), "sleep", "50", status=124)
        assert tracing.stdout.readline() == "traced\n"
        tracing.terminate()


@pytest.fixture(scope="module")
def spying(lab: Lab, spy: pathlib.Path) -> Iterator[str]:
    """Yield srun's option for an image of alice's. The image has the spy, and its entrypoint runs the spy."""
    home = pathlib.Path(lab.root, "home/alice")
    shutil.copy(spy, home / "spy")
    (home / "mark").write_text(MARK)
    script = "cp /spy.of /bin/spy; sed -i 's|exec |/bin/spy 1 > /dev/shm/seen; exec |' /etc/rc"
    options = ("--container-save=spying.sqsh", "--container-writable", "--container-mounts=./spy:/spy.of")
    srun(lab, IMAGE, *options, *sh(script))
    yield "--container-image=./spying.sqsh"
    lab.run("rm -f spying.sqsh spy mark")


@pytest.mark.security("C1")
def test_root_of_a_step_does_not_reach_the_node(lab: Lab, spying: str) -> None:
    """With srun --container-remap-root, the image's server and the helper are processes of the node."""
    options = (spying, "--container-remap-root", "--container-env=MARK")
    out = srun(lab, *options, "spy", env={"MARK": "/home/alice/mark"})
    assert {line for line in seen_programs(out) if not line.startswith("sees /usr/bin/sleep")} == set()


@pytest.mark.security("C1")
def test_the_entrypoint_does_not_reach_the_node(lab: Lab, spying: str) -> None:
    """The entrypoint runs as root beside the process that built the container.

    CVE-2024-21626 used the descriptors of such a process.
    """
    options = (spying, "--container-remap-root", "--container-entrypoint", "--container-env=MARK")
    out = srun(lab, *options, *sh("cat /dev/shm/seen; rm /dev/shm/seen"), env={"MARK": "/home/alice/mark"})
    assert seen_programs(out) <= {"sees /usr/bin/bash", "sees /usr/bin/dash", "sees /bin/sh"}
