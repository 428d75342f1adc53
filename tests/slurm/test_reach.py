"""pyxis-py check --nodes: names the nodes that cannot reach each other, or srun's host."""

from __future__ import annotations

import contextlib

import pytest

from tests.installation import PREFIX
from tests.slurm.lab import Lab
from tests.slurm.lab.cluster import SUBNET
from tests.slurm.steps import plugin_argument

CHECK = [f"{PREFIX}/bin/pyxis-py", "check", "--nodes"]


def check(lab: Lab, nodes: str, user: str = "root") -> list[str]:
    """Run a check, which must fail, and return its report without the hints."""
    done = lab.run([*CHECK, nodes], user=user, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(line.startswith("     fix: ") for line in lines[1::2]), done.stdout
    return lines[::2]


@pytest.mark.parametrize("user", ["root", "alice"])
def test_nodes_that_reach_each_other(four: Lab, user: str) -> None:
    out = four.run([*CHECK, "n[1-4]"], user=user).stdout
    assert out == "ok   4 nodes reach each other and the host of srun\n"


def test_one_node(four: Lab) -> None:
    assert four.run([*CHECK, "n2"]).stdout == "ok   the node reaches the host of srun\n"


@pytest.mark.clusters("Firewalls")
@pytest.mark.parity("pyxis-py check --nodes")
def test_two_that_do_not_are_one_line(four: Lab) -> None:
    with contextlib.ExitStack() as walls:
        for node, other in (("n2", "n3"), ("n3", "n2"), ("n4", "n2")):
            walls.enter_context(four.unreachable(node, other))
        one, two = sorted(check(four, "n[1-4]"))
    assert one.startswith("bad  n2 and n3 do not reach each other: ") and one.endswith(": No route to host")
    assert two.startswith("bad  n2 and n4 do not reach each other: ")  # n4 can neither connect to n2 nor answer it


@pytest.mark.parity("pyxis-py check --nodes")
def test_swarm_network_holds_here_too(four: Lab) -> None:
    """The check uses only addresses in swarm_network, and names swarm=no."""
    with plugin_argument(four, f"swarm_network={SUBNET}.0/24"):
        assert f"over {SUBNET}.0/24" in four.run([*CHECK, "n1,n2"]).stdout
    with plugin_argument(four, f"swarm_network={SUBNET}.8/29"):
        lines = check(four, "n1,n2")
        assert len(lines) == 2, lines
        assert all("does not reach the host of srun" in line and "swarm_network" in line for line in lines)
    with plugin_argument(four, "swarm=no"):
        assert "swarm=no" in four.run([*CHECK, "n1,n2"]).stdout


def test_refusal_by_slurm_is_quoted(four: Lab) -> None:
    done = four.run([*CHECK, "n1,n9"], check=False)
    assert done.returncode == 1
    assert "n9" in done.stderr or "Invalid node name" in done.stderr, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_check_ignores_variables_of_containers(four: Lab) -> None:
    assert four.run([*CHECK, "n1"], env={"PYXIS_CONTAINER_IMAGE": "missing"}).stdout.startswith("ok")
