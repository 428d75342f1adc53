"""Attacks: by an image, a registry, another user, and a user on what root does for him.

Each test is one attack, and fails on the tree before its mend. ``user`` is the victim, ``bob`` another ordinary
user; ``lab`` is the cluster of tests/slurm, whose alice and bob they are there.
"""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Fixtures and hooks of the other tiers.
from tests.kernel.conftest import User, image, rootfs, user
from tests.slurm.conftest import lab, not_drained, pytest_collection_finish

__all__ = ["User", "image", "lab", "not_drained", "pytest_collection_finish", "rootfs", "user"]

BOB = 27002


@pytest.fixture
def bob() -> Iterator[User]:
    """Another ordinary user of the machine, with a home of his own."""
    home = pathlib.Path(tempfile.mkdtemp(prefix="penroot-bob-", dir="/var/tmp"))
    home.chmod(0o755)
    made = User(home, BOB)
    made.own(home)
    yield made
    shutil.rmtree(home)
