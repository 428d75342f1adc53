"""Check that the descriptions of packages agree with each other. No package is built."""

from __future__ import annotations

import ast
import re
import subprocess
import tarfile
from pathlib import Path, PurePath

import pytest
import yaml

from enroot_py import __version__
from enroot_py.base import making
from enroot_py.config.words import base_directories
from packages import deb, description, place, recipes, rpm, sbom, tarball, tree, vendored
from packages.description import MAIN, NAMES, PACKAGES, PLUGIN, SIGNATURES, SSH
from packages.place import PackageError
from packages.target import TARGETS, target
from pyxis_py.admin import prebuilt
from pyxis_py.request import settings
from tests.docs import MADE
from tests.unit.test_docs import links

ROOT = Path(__file__).parents[2]


def test_each_file_belongs_to_one_package() -> None:
    owners = {
        "usr/lib/penroot-package/plugins/24.11/spank_pyxis.so": PLUGIN,
        "usr/share/man/man7/penroot-srun.7.gz": PLUGIN,
        "usr/bin/enroot": NAMES,
        "usr/bin/enroot-mount": NAMES,
        "usr/libexec/penroot/enroot-mount": MAIN,  # hooks find the program through this file
        "usr/lib/penroot-package/modules.zip": MAIN,
        "usr/lib/penroot-package/cryptography/hazmat/bindings/_rust.abi3.so": SIGNATURES,
        "usr/lib/penroot-package/asyncssh/sftp.py": SSH,
        "usr/bin/pyxis-py": MAIN,
    }
    assert {path: description.owner(path) for path in owners} == owners


def test_links_of_shipped_pages_lead_to_shipped_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only links to the source are an exception: tests, and the code of a plugin for a later Slurm."""
    monkeypatch.setattr(sbom, "text", str)  # sbom.text would cache the time of this commit for other tests
    tree.documents(ROOT, tmp_path)
    top = tmp_path / tree.DOC
    pages = [path for path in top.rglob("*.md") if (top / MADE.relative_to(ROOT)) not in path.parents]
    assert len(pages) > 50
    targets = [(path, target.partition("#")[0]) for path in pages for target in links(path)]
    missing = {(path.parent / target).resolve().relative_to(top) for path, target in targets}
    missing = {path for path in missing if not (top / path).exists()}
    assert {path.parts[0] for path in missing} <= {"tests", "c_shims"} and len(missing) > 50
    assert {path for path in missing if path.parts[0] == "c_shims"} == {Path("c_shims/runtime/penroot.c")}


def test_vendored_packages_are_the_declared_ones_with_hashes() -> None:
    text = vendored.PINNED.read_text()
    pinned = re.findall(r"^(\S+)==\S+((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    assert {name for name, _ in pinned} == set(vendored.KEPT) == {*vendored.declared(), *vendored.INDIRECT}
    assert [name for name, _ in pinned] == sorted(vendored.KEPT)
    for name, hashes in pinned:
        assert hashes.count("--hash") in (1, len(TARGETS), len(TARGETS) * len(vendored.PYTHONS)), name


def test_pythons_are_the_same_everywhere() -> None:
    first, last = vendored.PYTHONS[0], vendored.PYTHONS[-1]
    minor = int(last.partition(".")[2])
    assert f'requires-python = ">={first}"' in (ROOT / "pyproject.toml").read_text()
    assert f"python3 (>= {first}), python3 (<< 3.{minor + 1})" in MAIN.deb["Depends"]
    script = (ROOT / "packages/scripts/packaged").read_text()
    assert f"({first.replace('.', ', ')}) <= sys.version_info < (3, {minor + 1})" in script
    launcher = (ROOT / "configs/launcher").read_text()
    for version in vendored.PYTHONS:
        assert f"python{version}" in script
        assert re.search(rf"\b{version.partition('.')[2]}[,)]", launcher)
    assert f"Python {first} to {last}" in (ROOT / "docs/howto/install.md").read_text()


def test_slurms_are_the_same_everywhere() -> None:
    assert list(tree.SLURMS) == sorted(tree.SLURMS)
    releases = ", ".join(tree.SLURMS[:-1]) + f" and {tree.SLURMS[-1]}"
    for page in ("docs/howto/install.md", "docs/explanation/developing.md"):
        assert releases in " ".join((ROOT / page).read_text().split()), page


@pytest.mark.parametrize(("version", "packaged"), [("1.0.0rc1", "1.0.0~rc1"), ("1.0.0", "1.0.0"), ("2.1b2", "2.1~b2")])
def test_release_candidate_sorts_before_its_version(
    monkeypatch: pytest.MonkeyPatch, version: str, packaged: str
) -> None:
    monkeypatch.setattr(place, "version", lambda: version)
    assert place.packaged_version() == packaged
    compared = subprocess.run(["dpkg", "--compare-versions", "1.0.0~rc1", "lt", "1.0.0"])
    assert compared.returncode == 0


def test_the_version_has_its_changes() -> None:
    assert place.version() == __version__
    assert re.search(rf"^## {re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert (ROOT / "CHANGELOG.md").read_text().startswith("# Changelog\n\n## Unreleased\n")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_control_and_spec_agree(package: description.Package, tmp_path: Path) -> None:
    control = deb.control_file(package, 1)
    (tmp_path / "usr/bin").mkdir(parents=True)
    spec = rpm.section(package, tmp_path)
    assert f"Package: {package.name}\nVersion: {place.packaged_version()}\n" in control
    assert f"%package -n {package.name}\n" in spec
    for line in package.text.splitlines():
        assert f" {line}\n" in control and f"{line}\n" in spec
        assert len(line) < 80
    calls = [*deb.scripts(package).values()], re.findall(rf"{description.SETUP} .*", spec)
    assert bool(package.setup_arguments) is bool(calls[0]) is bool(calls[1])
    assert all(path in spec for path in package.watches)


def test_tmpfiles_keeps_our_directories_in_tmp() -> None:
    """This includes penroot's own directories, incomplete files, and directories that the documentation names."""
    lines = (ROOT / "packages/files/tmpfiles.conf").read_text().splitlines()
    patterns = [PurePath(line.removeprefix("x ")) for line in lines if line.startswith("x ")]
    texts = [path.read_text() for path in (*(ROOT / "docs").rglob("*.md"), ROOT / "enroot_py/cli/places.py")]
    documented = {path for text in texts for path in re.findall(r"/(?:var/)?tmp/\.?p?enroot[\w.-]*", text)}
    assert documented
    runtime = base_directories({"HOME": "/home/alice"})["XDG_RUNTIME_DIR"]
    directories = {runtime, settings.load(()).runtime_path, *documented}
    directories |= {making.hidden(f"/tmp/{name}", making.MAKING) for name in ("penroot-bundle", "enroot-data-2001")}
    for path in map(PurePath, directories):
        assert any(path.match(str(each)) for each in patterns), path
        hidden = path.name.startswith(".")  # * does not match hidden names
        assert not hidden or any(p.name.startswith(".") and path.match(str(p)) for p in patterns), path


