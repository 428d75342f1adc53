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
from tests.kernel.conftest import User, image, ordinary_user, require, rootfs
from tests.slurm.conftest import lab, not_drained, pytest_collection_finish

__all__ = ["User", "image", "lab", "not_drained", "pytest_collection_finish", "rootfs"]

# Other users than that of tests/kernel, which run beside these: each lists the containers that he runs.
UID, BOB = 27003, 27002


@pytest.fixture
def user() -> Iterator[User]:
    with ordinary_user(UID) as made:
        yield made


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
