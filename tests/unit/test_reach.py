"""`pyxis-py check --nodes` makes findings from the answers of the nodes."""

from __future__ import annotations

import pytest

from enroot_py.features.swarm.invitation import Swarm
from enroot_py.features.swarm.reach import Answers, Firewall, judge

NAMES = ("n1", "n2", "n3")


def answers(*done: int, apart: dict[int, str] | None = None, lost: dict[tuple[int, int], str] | None = None) -> Answers:
    return Answers(dict(enumerate(NAMES)), apart or {}, lost or {}, done=set(done))


def lines(answers_of_nodes: Answers, *, networks: str = "", span: str = "") -> list[str]:
    return [f"{finding.verdict} {finding.what}" for finding in judge(answers_of_nodes, NAMES, Firewall(networks, span))]


def test_silent_node_is_named() -> None:
    all_reached = "ok 3 nodes reach each other and the host of srun"
    assert lines(answers(0, 1, 2)) == [all_reached]
    assert lines(answers(0, 1, 2), networks="10.0.0.0/8") == [f"{all_reached} over 10.0.0.0/8"]
    assert lines(answers(0, 1)) == ["bad n3 has not finished in time"]
    silent = answers(0, 1)
    del silent.names[2]
    assert lines(silent) == ["bad n3 has not answered"]


def test_unreachable_pair_is_reported_once() -> None:
    both = answers(0, 1, 2, lost={(0, 1): "no route", (1, 0): "no route", (2, 0): "no answer"})
    assert lines(both) == ["bad n1 and n2 do not reach each other: no route", "bad n3 does not reach n1: no answer"]


def test_hint_names_the_port_range_of_srun() -> None:
    (finding,) = judge(answers(0, 1, 2, apart={1: "no answer"}), NAMES, Firewall("", "60001-60100"))
    assert "n2 does not reach the host of srun: no answer" in finding.what
    assert "SrunPortRange=60001-60100" in finding.fix
    (finding,) = judge(answers(0, 1, 2, apart={1: "no answer"}), NAMES, Firewall("", ""))
    assert "set SrunPortRange" in finding.fix


def test_node_without_the_library_gets_no_advice_on_ports() -> None:
    without_library = Answers(
        dict(enumerate(NAMES)),
        done={0, 1, 2},
        lacking={1: ("no library", "install it")},
        peer_errors={(0, 1): "no answer"},
    )
    (finding,) = judge(without_library, NAMES, Firewall("", ""))
    assert finding.what.startswith("n2: no library: ") and finding.fix == "install it"


@pytest.mark.parametrize(("networks", "admitted"), [("10.0.0.0/8", False), ("", True), ("fd00::/8,192.0.2.0/24", True)])
def test_only_hosts_of_the_networks_are_admitted(networks: str, admitted: bool) -> None:
    swarm = Swarm(b"", "", 2, networks)
    assert swarm.admits("192.0.2.1") is admitted
    assert swarm.admits("127.0.0.1")  # the seed, srun's own peer, connects from this address
