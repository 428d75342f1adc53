"""Attacks: by an image, a registry, another user, and a user on what root does for him.

Each test is one attack, and fails on the tree before its mend. ``user`` is the victim, ``bob`` another ordinary
user; ``lab`` is the cluster of tests/slurm, whose alice and bob they are there.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Fixtures and hooks of the other tiers.
from tests.kernel.conftest import UID, User, image, ordinary_user, packed, require, rootfs, user
from tests.slurm.conftest import lab, not_drained, pmix, pytest_collection_finish

__all__ = ["UID", "User", "image", "lab", "not_drained", "packed", "pmix", "pytest_collection_finish", "rootfs", "user"]

BOB = UID + 1


@pytest.fixture
def bob() -> Iterator[User]:
    with ordinary_user(BOB) as made:
        yield made


@pytest.fixture
def scratch() -> Iterator[pathlib.Path]:
    """A directory where every user can make one, as /var/tmp is."""
    require(os.geteuid() == 0, "only root can be two users")
    path = pathlib.Path(tempfile.mkdtemp(prefix="penroot-scratch-", dir="/var/tmp"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)
