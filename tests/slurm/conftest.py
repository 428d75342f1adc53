"""The lab, up once for all tests of this tier."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab, PrerequisiteError


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
        lab.up(nodes=2, prefix=os.environ.get("PENROOT_PREFIX") or None)
    except PrerequisiteError as e:
        if os.environ.get("CI"):
            pytest.fail(str(e), pytrace=False)
        pytest.skip(str(e))
    yield lab
    if not found:
        lab.down()


@pytest.fixture(scope="session")
def four(lab: Lab) -> Iterator[Lab]:
    """A cluster of four nodes beside the one that all tests share."""
    more = Lab(lab.root + "-four")
    more.up(nodes=4, prefix=os.environ.get("PENROOT_PREFIX") or None)
    yield more
    more.down()
