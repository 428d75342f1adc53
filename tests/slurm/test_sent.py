"""--container-image=bcast:FILE: srun sends a squashfs file of its host to the nodes of a step."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.slurm.lab import Lab
from tests.slurm.lab.cluster import SUBNET
from tests.slurm.steps import assert_nothing_left, plugin_argument, sbatch, sh
from tests.slurm.test_pull import STORE
from tests.slurm.test_swarm import NODES
from tests.waiting import until

HERE = "/var/tmp/sent"  # each node has its own /var/tmp
SIZE = 6_000_000  # bytes that compress badly


def make(lab: Lab, node: str, name: str) -> None:
    """Make the image NAME.sqsh on ``node``. The file /name in the image contains NAME."""
    script = f"""set -e; mkdir -p {HERE}; cd {HERE}
        penroot import -o base.sqsh docker://registry:5000#minimal:1
        penroot create --name base base.sqsh
        penroot start --rw base sh -c 'echo {name} > /name; head -c {SIZE} /dev/urandom > /fill'
        penroot export -o {name}.sqsh base
        penroot remove -f base; rm base.sqsh"""
    lab.run(script, node=node)


@pytest.fixture(scope="module")
def made(four: Lab) -> Iterator[Lab]:
    """Yield a cluster in which only srun's host has x.sqsh."""
    make(four, "ctl", "x")
    yield four
    four.run(["rm", "-rf", HERE])


@pytest.fixture(autouse=True)
def nothing_left(made: Lab) -> Iterator[None]:
    """Remove the sent files from the stores before the next test."""
    yield
    for node in NODES:
        made.run("penroot list | xargs -r penroot remove -f; penroot cache prune", node=node)
    assert_nothing_left(made)


def step(nodes: int, *command: str) -> list[str]:
    image = f"--container-image=bcast:{HERE}/x.sqsh"
    return ["srun", f"-N{nodes}", "-w", ",".join(NODES[:nodes]), image, *command]


def refused(lab: Lab, command: list[str], **where: Any) -> str:
    done = lab.run(command, check=False, **where)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


def listening(lab: Lab) -> str:
    return lab.run("ss -Htlnp | grep python3", user="root", check=False).stdout


@pytest.mark.parity("--container-image: bcast:FILE sends a file of srun's host to the nodes")
def test_a_file_of_srun_s_host(made: Lab) -> None:
    done = made.run(step(4, *sh("cat /name; stat -c %s /fill")))
    assert sorted(done.stdout.split()) == [str(SIZE)] * 4 + ["x"] * 4
    assert re.search(rf"^pyxis: bcast:{HERE}/x.sqsh: [0-9.]+ MB on 4 nodes in [0-9.]+ s$", done.stderr, re.MULTILINE)
    for node in NODES:
        assert f"bcast:{HERE}/x.sqsh" in made.run(["penroot", "cache", "list"], node=node).stdout
    # All nodes have stored the file, so nothing is sent, even if the file has another name.
    made.run(["ln", "-f", f"{HERE}/x.sqsh", f"{HERE}/z.sqsh"])
    with contextlib.ExitStack() as slow:
        slow.enter_context(made.slowed("ctl", 1_000_000))
        again = made.run(["srun", "-N4", "--container-image=bcast:./z.sqsh", "cat", "/name"], cwd=HERE, timeout=40)
    assert again.stdout.split() == ["x"] * 4
    assert "on 4 nodes" not in again.stderr


@pytest.mark.parity("--container-image: bcast:FILE sends a file of srun's host to the nodes")
def test_one_node_alone(made: Lab) -> None:
    """A step on one node gets the file, too. Tasks see no SLURM_PYXIS variable."""
    assert made.run(step(1, "cat", "/name")).stdout == "x\n"
    done = made.run(step(3, *sh("cat /name; env")))
    assert done.stdout.count("x\n") >= 3
    assert "SLURM_PYXIS" not in done.stdout


@pytest.mark.parity("--container-image: bcast:FILE sends a file of srun's host to the nodes")
def test_in_a_batch_script_and_after_salloc(made: Lab) -> None:
    """In a batch script srun runs on the first node; with salloc it runs on salloc's host."""
    script = f"#!/bin/sh\nsrun --container-image=bcast:{HERE}/y.sqsh cat /name\n"
    script += f"srun -N1 --container-image=bcast:{HERE}/y.sqsh cat /name\n"
    make(made, "n1", "y")
    sbatch(made, "-N3", "-w", "n1,n2,n3", "-o", "sent.out", "--wrap", script)
    made.run(["rm", "-r", HERE], node="n1")
    out = made.run("cat sent.out; rm sent.out").stdout
    assert out.splitlines().count("y") == 4, out
    command = ["salloc", "-Q", "-N2", "-w", "n1,n2", f"--container-image=bcast:{HERE}/x.sqsh", "srun", "cat", "/name"]
    assert made.run(command).stdout == "x\n" * 2


