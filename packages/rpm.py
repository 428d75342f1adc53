"""Build RPMs with rpmbuild(8) from one spec file, which is written from the table in description.py."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from packages import place, tree
from packages.description import LICENCE, MAINTAINER, PACKAGES, SETUP, Package
from packages.place import run
from packages.target import target

# Directories that belong to filesystem.rpm and other packages, not to ours.
SHARED = {"usr", "usr/bin", "usr/lib", "usr/libexec", "usr/lib/tmpfiles.d", "usr/share", "usr/share/doc"}
SHARED |= {f"usr/share/man{kind}" for kind in ("", "/man1", "/man5", "/man7")}
SHARED |= {f"usr/share/bash-completion{kind}" for kind in ("", "/completions")}
# Leave the files as they are, and make builds reproducible.
MACROS = {
    "_buildhost": "localhost",
    "_binary_payload": "w9.xzdio",
    "_build_id_links": "none",
    "__os_install_post": "%{nil}",
    "debug_package": "%{nil}",
    "clamp_mtime_to_source_date_epoch": "1",
    "use_source_date_epoch_as_buildtime": "1",
    "_build_name_fmt": "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm",
}


def build(root: Path, work: Path, to: Path) -> list[Path]:
    return pack(written(root, work / "rpm"), to)


def written(root: Path, top: Path) -> Path:
    """Write the spec file to ``top``, and the files that it packs to ``top``/files."""
    whole = top / "files"
    parts = {package.name: tree.part(package, root, top / package.name, "rpm") for package in PACKAGES}
    for part in parts.values():
        shutil.copytree(part, whole, dirs_exist_ok=True, symlinks=True)
    tree.touch(whole)
    sections = [section(package, parts[package.name]) for package in sorted(PACKAGES, key=lambda each: each.name)]
    spec = top / "penroot.spec"
    spec.write_text(preamble(whole) + "\n".join(sections) + changes())
    return spec


def pack(spec: Path, to: Path) -> list[Path]:
    """Build the packages of a spec file with rpmbuild(8)."""
    top = spec.parent
    macros = [word for name, value in MACROS.items() for word in ("--define", f"{name} {value}")]
    macros += ["--define", f"_topdir {top}/build", "--define", f"_rpmdir {top}/made"]
    words = "-bb", "--quiet", "--target", target().machine, *macros, str(spec)
    run("rpmbuild", *words, SOURCE_DATE_EPOCH=str(place.epoch()), LC_ALL="C.UTF-8", TZ="UTC", HOME=str(top))
    made = sorted((top / "made").glob("*.rpm"))
    return [Path(shutil.move(path, to / path.name)) for path in made]


def preamble(whole: Path) -> str:
    return f"""\
Name: penroot-packages
Version: {place.packaged_version()}
Release: 1
Summary: the source of penroot's packages
License: {LICENCE}
AutoReqProv: no

%description
The spec file builds only the packages below.

%install
cp -a {whole}/. %{{buildroot}}/

"""


def section(package: Package, files: Path) -> str:
    name = package.name
    relations = "".join(
        f"{field}: {value.format(version=place.packaged_version())}\n" for field, value in package.rpm.items()
    )
    arch = "" if package.native else "BuildArch: noarch\n"
    text = f"""\
%package -n {name}
Summary: {package.summary[0].upper()}{package.summary[1:]}
Group: System/Management
Packager: {MAINTAINER}
AutoReqProv: no
{arch}{relations}
%description -n {name}
{package.text}

%files -n {name}
%defattr(-,root,root,-)
{listed(files)}
"""
    if arguments := package.setup_arguments:
        text += f"%posttrans -n {name}\n{SETUP} {arguments}\n\n"  # after all files of the transaction are installed
        text += f'%preun -n {name}\nif [ "$1" = 0 ]; then {SETUP} remove {arguments}; fi\n\n'
        text += trigger(package) if package.watches else ""
    return text


def trigger(package: Package) -> str:
    """Return the trigger for scripts/packaged. It fires after a transaction with a watched file or the package itself.

    rpm(8) can watch only directories. It passes the changed files in them to the trigger's script on stdin.
    """
    directories = sorted({os.path.dirname(path) for path in package.watches})
    patterns = " ".join(f"-e ^{path}" for path in package.watches)
    return f"""\
%transfiletriggerin -n {package.name} -- {" ".join(directories)}
if [ "$(grep -c {patterns})" != 0 ]; then {SETUP} {package.setup_arguments} again; fi

"""


def listed(files: Path) -> str:
    """List the paths of a package, with rpm's directive for directories, licences and documentation."""
    lines = []
    for directory, names, _ in os.walk(files):
        inside = [os.path.relpath(os.path.join(directory, name), files) for name in names]
        lines += [f"%dir /{path}" for path in inside if path not in SHARED]
    for path in tree.files(files):
        kind = "%license " if path.endswith("/copyright") else "%doc " if path.startswith("usr/share/doc/") else ""
        lines.append(f"{kind}/{path}")
    return "\n".join(sorted(lines)) + "\n"


def changes() -> str:
    date = time.strftime("%a %b %d %Y", time.gmtime(place.epoch()))
    return f"%changelog\n* {date} {MAINTAINER} - {place.packaged_version()}-1\n- Commit {place.commit()}\n"
