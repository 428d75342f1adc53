"""The plugin's arguments on a cluster, variables for the site's hooks, and root with its privileges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from enroot_py import __version__
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, ON_N1, assert_nothing_left, end, expect, refused, sh, srun


@pytest.fixture
def plugin(lab: Lab) -> Iterator[str]:
    """Return the line that loads the plugin, and restore it after the test."""
    line = Path(lab.root, "etc/slurm/plugstack.conf.d/pyxis.conf").read_text().strip()
    yield line
    lab.install_plugin(line)
    assert_nothing_left(lab)


@pytest.mark.parity("runtime_path")
def test_runtime_path(lab: Lab, plugin: str) -> None:
    lab.install_plugin(f"{plugin} runtime_path=/run/elsewhere")
    step = lab.popen(["srun", *ON_N1, IMAGE, *sh("echo up; read line")])
    try:
        expect(step, "up")
        assert lab.run(["stat", "-c", "%U %a", "/run/elsewhere/2001"], node="n1").stdout == "alice 700\n"
        assert lab.run(["ls", "/run/elsewhere/2001"], node="n1").stdout
        step.communicate("go\n", timeout=300)
        assert lab.run(["ls", "-A", "/run/elsewhere/2001"], node="n1").stdout == ""
    finally:
        step.kill()
        step.communicate()
        lab.run(["rm", "-rf", "/run/elsewhere"], node="n1", user="root")


def test_a_runtime_path_that_cannot_be_made_costs_no_node(lab: Lab, plugin: str) -> None:
    lab.install_plugin(f"{plugin} runtime_path=/proc/pyxis")
    try:
        lab.restart_daemon("n1", "slurmd")
        with open(f"{lab.root}/nodes/n1/var/log/slurmd.log") as log:
            assert "pyxis: cannot make the runtime_path /proc/pyxis: No such file or directory" in log.read()
        assert lab.run(["srun", *ON_N1, "echo", "fine"]).stdout == "fine\n"
        assert "cannot make the directory /proc/pyxis/2001: No such file or directory" in refused(lab, IMAGE, "true")
    finally:
        lab.install_plugin(plugin)
        lab.restart_daemon("n1", "slurmd")


def test_a_runtime_path_that_goes_while_a_step_runs(lab: Lab) -> None:
    step = lab.popen(["srun", *ON_N1, IMAGE, "--container-writable", *sh("echo up; read line; echo on")])
    expect(step, "up")
    lab.run(["rm", "-r", "/run/pyxis"], node="n1", user="root")
    out, err = end(step)
    assert (step.returncode, out) == (0, "on\n")
    assert "the directory /run/pyxis/2001 was removed; the step ends without this lock" in err
    assert_nothing_left(lab, "n1")
    assert srun(lab, IMAGE, "pwd") == "/srv/work\n"


@pytest.mark.parity("unknown arguments are an error")
def test_unknown_arguments_are_said_by_srun(lab: Lab, plugin: str) -> None:
    lab.install_plugin(f"{plugin} runtime=/run/pyxis")
    stderr = refused(lab, IMAGE, "true")
    assert "unknown argument 'runtime=/run/pyxis'" in stderr
    assert "runtime_path" in stderr


@pytest.mark.parity("use_enroot_load", "1, true, yes, y, t and on mean yes")
@pytest.mark.parametrize("yes", ["1", "true", "YES", "y"])
def test_ineffective_arguments_are_accepted(lab: Lab, plugin: str, yes: str) -> None:
    lab.install_plugin(f"{plugin} use_enroot_load={yes} use_squashfuse={yes}")
    assert srun(lab, IMAGE, *sh("echo $IMAGE_NAME")) == "minimal\n"


@pytest.fixture
def hook(lab: Lab) -> Iterator[None]:
    """Install a site hook that copies its variables of the plugin and the job into the container's environment."""
    names = "PYXIS_RUNTIME_PATH PYXIS_VERSION SLURM_JOB_UID SLURM_JOB_GID SLURM_JOB_ID"
    script = f'#!/bin/sh\nfor n in {names}; do eval echo "SEEN_$n=\\$$n"; done >> "$ENROOT_ENVIRON"\n'
    path = Path(lab.root, "etc/enroot/hooks.d/50-seen.sh")
    path.parent.mkdir(exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)
    yield
    path.unlink()
    path.parent.rmdir()


@pytest.mark.parity("PYXIS_RUNTIME_PATH")
def test_hooks_see_the_plugin_and_the_job(lab: Lab, hook: None) -> None:
    show = "echo $SEEN_PYXIS_RUNTIME_PATH $SEEN_PYXIS_VERSION $SEEN_SLURM_JOB_UID $SEEN_SLURM_JOB_GID"
    out = srun(lab, IMAGE, *sh(f'{show}; test "$SEEN_SLURM_JOB_ID" = $SLURM_JOB_ID && echo same'))
    assert out.splitlines() == [f"/run/pyxis {__version__} 2001 2001", "same"]


@pytest.mark.parity("root keeps its privileges in a container if ENROOT_ALLOW_SUPERUSER is set")
@pytest.mark.parametrize("remap", ["--container-remap-root", "--no-container-remap-root"])
def test_root_keeps_his_privileges_where_that_is_allowed(lab: Lab, remap: str) -> None:
    show = "readlink /proc/self/ns/user; grep NoNewPrivs /proc/self/status; mount -t tmpfs none /run && echo mounted"
    step = ["srun", *ON_N1, IMAGE, remap, *sh(show)]
    outside = lab.run(["readlink", "/proc/self/ns/user"], node="n1", user="root").stdout
    kept = lab.run(step, user="root", env={"ENROOT_ALLOW_SUPERUSER": "yes"}).stdout
    assert kept == f"{outside}NoNewPrivs:\t0\nmounted\n"
    confined = lab.run(step, user="root", check=False).stdout
    assert outside not in confined
    assert "NoNewPrivs:\t1\n" in confined
    of_alice = lab.run(step, env={"ENROOT_ALLOW_SUPERUSER": "yes"}, check=False).stdout
    assert outside not in of_alice
    assert "NoNewPrivs:\t1\n" in of_alice
    lab.run("rm -rf /var/tmp/enroot-*-0 /tmp/enroot-run-0 /run/pyxis/0", node="n1", user="root")
    assert_nothing_left(lab)
