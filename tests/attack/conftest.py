"""Attacks by an image, by a registry, by another user, and by a user on the code that root runs for this user.

Each test is one attack, unless its docstring says "Not an attack". ``user`` is the victim, ``bob`` another ordinary
user. ``lab`` is the cluster of tests/slurm, with its users alice and bob.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Fixtures and hooks that the other tiers define.
from tests.kernel.conftest import UID, User, image, ordinary_user, packed, registry, require, rootfs, user
from tests.slurm.conftest import lab, not_drained, pmix, pytest_collection_finish

__all__ = ["UID", "User", "image", "lab", "not_drained", "packed", "pmix", "pytest_collection_finish", "registry"]
__all__ += ["rootfs", "user"]

BOB = UID + 1


@pytest.fixture
def bob() -> Iterator[User]:
    with ordinary_user(BOB) as made:
        yield made


@pytest.fixture
def scratch() -> Iterator[pathlib.Path]:
    """Yield a directory in which every user can create directories, like /var/tmp."""
    require(os.geteuid() == 0, "only root can act as two users")
    path = pathlib.Path(tempfile.mkdtemp(prefix="penroot-scratch-", dir="/var/tmp"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)
