"""The lab, started once for all tests of this tier."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.installation import PREFIX
from tests.kernel.conftest import registry as registry
from tests.kernel.conftest import require
from tests.slurm.lab import Lab, PrerequisiteError, images
from tests.slurm.lab.cluster import check_prerequisites
from tests.slurm.steps import assert_nothing_left


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the lab's images, if a test needs them, before the tests: once on a machine, and without a time limit."""
    if session.config.option.collectonly or not any("lab" in getattr(i, "fixturenames", ()) for i in session.items):
        return
    with contextlib.suppress(PrerequisiteError, OSError, subprocess.CalledProcessError):  # the fixture lab reports it
        check_prerequisites()
        images.build(say=print)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Yield a cluster of two nodes, with the plugin of $PENROOT_PREFIX if that is set.

    If a lab with these arguments is up, use it and leave it up. On a machine that cannot run a lab, tests fail in CI
    and are skipped elsewhere.
    """
    lab = Lab()
    was_up = lab.is_up()
    try:
        lab.up(nodes=2, prefix=PREFIX)
    except PrerequisiteError as e:
        if os.environ.get("CI"):
            pytest.fail(str(e), pytrace=False)
        pytest.skip(str(e))
    yield lab
    if not was_up:
        lab.down()


@pytest.fixture(scope="session")
def pmix(lab: Lab) -> None:
    listed = lab.run(["srun", "--mpi=list"])
    require("pmix" in (listed.stdout + listed.stderr).split(), "this Slurm has no mpi/pmix")


@pytest.fixture(autouse=True)
def not_drained(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which Slurm drains a node, and resume the node for later tests."""
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


@pytest.fixture
def nothing_left(lab: Lab) -> Iterator[None]:
    """Check that a test's jobs leave nothing on any node. The test itself must remove its named containers."""
    yield
    assert_nothing_left(lab)


@pytest.fixture(scope="session")
def four(lab: Lab) -> Iterator[Lab]:
    """Yield a second cluster, with four nodes."""
    more = Lab(lab.root + "-four")
    more.up(nodes=4, prefix=PREFIX)
    yield more
    more.down()
