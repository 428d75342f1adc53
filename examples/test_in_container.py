"""Tests with a container as a fixture. Each test gets a new container, within milliseconds.

IMAGE=docker://python:3.12-slim pytest test_in_container.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import enroot_py


@pytest.fixture(scope="session")
def image() -> enroot_py.Image | str:
    name = os.environ["IMAGE"]
    return enroot_py.pull(name) if "://" in name else name


@pytest.fixture
def box(image: enroot_py.Image | str) -> Iterator[enroot_py.Container]:
    with enroot_py.Container(image, writable=True) as box:
        yield box


def test_install_adds_a_file(box: enroot_py.Container) -> None:
    box.run(["sh", "-c", "echo installed > /etc/program.conf"], check=True)
    assert box.run(["cat", "/etc/program.conf"], capture_output=True, text=True).stdout == "installed\n"


def test_each_test_begins_anew(box: enroot_py.Container) -> None:
    assert box.run(["cat", "/etc/program.conf"], capture_output=True).returncode == 1
