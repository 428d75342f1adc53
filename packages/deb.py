"""Build Debian packages with dpkg-deb(1): a directory with files and DEBIAN/ for each row of description.py."""

from __future__ import annotations

import gzip
import hashlib
import textwrap
from collections.abc import Sequence
from pathlib import Path

from packages import place, tree
from packages.description import MAINTAINER, PACKAGES, SETUP, Package
from packages.place import run
from packages.target import target

SCRIPT = """\
#!/bin/sh
set -e
case "$1" in
{cases}) {command} ;;
esac
"""
INSTALLED = "configure | triggered | abort-upgrade | abort-remove | abort-deconfigure"


def build(root: Path, work: Path, to: Path) -> list[Path]:
    return [build_package(package, root, work, to) for package in PACKAGES]


def build_package(package: Package, root: Path, work: Path, to: Path) -> Path:
    files = tree.part(package, root, work / "deb" / package.name, "deb")
    for name, content in documents(package).items():
        tree.put(files / name, content)
    tree.touch(files)
    control = files / "DEBIAN"
    size = sum(path.lstat().st_size for path in files.rglob("*") if path.is_file()) // 1024
    control.mkdir()
    sums = [f"{digest(files / name)}  {name}\n" for name in tree.files(files) if not (files / name).is_symlink()]
    (control / "md5sums").write_text("".join(sums))
    (control / "control").write_text(control_file(package, size))
    for name, text in scripts(package).items():
        (control / name).write_text(text)
        (control / name).chmod(0o755)
    if package.watches:
        (control / "triggers").write_text("".join(f"interest-noawait {path}\n" for path in package.watches))
    output = to / f"{package.name}_{place.packaged_version()}_{architecture(package)}.deb"
    options = ("--root-owner-group", "-Zxz", "--threads-max=1")
    run("dpkg-deb", *options, "--build", files, output, SOURCE_DATE_EPOCH=str(place.epoch()), LC_ALL="C.UTF-8")
    return output


def architecture(package: Package) -> str:
    return target().debian if package.native else "all"


def digest(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def control_file(package: Package, size: int) -> str:
    fields = {
        "Package": package.name,
        "Version": place.packaged_version(),
        "Architecture": architecture(package),
        "Maintainer": MAINTAINER,
        "Installed-Size": str(size),
        **{name: value.format(version=place.packaged_version()) for name, value in package.deb.items()},
        "Section": "admin",
        "Priority": "optional",
    }
    body = textwrap.indent(package.text, " ")
    return "".join(f"{name}: {value}\n" for name, value in fields.items()) + f"Description: {package.summary}\n{body}\n"


def scripts(package: Package) -> dict[str, str]:
    """Return postinst and prerm, if the package has actions."""
    if not package.setup_arguments:
        return {}
    return {
        "postinst": SCRIPT.format(cases=INSTALLED, command=f"{SETUP} {package.setup_arguments}"),
        "prerm": SCRIPT.format(cases="remove", command=f"{SETUP} remove {package.setup_arguments}"),
    }


def documents(package: Package) -> dict[str, bytes]:
    """Return the documentation that Debian's policy requires in each package."""
    directory = f"usr/share/doc/{package.name}"
    date = run("date", "--utc", "--rfc-email", f"--date=@{place.epoch()}", LC_ALL="C").strip()
    entry = f"""\
penroot ({place.packaged_version()}) stable; urgency=medium

  * Commit {place.commit()}; CHANGELOG.md of penroot lists the changes.

 -- {MAINTAINER}  {date}
"""
    texts = {f"{directory}/changelog.gz": gzip.compress(entry.encode(), mtime=0)}
    if package.name != "penroot":
        from packages import sbom

        texts[f"{directory}/copyright"] = sbom.copyright().encode()
    if lines := overrides(package):
        texts[f"usr/share/lintian/overrides/{package.name}"] = "".join(f"{line}\n" for line in lines).encode()
    return texts


def overrides(package: Package) -> Sequence[str]:
    """Return the lintian(1) overrides of a package. The line above an override is its reason."""
    path = Path(__file__).with_name("files") / f"{package.name}.lintian-overrides"
    return path.read_text().splitlines() if path.exists() else ()
