"""Build the tree of all packages: the files of `make install PREFIX=/usr`, and the vendored libraries.

The source is a copy of the files that git does not ignore, always at the same path and with the time of the commit, so
that two builds of a commit are identical: tests/packages/test_reproducible.py compares two builds.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
import zipfile
from pathlib import Path

from packages import place, vendored
from packages.description import LIBRARY, Package, owner
from packages.library import archive_modules, remove_empty
from packages.place import CACHE, PROJECT, PackageError, run
from packages.target import PYTHON, Target, target, this_machine

# Each release of Slurm loads only plugins compiled for it. plugins() needs only the headers of one release.
SLURMS = ("22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11", "26.05")
HEADERS = Path("/usr/include/slurm")
# The platform with the newest glibc that our modules and the wheels need: see vendored.PLATFORMS.
WHEELS_FOR = "manylinux_2_34"
CONSTRAINTS = PROJECT / "packages/constraints.txt"
FLAGS = "-O2 -g0 -fPIC -ffile-prefix-map={source}=. -Wl,--build-id=none"
DOC = "usr/share/doc/penroot"
# Pages outside docs/ that pages of docs/ link to. They are installed at the same relative paths.
PAGES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "hooks/README.md"),
    *("packages/README.md", "packages/ansible/README.md", "c_shims/programs/README.md", "c_shims/spank/README.md"),
)


def checkout(to: Path) -> None:
    """Copy the files of the working tree that git does not ignore, with the time of the commit."""
    listed = run("git", "-C", PROJECT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if not (PROJECT / name).is_file():
            continue
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(PROJECT / name, to / name, follow_symlinks=False)
        os.chmod(to / name, 0o755 if os.access(to / name, os.X_OK) else 0o644)
    touch(to)


def touch(top: Path) -> None:
    """Set the time of all files to place.epoch(), and modes that do not depend on the umask."""
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            path = Path(directory, name)
            if not path.is_symlink():
                executable = path.is_dir() or path.stat().st_mode & 0o100
                path.chmod(0o755 if executable else 0o644)
            os.utime(path, (place.epoch(), place.epoch()), follow_symlinks=False)
    top.chmod(0o755)
    os.utime(top, (place.epoch(), place.epoch()))


def environment(source: Path) -> dict[str, str]:
    """Return the environment of a reproducible build."""
    return {
        "SOURCE_DATE_EPOCH": str(place.epoch()),
        "PENROOT_COMMIT": place.commit(),
        "CFLAGS": FLAGS.format(source=source),
        "LDFLAGS": "-Wl,--build-id=none",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PENROOT_BUILD": "wheel",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
    }


def builder() -> Path:
    """Return a Python with the packages of constraints.txt, which builds the wheel."""
    text = CONSTRAINTS.read_bytes()
    directory = CACHE / f"builder-{hashlib.sha256(text).hexdigest()[:8]}"
    if not directory.exists():
        new = directory.with_name(f"{directory.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        run(PYTHON, "-m", "venv", new)
        run(new / "bin/python", "-m", "pip", "install", "--quiet", "--requirement", CONSTRAINTS)
        new.rename(directory)
    return directory / "bin/python"


def wheel(source: Path, to: Path, machine: Target) -> Path:
    """Build our wheel for a machine. It fits any CPython from 3.10 on, since its C module uses the stable ABI."""
    words = ("setup.py", "--quiet", "bdist_wheel", f"--plat-name={WHEELS_FOR}_{machine.machine}", f"--dist-dir={to}")
    run(builder(), *words, cwd=source, **environment(source), **machine.compiler())
    shutil.rmtree(source / "build")
    (path,) = to.glob("penroot-*.whl")
    return path


def sdist(source: Path, work: Path) -> Path:
    """Make the directory of a source distribution with setup.py."""
    words = ("setup.py", "--quiet", "sdist", "--formats=tar", f"--dist-dir={work}")
    run(builder(), *words, cwd=source, **environment(source))
    (archive,) = work.glob("penroot-*.tar")
    run("tar", "--extract", "--file", archive, "--directory", work)
    directory = archive.with_suffix("")
    touch(directory)
    return directory


def library(to: Path, ours: Path, machine: Target) -> None:
    """Fill the directory of modules: ours from the wheel, and the libraries of vendored.txt."""
    with zipfile.ZipFile(ours) as archive:
        for name in archive.namelist():
            if ".dist-info/" not in name:
                put(to / name, archive.read(name))
    for each in vendored.wheels(machine):
        for name, data, compiled in each.kept():
            put(to / name, data, strip_for=machine if compiled else None)
    for path in sorted(to.rglob("*.so")):
        if path.parent.name == "base":
            machine.strip(path)
    archive_modules(to)
    remove_empty(to)


def put(path: Path, data: bytes, *, strip_for: Target | None = None) -> None:
    """Write a file. Raises PackageError if the file exists with other content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    if strip_for:
        strip_for.strip(new)
    if path.exists() and path.read_bytes() != new.read_bytes():
        raise PackageError(f"{path}: two wheels have this file with different content")
    new.rename(path)


