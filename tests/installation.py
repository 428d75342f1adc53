"""The penroot that the tests run: the installation in $PENROOT_PREFIX, or this source tree after `make dev`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
IS_INSTALLED = bool(os.environ.get("PENROOT_PREFIX"))
PREFIX = os.environ.get("PENROOT_PREFIX") or str(ROOT)  # bin/ has the programs
LIBRARY = f"{PREFIX}/lib/penroot" if IS_INSTALLED else PREFIX  # for sys.path; contains libexec/ and spank_pyxis.so


def require(condition: object, reason: str) -> None:
    """Skip the test for ``reason`` unless ``condition`` is true. In CI, which installs everything, fail instead."""
    if condition:
        return
    import pytest  # the demo runs without it

    if os.environ.get("CI"):
        pytest.fail(f"missing in CI: {reason}")
    pytest.skip(reason)


def copy_tree(to: Path) -> Path:
    """Copy this source tree, with the programs of LIBRARY, for a test to change. Return the path of its penroot."""
    ignored = shutil.ignore_patterns("__pycache__", "build")
    for name in ("bin", "enroot_py", "pyxis_py", "hooks", "c_shims", "configs"):
        shutil.copytree(ROOT / name, to / name, ignore=ignored, symlinks=True)
    shutil.copytree(f"{LIBRARY}/libexec", to / "libexec", symlinks=True)
    (to / ".venv").symlink_to(ROOT / ".venv")
    return to / "bin/penroot"
