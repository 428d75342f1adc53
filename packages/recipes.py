"""Write the Spack and EasyBuild recipes of a release, with its version and the checksums of its archives."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from packages import place, tarball, tree, vendored


def filled(text: str, archives: Iterable[Path]) -> str:
    """Fill in the version, and the checksum of each archive."""
    checksums = "".join(f"    '{path.name}': '{vendored.sha256(path)}',\n" for path in sorted(archives))
    return text.replace("@VERSION@", place.version()).replace("    # @CHECKSUMS@\n", checksums)


def build(root: Path, work: Path, to: Path) -> list[Path]:
    """Write penroot-VERSION.eb (EasyBuild requires this name) and a Spack repository, for the archives in ``to``."""
    source, archives = work / "source/packages", list(to.rglob(f"penroot-{place.version()}-*.tar.xz"))
    easyconfig = to / f"penroot-{place.version()}.eb"
    easyconfig.write_text(filled((source / "easybuild/penroot.eb").read_text(), archives))
    top = work / "recipes" / f"penroot-{place.version()}-spack"
    shutil.copytree(source / "spack", top)
    package = top / "packages/penroot/package.py"
    package.write_text(filled(package.read_text(), archives))
    tree.touch(top)
    return [easyconfig, tarball.pack(top, to / f"{top.name}.tar.gz")]
