"""penroot works if the folder of an optional feature is missing, for each feature alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from enroot_py.base.features import FEATURES
from tests.installation import copy_tree
from tests.kernel.conftest import User

ROOT = Path(__file__).parents[2]
# Names of unit tests that use no feature: tests/unit/test_environ.py and so on
CORE = "environ hooks options plugin_settings settings start submit yaml"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the source tree. All tests share it, so Python compiles its modules once."""
    top = tmp_path_factory.mktemp("core")
    for name in ("enroot_py", "pyxis_py", "hooks", "tests"):
        shutil.copytree(ROOT / name, top / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("c_shims", "docs", "pyproject.toml"):
        (top / name).symlink_to(ROOT / name)
    return top


@pytest.mark.parametrize("feature", FEATURES)
def test_core_without_the_folder_of(feature: str, tree: Path) -> None:
    folder = tree / feature.replace(".", "/")
    folder.rename(tree / "without")
    try:
        files = [f"tests/unit/test_{name}.py" for name in CORE.split()]
        done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
        assert done.returncode == 0, done.stdout[-4000:]
        listed = run(tree, "-c", "import enroot_py.cli.verbs as v; print(v.__file__, v.help_text())")
        assert listed.stdout.startswith(str(tree)) and " start " in listed.stdout, listed.stderr
    finally:
        (tree / "without").rename(folder)


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run([sys.executable, *arguments], cwd=tree, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("feature", [name for name in FEATURES if name.startswith("enroot_py")])
def test_start_without_the_folder_of(user: User, rootfs: Path, feature: str) -> None:
    penroot = copy_tree(user.home / "tree")
    shutil.rmtree(user.home / "tree" / feature.replace(".", "/"))
    command = (str(penroot), "start", "box", "echo", "it started")
    assert user.run(*command, env={"ENROOT_FOO": "a site's own"}).stdout == "it started\n"
