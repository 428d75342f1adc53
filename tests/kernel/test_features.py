"""The core works without any one of its features."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from enroot_py.base.features import FEATURES

ROOT = Path(__file__).parents[2]
# Tests of the core: no file of these names a feature.
CORE = "environ hooks options plugin_settings settings start submit yaml"


@pytest.mark.parametrize("feature", FEATURES)
def test_core_without_the_folder_of(feature: str, tmp_path: Path) -> None:
    left_out = feature.rpartition(".")[2]

    def ignored(directory: str, names: list[str]) -> list[str]:
        without = [left_out] if directory.endswith("/features") else []
        return [*without, *(name for name in names if name == "__pycache__")]

    for name in ("enroot_py", "pyxis_py", "hooks", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    for name in ("c_shims", "docs", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert not (tmp_path / feature.replace(".", "/")).exists()
    files = [f"tests/unit/test_{name}.py" for name in CORE.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    command = [sys.executable, "-c", "import enroot_py.cli.verbs as v; print(v.__file__, v.help_text())"]
    listed = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert listed.stdout.startswith(str(tmp_path)) and " start " in listed.stdout, listed.stderr
