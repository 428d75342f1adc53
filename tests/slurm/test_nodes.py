"""Behaviour that depends on the number of nodes, with one, two and four nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import images
from tests.fakeregistry import Fault
from tests.kernel.registry import Server
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, PMIX, assert_nothing_left, expect, plugin_argument, sbatch, sh
from tests.slurm.test_pull import after_request, front, numbered
from tests.waiting import until

MPI = "--container-image=registry:5000#mpi:1"

pytestmark = pytest.mark.parametrize("nodes", [1, 2, 4])


@pytest.fixture(autouse=True)
def nothing_left(four: Lab) -> Iterator[None]:
    yield
    assert_nothing_left(four)


def names(nodes: int) -> list[str]:
    return [f"n{number}" for number in range(1, nodes + 1)]


def on_first(nodes: int) -> list[str]:
    """Return the srun command that starts a step on the first ``nodes`` nodes."""
    return ["srun", f"-N{nodes}", "-w", ",".join(names(nodes))]


@pytest.mark.parity("MPI works for the user, and with --container-remap-root")
@PMIX
def test_ranks_of_mpi(four: Lab, nodes: int) -> None:
    out = four.run([*on_first(nodes), "--ntasks-per-node=2", "--mpi=pmix", MPI, "./hello"]).stdout.splitlines()
    ranks = [line.split() for line in out if line.startswith("rank")]
    assert sorted(int(rank[1]) for rank in ranks) == list(range(2 * nodes))
    assert {rank[-1] for rank in ranks} == set(names(nodes))
    assert f"sum {sum(range(2 * nodes))}" in out


@pytest.mark.parity("--container-name: the container is kept between steps")
def test_a_named_container_is_each_nodes_own(four: Lab, nodes: int) -> None:
    name = "--container-name=all"
    try:
        four.run([*on_first(nodes), IMAGE, name, "--container-writable", *sh("hostname > /made")])
        out = four.run([*on_first(nodes), "--ntasks-per-node=2", name + ":no_exec", "cat", "/made"]).stdout
        assert sorted(out.split()) == sorted(names(nodes) * 2)
        for node in names(nodes):
            assert four.run(["penroot", "list"], node=node).stdout == "pyxis_all\n"
    finally:
        for node in names(nodes):
            four.run("penroot list | xargs -r penroot remove -f", node=node)


@pytest.mark.parity("one import serves all tasks on a node", "a failed set-up names the node")
def test_failure_on_one_node_is_reported_once(four: Lab, nodes: int) -> None:
    *good, bad = names(nodes)
    try:
        for node in good:
            four.run(["penroot", "import", "-o", "/tmp/here.sqsh", "docker://registry:5000#minimal:1"], node=node)
        step = [*on_first(nodes), "--ntasks-per-node=2", "--container-image=/tmp/here.sqsh", "true"]
        done = four.run(step, check=False)
    finally:
        for node in good:
            four.run(["rm", "-f", "/tmp/here.sqsh"], node=node)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "/tmp/here.sqsh" in line and "error: pyxis" in line]
    assert len(lines) == 1, done.stderr
    assert f" {bad}: " in lines[0]


@pytest.mark.parity("one import serves all tasks on a node")
def test_failure_everywhere_is_reported_once_by_each(four: Lab, nodes: int) -> None:
    done = four.run(
        [*on_first(nodes), "--ntasks-per-node=2", "--container-image=/tmp/nowhere.sqsh", "true"], check=False
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "/tmp/nowhere.sqsh" in line and "error: pyxis" in line]
    assert len(lines) == nodes, done.stderr
    for node in names(nodes):
        assert sum(f" {node}: " in line for line in lines) == 1, done.stderr


def test_refusal_by_the_registry_is_reported_once_for_all(four: Lab, nodes: int) -> None:
    done = four.run(
        [*on_first(nodes), "--ntasks-per-node=2", "--container-image=registry:5000#nope:1", "true"], check=False
    )
    assert done.returncode != 0
    assert done.stderr.count("no repository nope") == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if "pyxis" in line]
    by_nodes = [line for line in lines if any(f" {node}: " in line for node in names(nodes))]
    assert not by_nodes


@pytest.mark.parity(
    "scancel and Ctrl-C during an import leave nothing",
    "the process that removes a step's container is not killed with the step",
    "cancelled steps and imports leave nothing on the nodes",
)
@pytest.mark.parametrize("end", [["scancel", "--user=alice"], ["pkill", "-INT", "-x", "srun"]], ids=["scancel", "^C"])
def test_cancelled_tasks_leave_nothing(four: Lab, nodes: int, end: list[str]) -> None:
    script = "echo up; exec sleep 600"
    step = four.popen([*on_first(nodes), "--ntasks-per-node=2", IMAGE, "--container-writable", *sh(script)])
    expect(step, *["up"] * 2 * nodes)

    def ended() -> bool:
        four.run(end, check=False)  # srun ends after two SIGINTs within one second
        four.run(end, check=False)
        return step.poll() is not None

    until(ended, "srun has ended")
    step.communicate()
    assert step.returncode != 0


@pytest.mark.parity(
    "scancel and Ctrl-C during an import leave nothing", "cancelled steps and imports leave nothing on the nodes"
)
def test_cancelled_imports_leave_nothing(four: Lab, registry: Server, nodes: int) -> None:
    image = numbered(100 + nodes)
    registry.pusher.image("test/stalls", "a", image)
    digest = images.digest(image.layers[1].blob)
    faults = [Fault(digest, stall_at=0.5) for _ in range(nodes)]
    with front(four, registry, *faults) as shown, plugin_argument(four, "swarm=no"):
        step = four.popen([*on_first(nodes), f"--container-image={shown.host}#test/stalls:a", "true"])
        until(lambda: sum(request.path.endswith(digest) for request in shown.seen) == nodes, "all nodes fetch")
        four.run(["scancel", "--user=alice"])
        step.communicate(timeout=300)
        assert step.returncode != 0
        assert_nothing_left(four)


@pytest.mark.parity("resolve_tags")
def test_a_tag_that_moves_is_one_image(four: Lab, registry: Server, nodes: int) -> None:
    old, new = numbered(nodes), numbered(10 + nodes)
    registry.pusher.image("test/agreed", "a", old)
    with front(four, registry, after_request("a")(lambda: registry.pusher.image("test/agreed", "a", new))) as shown:
        step = [*on_first(nodes), f"--container-image={shown.host}#test/agreed:a", "cat", "/number"]
        assert four.run(step).stdout == f"{nodes}\n" * nodes
        assert four.run(step).stdout == f"{10 + nodes}\n" * nodes


@pytest.mark.parity("srun returns after the save")
def test_image_saved_by_one_node_runs_on_all(four: Lab, nodes: int) -> None:
    last = names(nodes)[-1]
    save = f"srun -N1 -n1 -w {last} {IMAGE} --container-save=saved.sqsh --container-writable sh -c 'hostname > /made'"
    read = f"srun -N{nodes} --container-image=./saved.sqsh cat /made"
    try:
        out = four.run(["salloc", "-Q", *on_first(nodes)[1:], "sh", "-c", f"{save} && {read}"]).stdout
        assert out == f"{last}\n" * nodes
    finally:
        four.run(["rm", "-f", "saved.sqsh"])


BATCH = """\
#!/bin/sh
echo "script [$IMAGE_NAME]"
export SLURM_OVERLAP=1
srun --ntasks-per-node=1 {image} --container-name=batch --container-writable sh -c 'hostname > /made'
srun --container-name=batch sh -c 'echo step $(cat /made)' &
srun {image} sh -c 'echo beside $IMAGE_NAME' &
wait
srun {image} sh -c 'echo last $SLURM_PROCID'
"""


@pytest.mark.parity("sbatch: each step in a batch script has a separate container")
def test_steps_of_a_batch_job(four: Lab, nodes: int) -> None:
    script = BATCH.format(image=IMAGE)
    try:
        options = [*on_first(nodes)[1:], "--ntasks-per-node=2", "-o", "batch.out"]
        done = sbatch(four, *options, input=script, check=False)
        out = four.run(["cat", "batch.out"]).stdout.splitlines()
        assert done.returncode == 0, out
        assert "script []" in out
        assert {line for line in out if line.startswith("step")} == {f"step {node}" for node in names(nodes)}
        assert out.count("beside minimal") == 2 * nodes
        assert {line for line in out if line.startswith("last")} == {f"last {task}" for task in range(2 * nodes)}
    finally:
        four.run(["rm", "-f", "batch.out"])
        for node in names(nodes):
            four.run("penroot list | xargs -r penroot remove -f", node=node)
