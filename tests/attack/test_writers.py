"""Two processes change one container at the same time, on one node, or on two nodes with a shared data path."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests import images
from tests.kernel.conftest import PREFIX, User
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, end, expect, next_line, sh
from tests.waiting import until


def made(user: User, *create: str) -> None:
    """Create the container ``w`` over layers."""
    box = images.busybox()
    blobs = [layer.blob for layer in box.layers] + [box.config(), box.manifest()]
    images.write_layout(user.home / "layout", blobs, images.index([(box, {"architecture": "amd64", "os": "linux"})]))
    user.own(user.home / "layout")
    user.penroot("create", "--name", "w", f"oci:{user.home}/layout")


def start_writer(user: User, *options: str) -> subprocess.Popen[str]:
    words = ("start", "--rw", *options, "w", "sh", "-c", "echo up; read x; echo y > /y")
    command = user.command("penroot", *words)
    running = subprocess.Popen(
        command, env=user.environ, cwd=user.home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert next_line(running) == "up\n"
    return running


@pytest.mark.parity("start --rw, -w")
@pytest.mark.security("U9")
@pytest.mark.parametrize("options", [(), ("--root",), ("--pid",)])
def test_second_writer_learns_who_has_the_container(user: User, options: tuple[str, ...]) -> None:
    """The kernel only warns "upperdir is in-use", and the result of two writers is undefined."""
    made(user)
    first = start_writer(user, *options)
    stderr = user.penroot("start", "--rw", "w", "true", status=1).stderr
    assert "is changing the container w" in stderr and " since 20" in stderr and "(sh)" in stderr
    pid = stderr.partition("process ")[2].partition(" ")[0]
    assert user.penroot("exec", pid, "echo", "inside").stdout == "inside\n"
    assert user.start("w", "echo", "fine") == "fine\n"
    first.communicate("\n")
    assert user.start("--rw", "w", "cat", "/y") == "y\n"


def test_a_removed_container_is_not_the_new_one_of_its_name(user: User) -> None:
    """After rm(1) of a running container, a new container gets the name, and the running one has none."""
    made(user)
    first = start_writer(user)
    user.penroot("remove", "--force", "w", status=1)  # refused while the start runs, unlike rm(1)
    user.run("sh", "-c", f"chmod -R u+rwX {user.data}/w; rm -rf {user.data}/w {user.data}/.w.node")
    made(user)
    assert user.start("--rw", "w", "sh", "-c", "echo z > /z; cat /z") == "z\n"
    second = start_writer(user)
    assert "is changing the container w" in user.penroot("start", "--rw", "w", "true", status=1).stderr
    names = [line.split()[0] for line in user.penroot("list", "--fancy").stdout.splitlines()[1:]]
    assert names == ["w", "<unknown>"]
    assert user.penroot("exec", "w", "ls", "/z").stdout == "/z\n"
    for process in (first, second):
        process.communicate("\n")


@pytest.mark.security("U9")
def test_of_many_writers_one_runs(user: User) -> None:
    made(user)
    command = user.command("penroot", "start", "--rw", "w", "sh", "-c", "echo up; read x")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    many = [subprocess.Popen(command, env=user.environ, text=True, **pipes) for _ in range(6)]  # type: ignore[call-overload]
    until(lambda: sum(process.poll() is not None for process in many) == 5, "all but one are refused")
    outputs = [process.communicate("\n") for process in many]
    assert [out for out, _ in outputs].count("up\n") == 1
    assert sum("is changing the container w" in err for _, err in outputs) == 5


@pytest.fixture
def shared_home(lab: Lab) -> Iterator[Lab]:
    """Yield the lab, with bob's data path in bob's home, which all nodes see."""
    remove = "rm -rf ~/containers ~/.config/enroot"
    lab.run(f"{remove}; mkdir -p ~/.config/enroot", user="bob")
    lab.run("echo 'ENROOT_DATA_PATH ${HOME}/containers' > ~/.config/enroot/enroot.conf", user="bob")
    yield lab
    until(lambda: not lab.run(["squeue", "-h", "-u", "bob"]).stdout, "all jobs are over")
    lab.run(remove, user="bob")


def entries(lab: Lab) -> list[str]:
    found = lab.run("ls -A ~/containers", user="bob").stdout.split()
    return sorted(name for name in found if name.startswith("pyxis_"))


def at_once(lab: Lab, write: str, *options: str) -> list[str]:
    """Make both nodes write their names into a file at the same time. Return the lines of both containers' files."""
    script = f"echo $SLURMD_NODENAME {write} /mine; echo up; read line; cat /mine"
    step = lab.popen(["srun", "-N2", *options, "--container-writable", *sh(script)], user="bob")
    expect(step, "up", "up")
    return sorted(end(step)[0].split())


@pytest.mark.security("U9")
def test_unnamed_containers_on_a_shared_data_path(shared_home: Lab) -> None:
    """Before the fix, one of two nodes failed with "container exists: pyxis_J.0", and a hint to remove pyxis_J.0."""
    assert at_once(shared_home, ">", IMAGE) == ["n1", "n2"]
    until(lambda: not entries(shared_home), "the containers are removed")


@pytest.mark.parity("--container-name: the container is kept between steps")
@pytest.mark.security("U9")
def test_named_containers_where_nodes_share_the_data_path(shared_home: Lab) -> None:
    """Before the fix, two named containers silently shared one upper directory."""
    name = "--container-name=one"
    assert at_once(shared_home, ">>", IMAGE, name) == ["n1", "n2"]
    first, second = entries(shared_home)
    assert first == "pyxis_one" and second in ("pyxis_one@n1", "pyxis_one@n2")
    # Both nodes start again at the same time, and each uses its own container.
    assert at_once(shared_home, ">>", name) == ["n1", "n1", "n2", "n2"]


@pytest.mark.security("U9")
def test_container_of_another_node_is_named_and_not_used(shared_home: Lab) -> None:
    """The error names the node, and no hint says to remove a running container."""
    name = "--container-name=two"
    keep = sh("echo up; read x; echo 1 > /kept")
    first = shared_home.popen(["srun", "-w", "n1", IMAGE, name, "--container-writable", *keep], user="bob")
    assert next_line(first) == "up\n"
    try:
        done = shared_home.run(["srun", "-w", "n2", name, "--container-writable", "true"], user="bob", check=False)
        assert done.returncode != 0 and "node n1" in done.stderr and "remove" not in done.stderr
        command = [f"{PREFIX}/bin/penroot", "start", "--rw", "pyxis_two", "true"]
        done = shared_home.run(command, node="n2", user="bob", check=False)
        assert done.returncode != 0 and "node n1 is changing the container pyxis_two" in done.stderr
    finally:
        first.communicate("\n")
    # Once the step on n1 has ended, all nodes can use its container.
    assert shared_home.run(["srun", "-w", "n2", name, "cat", "/kept"], user="bob").stdout == "1\n"
