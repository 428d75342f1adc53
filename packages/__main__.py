"""Build packages for this machine or for ARCH=arm64. With --release, build all files of a release.

make packages [ARCH=arm64]
make release
"""

from __future__ import annotations

import argparse
import fcntl
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from packages import deb, place, recipes, rpm, sbom, tarball, tree, vendored
from packages.place import PROJECT, PackageError
from packages.target import TARGETS, Target, target


def wheel(root: Path, work: Path, to: Path) -> list[Path]:
    """Copy our wheel, for pip install penroot. It has the commands, but no static programs and no Slurm plugin."""
    return [Path(shutil.copy(path, to)) for path in work.glob("penroot-*.whl")]


def sdist(root: Path, work: Path, to: Path) -> list[Path]:
    directory = tree.sdist(work / "source", work)
    return [tarball.pack(directory, to / f"{directory.name}.tar.gz")]


def sbom_file(root: Path, work: Path, to: Path) -> list[Path]:
    output = to / f"penroot-{place.version()}-{target().machine}.cdx.json"
    output.write_text(sbom.text())
    return [output]


KINDS = {"deb": deb.build, "rpm": rpm.build, "tarball": tarball.build}
# Kinds whose files differ from machine to machine.
NATIVE = {**KINDS, "wheel": wheel, "sbom": sbom_file}
RELEASE = {**NATIVE, "sdist": sdist, "recipes": recipes.build}


def check_release() -> None:
    """Raise PackageError if the working tree has changes, or if CHANGELOG.md has no section for the version."""
    if place.commit().endswith("+"):
        raise PackageError("the working tree has changes: commit them first, or build without --release: make packages")
    changes = (PROJECT / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(place.version())} ", changes, re.MULTILINE):
        raise PackageError(f"CHANGELOG.md has no section `## {place.version()} (DATE)`")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m packages", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(RELEASE))
    parser.add_argument("--output", type=Path, metavar="DIRECTORY", help="default: dist/packages, dist/packages-arm64")
    parser.add_argument("--release", action="store_true", help="all kinds and machines, from a clean commit")
    arguments = parser.parse_args()
    suffix = f"-{target().debian}" if target().foreign else ""
    output = arguments.output or PROJECT / f"dist/packages{suffix}"
    output.mkdir(parents=True, exist_ok=True)
    for old in (*output.glob("penroot[-_]*"), *output.glob("SHA256SUMS")):
        old.unlink()
    if arguments.release:
        check_release()
        for each in TARGETS.values():
            if each.foreign:
                cross(each, output)
    make(arguments.kinds or (RELEASE if arguments.release else KINDS), output)
    report(output)


def make(kinds: Iterable[str], output: Path) -> None:
    """Build the packages of ``kinds`` in ``output``."""
    work = tree.work_directory(place.version())
    work.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{work}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        root = tree.build(work)
        for kind in kinds:
            RELEASE[kind](root, work, output)


def cross(target: Target, output: Path) -> None:
    """Build the NATIVE kinds for another machine. Drop packages that fit all machines: make() builds them too."""
    with tempfile.TemporaryDirectory(dir=output) as built:
        place.run(sys.executable, "-m", "packages", *NATIVE, "--output", built, ARCH=target.debian)
        for path in Path(built).iterdir():
            if path.name.endswith(("_all.deb", ".noarch.rpm", "SHA256SUMS")):
                continue
            path.rename(output / path.name)


def report(output: Path) -> None:
    """Write checksums, and print sizes."""
    built = sorted(output.glob("penroot[-_]*"))
    (output / "SHA256SUMS").write_text("".join(f"{vendored.sha256(path)}  {path.name}\n" for path in built))
    for path in built:
        print(f"{path.stat().st_size / 1e6:7.2f} MB  {path}")


if __name__ == "__main__":
    try:
        main()
    except PackageError as e:
        sys.exit(f"packages: {e}")
