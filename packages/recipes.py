"""Write the Spack and EasyBuild recipes for a release's archive, with its version and checksum."""

from __future__ import annotations

import shutil
from pathlib import Path

from packages import place, tarball, tree, vendored
from packages.place import ARCHITECTURE


def filled(text: str, archive: Path) -> str:
    """Fill in the version, and the checksum of ``archive``."""
    return text.replace("@VERSION@", place.version()).replace("@SHA256@", vendored.sha256(archive))


def build(root: Path, work: Path, to: Path) -> list[Path]:
    """Write penroot-VERSION.eb, the name that EasyBuild requires, and a Spack repository. Needs the archive."""
    source, archive = work / "source/packages", to / f"penroot-{place.version()}-{ARCHITECTURE}.tar.xz"
    easyconfig = to / f"penroot-{place.version()}.eb"
    easyconfig.write_text(filled((source / "easybuild/penroot.eb").read_text(), archive))
    top = work / "recipes" / f"penroot-{place.version()}-spack"
    shutil.copytree(source / "spack", top)
    package = top / "packages/penroot/package.py"
    package.write_text(filled(package.read_text(), archive))
    tree.touch(top)
    return [easyconfig, tarball.pack(top, to / f"{top.name}.tar.gz")]
