"""The unit tier also runs without a compiler and other programs: it skips tests that need a missing program."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Generator

import pytest

PROGRAMS = ("gcc", "nm", "readelf", "mksquashfs", "openssl", "ssh-keygen", "dpkg")


class NotBuilt:
    """The last finder of sys.meta_path. If no other finder has found our module in C, this finder skips the tests."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "enroot_py.base._linux":
            pytest.skip("the module in C is not built: make dev, with a compiler", allow_module_level=True)


sys.meta_path.append(NotBuilt)  # type: ignore[arg-type]


def _skip_without_program(item: pytest.Item) -> Generator[None]:
    try:
        return (yield)
    except FileNotFoundError as e:
        if e.filename not in PROGRAMS or os.environ.get("CI"):
            raise
        pytest.skip(f"{e.filename} is not installed")


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(_skip_without_program)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(_skip_without_program)


@pytest.fixture
def box(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return the root of a container with the library directory of Debian and Ubuntu."""
    from tests.fakehost import TRIPLET  # imports the C module, so NotBuilt must be installed before

    (tmp_path / f"box/usr/lib/{TRIPLET}").mkdir(parents=True)
    return tmp_path / "box"