def plugins(to: Path, modules: Path, source: Path, work: Path) -> None:
    """Compile spank_pyxis.so for each of SLURMS, with this machine's headers under the number of that release.

    All releases have the functions and enumerators that the plugin uses: a new release only adds enumerators at the
    end. tests/packages/test_reproducible.py compares the headers of each Debian.
    """
    code = "import sys; from pyxis_py.admin.cli import compile_plugin as c; c(*sys.argv[1:3], *sys.argv[3].split())"
    for release in SLURMS:
        include = work / f"include-{release}"
        headers(include, release)
        output = to / "plugins" / release / "spank_pyxis.so"
        output.parent.mkdir(parents=True)
        flags = FLAGS.format(source=source)
        compiler = {"CC": target().gcc, "PYTHONPATH": str(modules), "LC_ALL": "C.UTF-8"}
        run(PYTHON, "-c", code, output, include, flags, cwd=work, **compiler)
        target().strip(output)


def headers(to: Path, release: str) -> None:
    """Copy this machine's slurm/ headers, with the version number of the first version of ``release``."""
    if not (HEADERS / "spank.h").exists():
        raise PackageError(f"{HEADERS}/spank.h does not exist, run: apt-get install libslurm-dev")
    shutil.copytree(HEADERS, to / "slurm")
    year, month = map(int, release.split("."))
    path = to / "slurm/slurm_version.h"
    text = re.sub(r"(#define SLURM_VERSION_NUMBER) .*", rf"\1 {year << 16 | month << 8:#x}", path.read_text())
    path.write_text(text)


def install_programs(source: Path, to: Path, modules: Path) -> None:
    """Install programs, manual pages, completion and AppArmor profile, also under enroot's names."""
    words = ["make", "--silent", "PYTHON=" + PYTHON, "PREFIX=/usr", f"DESTDIR={to}", f"NEW={to / LIBRARY}"]
    words += [f"MODULES={modules}", *target().programs()]
    environ = environment(source)
    del environ["CFLAGS"], environ["LDFLAGS"]
    run(*words, "libexec", "around", "enroot-names", cwd=source, **environ)


def documents(source: Path, to: Path) -> None:
    """Install licences, SBOM, PAGES, docs/ and examples/."""
    from packages import sbom

    put(to / DOC / "copyright", sbom.copyright().encode())
    put(to / DOC / "sbom.cdx.json", sbom.text().encode())
    for name in PAGES:
        put(to / DOC / name, (source / name).read_bytes())
    for name in ("docs", "examples"):
        shutil.copytree(source / name, to / DOC / name)


def build(work: Path) -> Path:
    """Build the source, the wheel and the tree in the empty directory ``work``. Return the tree.

    Raises PackageError.
    """
    source, tree = work / "source", work / "tree"
    checkout(source)
    library(tree / LIBRARY, wheel(source, work, target()), target())
    modules = tree / LIBRARY
    if target().foreign:  # this machine's modules write headers and manual pages
        modules = work / "native"
        library(modules, wheel(source, work / "native-wheel", this_machine()), this_machine())
    plugins(tree / LIBRARY, modules, source, work)
    put(tree / LIBRARY / "PLUGINS", b"")  # write_build() fills this file
    install_programs(source, tree, modules)
    documents(source, tree)
    put(tree / "usr/lib/tmpfiles.d/penroot.conf", (source / "packages/files/tmpfiles.conf").read_bytes())
    setup = tree / "usr/libexec/penroot/packaged"
    put(setup, (source / "packages/scripts/packaged").read_bytes())
    setup.chmod(0o755)
    for directory in list(tree.rglob("__pycache__")):
        shutil.rmtree(directory)
    for page in (tree / "usr/share/man").rglob("*.[0-9]"):
        compress(page)
    touch(tree)
    return tree


def compress(page: Path) -> None:
    """Compress a manual page reproducibly, or rename a link to one."""
    if page.is_symlink():
        page.with_name(page.name + ".gz").symlink_to(os.readlink(page) + ".gz")
        page.unlink()
    else:
        subprocess.run(["gzip", "--best", "--no-name", str(page)], check=True)


def part(package: Package, tree: Path, to: Path, kind: str) -> Path:
    """Copy the files of one package, to be packed as ``kind``."""
    to.mkdir(parents=True)
    for name in files(tree):
        if owner(name) is package:
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, to / name, follow_symlinks=False)
    write_build(to, kind)
    return to


def write_build(tree: Path, kind: str) -> None:
    """Write commit, date and kind to BUILD, for `penroot --version`, and to PLUGINS, for scripts/packaged."""
    date = time.strftime("%Y-%m-%d", time.gmtime(place.epoch()))
    for path in (*tree.glob("**/enroot_py/BUILD"), *tree.glob("**/PLUGINS")):
        path.write_text(f"{place.commit()} {date} {kind}\n")


def files(tree: Path) -> list[str]:
    """List the files and links of a tree, sorted, without a leading slash."""
    paths = [Path(directory, name) for directory, _, names in os.walk(tree) for name in names]
    paths += [path for path in tree.rglob("*") if path.is_symlink() and path.is_dir()]
    return sorted({str(path.relative_to(tree)) for path in paths})


def work_directory(version: str) -> Path:
    """Return the work directory of a version. The path is constant, because some programs record it."""
    return CACHE / "work" / hashlib.sha256(f"{PROJECT} {version}".encode()).hexdigest()[:8]
