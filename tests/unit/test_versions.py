"""The link of an installation leads to the current version, and old versions are removed."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = ("__init__", "filesystems", "mountinfo", "pack", "versions")  # a version needs these of enroot_py.base
USE = "import sys; sys.path.insert(0, sys.argv[1]); from enroot_py.base import versions; versions.use()"
LONG_AGO_S = 3600  # seconds: more than _MAX_START_S, and less than _MAX_INSTALL_S


class Prefix:
    """An installation with only the modules that handle its link and its versions."""

    def __init__(self, directory: Path) -> None:
        self.link = directory / "lib/penroot"
        self.versions = directory / "lib/penroot-versions"
        self.versions.mkdir(parents=True)

    def put(self, name: str) -> Path:
        """Make a version that the link does not point to yet."""
        directory = self.versions / name
        (directory / "enroot_py/base").mkdir(parents=True)
        for file in ("__init__.py", *(f"base/{name}.py" for name in MODULES)):
            shutil.copy(ROOT / "enroot_py" / file, directory / "enroot_py" / file)
        return directory

    def begin(self, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-IS", "-c", USE, self.versions / name])

    def use(self, name: str) -> None:
        assert self.begin(name).wait(60) == 0

    def age(self, name: str, seconds: int = LONG_AGO_S) -> None:
        """Make a version look as if it was replaced ``seconds`` ago."""
        then = time.time() - seconds
        os.utime(self.versions / name / "in-use", (then, then))

    @property
    def current(self) -> str:
        """Return the version in use, after checking that it is complete."""
        directory = Path(os.path.realpath(self.link))
        assert (directory / "enroot_py/base/filesystems.py").exists()
        return directory.name

    @property
    def names(self) -> list[str]:
        return sorted(os.listdir(self.versions))


@pytest.fixture
def prefix(tmp_path: Path) -> Prefix:
    installation = Prefix(tmp_path / "opt")
    for name in ("1", "2", "3"):
        installation.put(name)
    installation.use("1")
    return installation


def test_link_is_relative_so_an_installation_can_move(prefix: Prefix) -> None:
    prefix.use("2")
    assert os.readlink(prefix.link) == "penroot-versions/2"
    assert prefix.current == "2"
    prefix.use("3")
    assert prefix.names == ["1", "2", "3"]  # a process may have just followed the link


USES = {
    "open": [sys.executable, "-c", "import sys; f = open(sys.argv[1]); print(flush=True); input()"],
    "mapped": [
        *(sys.executable, "-c"),
        "import mmap, os, sys; f = os.open(sys.argv[1], 0); m = mmap.mmap(f, 0, prot=mmap.PROT_READ); os.close(f); "
        "print(flush=True); input()",
    ],
    "mounted": ["unshare", "--mount", "sh", "-c", 'mount --bind "$1" /mnt && echo && read -r line', "sh"],
}


@pytest.mark.parametrize("usage", USES)
def test_version_in_use_is_removed_afterwards(prefix: Prefix, usage: str) -> None:
    if usage == "mounted" and os.geteuid() != 0:
        pytest.skip("only root can mount")
    version = prefix.versions / "1"
    prefix.use("2")
    prefix.age("1")
    command = [*USES[usage], version if usage == "mounted" else version / "enroot_py/__init__.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"\n"
        prefix.use("3")
        assert prefix.names == ["1", "2", "3"]
        process.communicate(b"\n")
    prefix.age("2")
    prefix.use("3")
    assert prefix.names == ["3"]


def test_only_abandoned_versions_are_removed(prefix: Prefix) -> None:
    """The unfinished version of an installation that still runs stays."""
    prefix.use("2")
    assert "3" in prefix.names
    then = time.time() - 3 * 86400
    os.utime(prefix.versions / "3", (then, then))
    prefix.use("2")
    assert prefix.names == ["1", "2"]


def test_on_a_shared_file_system_only_age_counts(prefix: Prefix) -> None:
    code = "from enroot_py.base import versions; print(versions._is_unused(sys.argv[2], True))"
    command = [sys.executable, "-IS", "-c", f"import sys; sys.path.insert(0, sys.argv[1]); {code}"]

    def is_over() -> str:
        return subprocess.check_output([*command, prefix.link, prefix.versions / "1"], text=True).strip()

    prefix.age("1", 29 * 86400)
    assert is_over() == "False"
    prefix.age("1", 31 * 86400)
    with open(prefix.versions / "1/enroot_py/__init__.py"):
        assert is_over() == "True"


def test_directory_of_an_old_installation_is_replaced(tmp_path: Path) -> None:
    prefix = Prefix(tmp_path)
    prefix.put("1")
    (prefix.link / "enroot_py").mkdir(parents=True)
    prefix.use("1")
    assert prefix.current == "1"
    (before,) = (name for name in prefix.names if name != "1")
    prefix.age(before)
    prefix.use("1")
    assert prefix.names == ["1"]


def test_simultaneous_changes_leave_one_current_version(prefix: Prefix) -> None:
    for _ in range(5):
        processes = [prefix.begin(name) for name in ("1", "2", "3")]
        assert [process.wait(60) for process in processes] == [0, 0, 0]
        assert prefix.current in ("1", "2", "3")
    assert sorted(os.listdir(prefix.link.parent)) == ["penroot", "penroot-versions"]


def test_killed_change_leaves_a_complete_version(prefix: Prefix, rng: random.Random, soak: bool) -> None:
    started = time.monotonic()
    prefix.use("1")
    longest = 1.2 * (time.monotonic() - started)
    for number in range(200 if soak else 10):
        process = prefix.begin("23"[number % 2])
        time.sleep(rng.random() * longest)
        process.kill()
        process.wait()
        assert prefix.current in ("1", "2", "3")
    prefix.use("1")
    assert prefix.current == "1"
    assert sorted(os.listdir(prefix.link.parent)) == ["penroot", "penroot-versions"]
