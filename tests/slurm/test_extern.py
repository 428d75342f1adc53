"""PrologFlags=RunInJob of Slurm 24.05: slurmd does not call the plugin's epilog, so the extern step cleans up instead.

With an older Slurm, the fixture builds the plugin as for Slurm 24.05, and adds it to plugstack.conf after the start of
slurmd: this slurmd does not know the plugin, so it does not call the epilog either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.installation import PREFIX
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, expect, sbatch, sh
from tests.waiting import until

NAME = "--container-name=one"


@pytest.fixture(scope="module")
def newer(lab: Lab) -> bool:
    major, minor = re.findall(r"\d+", lab.run(["srun", "-V"]).stdout)[:2]
    return (int(major), int(minor)) >= (24, 5)


@pytest.fixture(scope="module")
def extern(lab: Lab, newer: bool) -> Iterator[Lab]:
    """Yield a cluster of one node, where jobs have an extern step, and containers are removed with their jobs."""
    more = Lab(lab.root + "-extern")
    flags = "RunInJob" if newer else "Contain"
    conf = [f"PrologFlags={flags}", "KillWait=60", *(["SlurmctldParameters=enable_stepmgr"] if newer else [])]
    more.up(nodes=1, prefix=PREFIX, plugin="# not yet", slurm_conf=conf)
    compiler = '#!/bin/sh\nexec cc -DEXTERN_ENDS_LAST=1 "$@"\n'
    more.run("mkdir /home/opt; cat > /home/opt/cc; chmod 755 /home/opt/cc", user="root", input=compiler)
    build = [f"{PREFIX}/bin/pyxis-py", "build", "--output", "/home/opt/spank_pyxis.so"]
    more.run(build, user="root", env={} if newer else {"CC": "/home/opt/cc"})
    more.install_plugin("required /home/opt/spank_pyxis.so container_scope=job")
    yield more
    more.down()


def containers(extern: Lab) -> str:
    return extern.run(["penroot", "list"], node="n1").stdout


@pytest.mark.parity("PrologFlags=RunInJob: the containers of a job are removed at the end of its extern step")
def test_containers_of_a_job_end_with_its_extern_step(extern: Lab) -> None:
    sbatch(extern, "-o", "out", "--wrap", f"srun {IMAGE} {NAME} true; srun {NAME} true && penroot list")
    assert "_one" in extern.run("cat out; rm out").stdout
    until(lambda: not containers(extern), "the extern step has removed the container")
    assert extern.residue("n1") == []


@pytest.mark.parity("PrologFlags=RunInJob: the containers of a job are removed at the end of its extern step")
def test_container_in_use_stays_until_its_step_ends(extern: Lab, newer: bool) -> None:
    """With an older Slurm, the extern step ends before this step, so nothing but the test removes the container."""
    script = "trap 'until [ -e go ]; do sleep 0.1; done; exit' TERM; echo up; sleep 600 & wait"
    step = extern.popen(["srun", IMAGE, NAME, "--container-mount-home", *sh(f"cd; {script}")])
    expect(step, "up")
    extern.run(["scancel", "--user=alice"])
    if not newer:
        running = ["pgrep", "-f", "^slurmstepd: .*extern"]
        until(lambda: not extern.run(running, node="n1", check=False).stdout, "the end of the extern step")
    assert "_one" in containers(extern)
    extern.run("touch go")
    step.communicate(timeout=300)
    if not newer:
        extern.run("penroot list | xargs penroot remove -f; rm /run/pyxis/2001/pyxis_*", node="n1")
    until(lambda: not containers(extern), "the extern step has removed the container")
    extern.run("rm go")
    assert extern.residue("n1") == []


@pytest.mark.parity("srun --async")
def test_async_step_runs_in_its_container(extern: Lab) -> None:
    """srun returns at once. The job's step manager, which does not have srun's options, launches the step."""
    if "--async" not in extern.run(["srun", "--help"]).stdout:
        pytest.skip("this Slurm has no srun --async")
    script = "sleep 0.5; cd /home/alice && test -e /etc/lab-release && hostname > async.new && mv async.new async"
    step = f"srun --async --output=/dev/null {IMAGE} --container-mounts=/home/alice sh -c '{script}'"
    wait = "for n in $(seq 300); do test -e async && break; sleep 0.1; done"
    try:
        extern.run(["salloc", "-Q", "--stepmgr", "sh", "-c", f"{step} && test ! -e async && {wait}"], cwd="/home/alice")
        assert extern.run(["cat", "/home/alice/async"]).stdout == "n1\n"
    finally:
        extern.run(["rm", "-f", "/home/alice/async", "/home/alice/async.new"])
