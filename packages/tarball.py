"""Build penroot-VERSION-MACHINE.tar.xz: the tree without the files that only deb and rpm need.

The archive can be unpacked at any path, also on a shared file system.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from pathlib import Path

from packages import place, tree
from packages.description import NAMES
from packages.place import run
from packages.target import target


def build(root: Path, work: Path, to: Path) -> list[Path]:
    """Pack the tree without package files, and without links under enroot's names: another enroot may be in PATH."""
    name = f"penroot-{place.version()}-{target().machine}"
    top = work / "tarball" / name
    shutil.copytree(root / "usr", top, symlinks=True)
    shutil.rmtree(top / "lib/tmpfiles.d")
    (top / "libexec/penroot/packaged").unlink()
    (top / "lib/penroot-package").rename(top / "lib/penroot")
    (top / "lib/penroot/PLUGINS").unlink()
    for path in tree.files(top):
        if NAMES.owns(f"usr/{path}"):
            (top / path).unlink()
    for program in (*top.glob("bin/*"), *top.glob("lib/penroot/libexec/*")):
        if not program.is_symlink():
            relocate(program, top)
    profile = top / "share/penroot/apparmor/penroot"
    profile.write_bytes((work / "source/configs/apparmor/penroot").read_bytes())
    tree.write_build(top, "tarball")
    tree.touch(top)
    return [pack(top, to / f"{name}.tar.xz")]


def relocate(program: Path, top: Path) -> None:
    """Change a launcher so that it finds the modules relative to its own path."""
    data = program.read_bytes()
    up = "/.." * len(program.relative_to(top).parts)
    new = rf'library = os.path.realpath(os.path.realpath(__file__) + "{up}/lib/penroot")'.encode()
    changed = re.sub(rb'^library = os.path.realpath\("/usr/lib/penroot"\)', new, data, flags=re.MULTILINE)
    if changed != data:
        program.write_bytes(changed)


def pack(top: Path, output: Path) -> Path:
    """Pack ``top`` reproducibly: sorted, owned by root, all files with the same time.

    The suffix of ``output`` selects xz or gzip.
    """

    def normalized(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mtime = place.epoch()
        return member

    paths = sorted([top, *(Path(directory, name) for directory, *names in os.walk(top) for name in sum(names, []))])
    uncompressed = output.with_suffix("")
    with tarfile.open(uncompressed, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in paths:
            archive.add(path, arcname=str(path.relative_to(top.parent)), recursive=False, filter=normalized)
    program = {".xz": ("xz", "-9", "--threads=1"), ".gz": ("gzip", "--best", "--no-name")}[output.suffix]
    run(*program, "--force", uncompressed)
    return output