def test_variables_of_the_role_are_the_same_everywhere() -> None:
    """The same variables have a default, are checked by Ansible, and are explained in the page.

    The default version is the current version.
    """
    role = ROOT / "packages/ansible/penroot"
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
    checked = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    page = (ROOT / "packages/ansible/README.md").read_text()
    explained = {
        name for row in re.findall(r"^\| (`.+?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert set(defaults) == set(checked) == explained
    assert defaults["penroot_version"] == place.packaged_version()


def test_recipes_are_filled_with_version_and_checksums(tmp_path: Path) -> None:
    archives = [tmp_path / "archive", tmp_path / "another"]
    for archive in archives:
        archive.write_text(archive.name)
    for recipe in ("easybuild/penroot.eb", "spack/packages/penroot/package.py"):
        text = (ROOT / "packages" / recipe).read_text()
        assert text.count("@CHECKSUMS@") == 1 and "@VERSION@" in text
        filled = ast.parse(recipes.filled(text, archives))
        strings = {node.value for node in ast.walk(filled) if isinstance(node, ast.Constant)}
        assert {__version__, *map(vendored.sha256, archives)} <= strings


def test_an_archive_has_one_order_one_time_and_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1763900000")
    top = tmp_path / "top"
    (top / "b").mkdir(parents=True)
    (top / "b/c").write_text("c")
    (top / "a").symlink_to("b/c")
    first = tarball.pack(top, tmp_path / "first.tar.xz").read_bytes()
    (top / "b/c").touch()
    assert tarball.pack(top, tmp_path / "second.tar.xz").read_bytes() == first
    with tarfile.open(tmp_path / "first.tar.xz") as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == ["top", "top/a", "top/b", "top/b/c"]
    assert {(member.uid, member.gid, member.mtime) for member in members} == {(0, 0, 1763900000)}


@pytest.mark.parity("deb, rpm: the plugin for the machine's Slurm")
def test_compiled_plugin_is_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used, programs = tmp_path / "spank_pyxis.so", tmp_path / "bin"
    programs.mkdir()
    for release, number in (("22.05", "0x160500"), ("24.11", "0x180b00")):
        path = tmp_path / "plugins" / release / used.name
        path.parent.mkdir(parents=True)
        path.write_bytes(f"penroot plugin for Slurm {number}".encode())
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def install(version: str) -> str | None:
        """Install the plugin for a slurmd of this version, and return its release."""
        (programs / "slurmd").write_text(f"#!/bin/sh\necho slurm {version}\n")
        (programs / "slurmd").chmod(0o755)
        return prebuilt.take(str(tmp_path))

    assert (install("22.05.8"), install("24.11.5")) == ("22.05", "24.11")
    assert used.readlink() == Path("plugins/24.11/spank_pyxis.so")
    assert (tmp_path / "python3").exists()
    assert install("27.02.0-0rc1") is None
    assert used.readlink() == Path(
        "plugins/24.11/spank_pyxis.so"
    )  # without a plugin for this version, the old plugin stays
    used.unlink()
    used.write_bytes(b"penroot plugin for Slurm 0x180b05")
    assert install("24.11.5") == "24.11" and not used.is_symlink()
    assert install("22.05.8") == "22.05" and used.is_symlink()


def test_arch_chooses_the_target_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, each in TARGETS.items():
        monkeypatch.setenv("ARCH", name)
        assert target() == each
        assert deb.architecture(MAIN) == name and deb.architecture(NAMES) == "all"
    monkeypatch.setenv("ARCH", "riscv64")
    with pytest.raises(PackageError, match="^ARCH=riscv64: not one of amd64, arm64$"):
        target()