def test_a_container_that_stays_and_is_changed(made: Lab) -> None:
    """A named container of the file keeps its changes, and keeps the file in the store."""
    options = ["--container-name=kept", "--container-writable"]
    made.run(step(2, *options, *sh("echo more >> /name")))
    again = made.run(["srun", "-N2", "-w", "n1,n2", "--container-name=kept", "cat", "/name"])
    assert again.stdout.split() == ["x", "more"] * 2
    kept = made.run(["penroot", "cache", "prune"], node="n1")
    assert "used by" in kept.stderr
    unpacked = made.run(step(1, *sh("cat /name; stat -f -c %T /")), env={"ENROOT_UNPACK": "yes"})
    assert unpacked.stdout.split() == ["x", "overlayfs"]


@pytest.mark.parity("--container-image: bcast:FILE sends a file of srun's host to the nodes")
def test_unsendable_files(made: Lab) -> None:
    image = f"--container-image=bcast:{HERE}/x.sqsh"
    script = refused(made, ["sbatch", image, "--wrap", "true"])
    assert "a batch script starts without" in script and "first node" in script
    assert "No such file" in refused(made, ["srun", "--container-image=bcast:./missing.sqsh", "true"], cwd=HERE)
    several = ["srun", "-N1", image, "true", ":", "-N1", image, "true"]
    assert "several components" in refused(made, several)
    with plugin_argument(made, "swarm=no"):
        assert "swarm=no in plugstack.conf" in refused(made, step(2, "true"))
    by_variable = {"PYXIS_CONTAINER_IMAGE": f"bcast:{HERE}/x.sqsh"}
    assert "a batch script starts without" in refused(made, ["sbatch", "--wrap", "true"], env=by_variable)


def test_nodes_that_do_not_reach_srun_s_host(made: Lab) -> None:
    with plugin_argument(made, f"swarm_network={SUBNET}.8/29"):
        output = refused(made, step(2, "true"))
    assert output.count("does not reach srun's host") == 2, output


def test_a_node_without_room_is_the_only_one_to_fail(made: Lab) -> None:
    made.run(f"mkdir -p {STORE}; mount -t tmpfs -o size=1m,uid=2001,mode=700 none {STORE}", user="root", node="n2")
    try:
        output = refused(made, step(3, *sh("cat /name")))
    finally:
        until(lambda: not made.run(["umount", STORE], user="root", node="n2", check=False).returncode, "the unmount")
    assert output.count("No space left on device") == 1, output
    assert "n2" in output


def test_a_file_that_is_changed_on_the_way(made: Lab) -> None:
    made.run(["cp", f"{HERE}/x.sqsh", f"{HERE}/w.sqsh"])
    with made.slowed("ctl", 8_000_000):
        running = made.popen(["srun", "-N4", f"--container-image=bcast:{HERE}/w.sqsh", "true"])
        begun = f"head -c 4 {STORE}/tmp/images-*/image.sqsh | grep -q hsqs"
        until(lambda: made.run(begun, node="n3", check=False).returncode == 0, "the transfer has begun")
        made.run(f"head -c 4096 /dev/urandom | dd of={HERE}/w.sqsh bs=4096 seek=200 conv=notrunc status=none")
        _, err = running.communicate(timeout=280)
    assert running.returncode != 0
    assert err.count("the file was changed while it was sent") == 1, err


def test_srun_s_host_listens_within_its_range(made: Lab) -> None:
    conf = f"{HERE}/etc"
    made.run(f"cp -rL /etc/slurm {conf}; echo SrunPortRange=61000-61019 >> {conf}/slurm.conf")
    with made.slowed("ctl", 8_000_000):
        running = made.popen(step(2, "true"), env={"SLURM_CONF": f"{conf}/slurm.conf"})
        sockets = until(lambda: len(listening(made).splitlines()) == 2 and listening(made), "both listen")
        made.run(["scancel", "--me"], timeout=60)
        running.communicate(timeout=280)
    ports = [int(line.split()[3].rpartition(":")[2]) for line in str(sockets).splitlines()]
    assert all(61000 <= port <= 61019 for port in ports), sockets


def test_srun_that_is_killed(made: Lab) -> None:
    """Nothing is left on the nodes, and nothing listens any more."""
    with made.slowed("ctl", 8_000_000):
        running = made.popen(step(4, "true"))
        begun = f"head -c 4 {STORE}/tmp/images-*/image.sqsh | grep -q hsqs"
        until(lambda: made.run(begun, node="n3", check=False).returncode == 0, "the transfer has begun")
        running.kill()
        running.communicate()
        until(lambda: not listening(made), "nobody listens on srun's host")
    until(lambda: not made.run(["squeue", "-h"]).stdout, "the step ends", 200)
    for node in NODES:
        assert not made.run(["ls", f"{STORE}/tmp"], node=node).stdout
