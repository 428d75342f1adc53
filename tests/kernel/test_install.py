"""make enroot-names and make uninstall, on a copy of what make install has made."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernel.conftest import PREFIX

ROOT = Path(__file__).parents[2]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(PREFIX, tmp_path / "prefix", symlinks=True))
    (copy / "share/bash-completion/completions/enroot").unlink(missing_ok=True)  # of enroot-names
    return copy


def make(target: str, prefix: Path) -> None:
    command = ["make", "--no-print-directory", target, f"PREFIX={prefix}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_left(prefix: Path) -> None:
    make("enroot-names", prefix)
    completion = prefix / "share/bash-completion/completions/enroot"
    assert "complete -o nosort -F _enroot_completion enroot" in completion.read_text()
    assert (prefix / "share/man/man1/enroot.1").resolve().name == "penroot.1"
    assert list(prefix.rglob("*.so"))
    make("uninstall", prefix)
    assert not prefix.exists()


def test_what_is_of_others_stays(prefix: Path) -> None:
    for name in ("enroot", "other"):
        (prefix / "bin" / name).unlink(missing_ok=True)
        (prefix / "bin" / name).write_text("")
    make("uninstall", prefix)
    assert sorted(path.name for path in prefix.rglob("*") if not path.is_dir()) == ["enroot", "other"]
