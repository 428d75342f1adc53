"""/etc/hosts and /etc/resolv.conf of a node, in the container of a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, ON_N1, clear, end, expect, on_node, sh, srun

WAIT = "n=0; until grep -q {0} /etc/resolv.conf || [ $n = 100 ]; do sleep 0.1; n=$((n+1)); done"
SEE = f"echo up; {WAIT.format('once')}; echo seen; {WAIT.format('fresh')}; grep -c fresh /etc/resolv.conf; read line"


@pytest.fixture
def resolv(lab: Lab) -> Iterator[None]:
    on_node(lab, "cp -p /etc/resolv.conf /etc/resolv.conf.keep")
    yield
    on_node(lab, "mv /etc/resolv.conf.keep /etc/resolv.conf")


def replace(lab: Lab, word: str) -> None:
    on_node(
        lab,
        f"{{ cat /etc/resolv.conf; echo '# {word}'; }} > /etc/resolv.conf.n; mv /etc/resolv.conf.n /etc/resolv.conf",
    )


@pytest.mark.parity("penroot-follow")
@pytest.mark.parametrize("options", [(), ("--container-remap-root",), ("--container-name=live",)])
@pytest.mark.usefixtures("resolv")
def test_step_sees_resolv_conf_that_changes(lab: Lab, options: tuple[str, ...]) -> None:
    step = lab.popen(["srun", *ON_N1, IMAGE, *options, *sh(SEE)])
    expect(step, "up")
    replace(lab, "once")
    expect(step, "seen")
    replace(lab, "fresh")
    expect(step, "1")
    if "--container-name=live" in options:
        assert srun(lab, "--container-name=live:exec", "grep", "-c", "fresh", "/etc/resolv.conf") == "1\n"
    end(step)
    clear(lab)
    assert on_node(lab, "pgrep -r S,R,D penroot-follow") == ""


@pytest.mark.security("C10")
@pytest.mark.usefixtures("resolv")
def test_root_in_a_writable_step_writes_copies(lab: Lab) -> None:
    """Before and after the node replaces a file, root in the container writes to a copy of that file."""
    script = (
        "for f in hosts hostname resolv.conf; do echo 10.0.0.9 n9 >> /etc/$f || exit; done; tail -n1 /etc/resolv.conf"
    )
    show = "cat /etc/hosts /etc/hostname /etc/resolv.conf"
    options = ("--container-remap-root", "--container-writable")
    step = lab.popen(["srun", *ON_N1, IMAGE, *options, *sh(f"echo up; read line; {script}; read line; {script}")])
    expect(step, "up")
    replace(lab, "once")
    before = on_node(lab, show)
    assert step.stdin is not None
    step.stdin.write("go\n")
    step.stdin.flush()
    expect(step, "10.0.0.9 n9")
    replace(lab, "twice")
    assert end(step)[0] == "10.0.0.9 n9\n"
    assert on_node(lab, show) == before + "# twice\n"
