"""The other files of a release: source distribution, wheel, SBOM and checksums, all from one commit."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from enroot_py import __version__
from enroot_py.base.elf import MACHINES
from packages import vendored
from packages.target import TARGETS, target
from tests.packages.conftest import PROJECT

pytestmark = pytest.mark.skipif(not (PROJECT / ".git").exists(), reason="a release is of a commit")


@pytest.fixture(scope="module")
def release() -> Iterator[Path]:
    """Build a release from a clone, because the tested tree may have changes."""
    with tempfile.TemporaryDirectory(prefix="penroot-release-", dir="/var/tmp") as place:
        subprocess.run(["git", "clone", "--quiet", PROJECT, f"{place}/clone"], check=True)
        command = [sys.executable, "-m", "packages", "--release", "--output", f"{place}/release"]
        done = subprocess.run(command, cwd=f"{place}/clone", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        yield Path(place, "release")


@pytest.mark.parity("make release")
def test_release_has_all_packages_and_their_checksums(release: Path) -> None:
    names = {path.name for path in release.iterdir()}
    version, packaged = __version__, __version__.replace("rc", "~rc")
    native = ("penroot", "penroot-slurm-plugin", "penroot-signatures")
    assert names == {
        "SHA256SUMS",
        f"penroot-{version}.eb",
        f"penroot-{version}-spack.tar.gz",
        f"penroot-{version}.tar.gz",
        *(f"penroot-{version}-{each.machine}.cdx.json" for each in TARGETS.values()),
        *(f"penroot-{version}-cp310-abi3-manylinux_2_34_{each.machine}.whl" for each in TARGETS.values()),
        *(f"penroot-{version}-{each.machine}.tar.xz" for each in TARGETS.values()),
        *(f"{name}_{packaged}_{each.debian}.deb" for name in native for each in TARGETS.values()),
        *(f"{name}-{packaged}-1.{each.machine}.rpm" for name in native for each in TARGETS.values()),
        *(f"penroot-{name}_{packaged}_all.deb" for name in ("enroot-names", "ssh")),
        *(f"penroot-{name}-{packaged}-1.noarch.rpm" for name in ("enroot-names", "ssh")),
    }
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=release, capture_output=True, text=True
    )
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(names) - 1


def test_recipes_are_for_its_archives(release: Path, tmp_path: Path) -> None:
    subprocess.run(["tar", "-xf", *release.glob("*-spack.tar.gz"), "-C", tmp_path], check=True)
    (package,) = tmp_path.glob("*/packages/penroot/package.py")
    (easyconfig,) = release.glob("*.eb")
    for recipe in (package, easyconfig):
        assert all(
            f"'{path.name}': '{vendored.sha256(path)}'" in recipe.read_text() for path in release.glob("*.tar.xz")
        )
        assert "@" not in re.sub(r"@(run_after|on_package_attributes)\(", "", recipe.read_text())


@pytest.mark.parametrize("arch", TARGETS)
def test_no_module_asks_for_a_later_glibc_than_the_wheel_says(release: Path, tmp_path: Path, arch: str) -> None:
    """Each module and program is for the machine in the archive's name, too."""
    (archive,) = release.glob(f"*-{TARGETS[arch].machine}.tar.xz")
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path], check=True)
    modules = sorted(tmp_path.rglob("*.so"))
    programs = [path for path in tmp_path.rglob("libexec/penroot-*") if path.read_bytes()[:4] == b"\x7fELF"]
    assert len(modules) > 30 and len(programs) == 3
    numbers = {path.read_bytes()[18] for path in (*modules, *programs)}
    assert [MACHINES[number] for number in numbers] == [TARGETS[arch].machine]
    asked = set()
    for module in modules:
        shown = subprocess.run(
            [TARGETS[arch].binutils("objdump"), "-T", module], capture_output=True, text=True, check=True
        ).stdout
        asked |= {tuple(map(int, each.split("."))) for each in re.findall(r"GLIBC_(2\.\d+)", shown)}
    assert max(asked) <= (2, 34)


@pytest.mark.parity("make release")
def test_sbom_names_each_vendored_file(release: Path, tmp_path: Path) -> None:
    (path,) = release.glob(f"*-{target().machine}.cdx.json")
    document = json.loads(path.read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    parts = {part["name"]: part for part in document["components"]}
    assert set(parts) == {*vendored.KEPT, "musl"}
    assert all(part["licenses"][0]["expression"] and part["version"] for part in parts.values())
    hashes = {file["hashes"][0]["content"] for part in parts.values() for file in part.get("components", ())}
    assert hashes == {wheel.sha256 for wheel in vendored.wheels(target())}
    references = [part["bom-ref"] for part in parts.values()]
    assert document["dependencies"][0] == {"ref": f"pkg:pypi/penroot@{__version__}", "dependsOn": references}

    subprocess.run(["tar", "-xf", *release.glob(f"*-{target().machine}.tar.xz"), "-C", tmp_path], check=True)
    (library,) = tmp_path.glob("*/lib/penroot")
    patterns = [pattern for kept in vendored.KEPT.values() for pattern in kept]
    for file in filter(Path.is_file, library.rglob("*")):
        name = str(file.relative_to(library))
        if not name.startswith(("enroot_py/", "pyxis_py/", "plugins/", "libexec/", "modules.zip")):
            assert any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns), name


@pytest.mark.parity("make release", "--version")
@pytest.mark.parametrize("kind", [f"*{target().machine}.whl", "*[0-9].tar.gz"])
def test_pip_installs_the_command_line_without_root(release: Path, tmp_path: Path, kind: str) -> None:
    (path,) = release.glob(f"penroot-{kind}")
    venv.create(tmp_path / "venv", with_pip=True)
    command = [tmp_path / "venv/bin/pip", "install", "--quiet", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for words, said in (
        ("--version", f"penroot {__version__} (commit "),
        ("version", __version__),
        ("info", "penroot v"),
    ):
        shown = subprocess.run([tmp_path / "venv/bin/penroot", words], capture_output=True, text=True, env=environ)
        assert shown.stdout.startswith(said), shown.stderr
    built = subprocess.run([tmp_path / "venv/bin/penroot", "--version"], capture_output=True, text=True).stdout
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=PROJECT, capture_output=True, text=True)
    assert f"(commit {commit.stdout.strip()} of " in built


def test_a_tree_with_changes_is_no_release(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", PROJECT, tmp_path / "clone"], check=True)
    (tmp_path / "clone/README.md").write_text("changed")
    command = [sys.executable, "-m", "packages", "--release", "--output", tmp_path / "release"]
    done = subprocess.run(command, cwd=tmp_path / "clone", capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("packages: the working tree has changes: commit them first")
    assert not os.path.exists(tmp_path / "release")
