"""The lab, up once for all tests of this tier."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.installation import PREFIX
from tests.kernel.conftest import require
from tests.kernel.registry import Server, serve
from tests.slurm.lab import Lab, PrerequisiteError, images
from tests.slurm.lab.cluster import check_prerequisites


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the images of the lab where they are to be used: once on a machine, before the clock of a test ticks."""
    if session.config.option.collectonly or not any("lab" in getattr(i, "fixturenames", ()) for i in session.items):
        return
    with contextlib.suppress(PrerequisiteError, OSError, subprocess.CalledProcessError):  # the fixture will say it
        check_prerequisites()
        images.build(say=print)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A cluster of two nodes, with the plugin of $PENROOT_PREFIX if that is set.

    A lab that is already up with these arguments is used and left as it was
    found. Where the machine cannot hold a lab, tests fail in CI and are
    skipped elsewhere.
    """
    lab = Lab()
    found = lab.is_up()
    try:
        lab.up(nodes=2, prefix=PREFIX)
    except PrerequisiteError as e:
        if os.environ.get("CI"):
            pytest.fail(str(e), pytrace=False)
        pytest.skip(str(e))
    yield lab
    if not found:
        lab.down()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A registry of this machine; front() of test_pull.py shows it to nodes."""
    with serve(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture(scope="session")
def pmix(lab: Lab) -> None:
    listed = lab.run(["srun", "--mpi=list"])
    require("pmix" in (listed.stdout + listed.stderr).split(), "this Slurm has no mpi/pmix")


@pytest.fixture(autouse=True)
def not_drained(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test in which Slurm drains a node fails, and no later one waits for that node."""
    if "lab" not in request.fixturenames:
        yield
        return
    lab: Lab = request.getfixturevalue("lab")
    with open(f"{lab.root}/nodes/ctl/var/log/slurmctld.log") as log:
        log.seek(0, os.SEEK_END)
        yield
        drained = [line for line in log if line.endswith("state set to DRAIN\n")]
    for node in lab.nodes if drained else ():
        lab.clear(node)
    assert not drained, "".join(drained)


@pytest.fixture(scope="session")
def four(lab: Lab) -> Iterator[Lab]:
    """A cluster of four nodes beside the one that all tests share."""
    more = Lab(lab.root + "-four")
    more.up(nodes=4, prefix=PREFIX)
    yield more
    more.down()
