"""Fetch the vendored libraries: PyPI wheels with pinned hashes, for each supported Python.

    .venv/bin/python -m packages.vendored     # write vendored.txt: the newest versions that exist for every Python

pip reads vendored.txt: names, versions and hashes of all files. KEPT lists the files to install from each wheel. A
requirement in pyproject.toml without a row in KEPT is an error.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

from packages.place import CACHE, PROJECT, PackageError
from packages.target import TARGETS, Target

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# A wheel names the oldest glibc that it runs with. The newest in this list, 2.34, is as old as Linux 5.12 (both 2021).
PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_28", "manylinux_2_34")
PINNED = Path(__file__).with_name("vendored.txt")

# Files to install, by distribution. Extensions for several Pythons have different names in the same directory.
KEPT = {
    "asyncssh": ("asyncssh/*.py",),
    "cffi": ("_cffi_backend.*",),  # enough for a compiled cffi module
    "click": ("click/*.py",),
    "cryptography": ("cryptography/*.py", "cryptography/*.so"),
    "isal": ("isal/*.py", "isal/*.so"),
    "pyyaml": ("yaml/*.py", "yaml/*.so"),
    "tomli": ("tomli/*.py",),
    "typing-extensions": ("typing_extensions.py",),
    "urllib3": ("urllib3/*.py",),
    "zstandard": ("zstandard/__init__.py", "zstandard/backend_c.*"),
}
# Libraries whose wheel without compiled modules is enough: it is as fast for our files, and one wheel fits all Pythons.
PLAIN = ("tomli",)

# ABI tags of wheels that also fit later Pythons.
ANY = ("none", "abi3")


@dataclass(frozen=True)
class Wheel:
    """A wheel that was downloaded from PyPI."""

    path: Path
    sha256: str

    @property
    def name(self) -> str:
        return normal(self.path.name.split("-")[0])

    @property
    def version(self) -> str:
        return self.path.name.split("-")[1]

    def kept(self) -> Iterator[tuple[str, bytes, bool]]:
        """Yield name and content of each file in KEPT, and whether it is a compiled extension."""
        with zipfile.ZipFile(self.path) as archive:
            for name in sorted(archive.namelist()):
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in KEPT[self.name]) and "__pycache__" not in name:
                    yield name, archive.read(name), name.endswith(".so")

    def metadata(self) -> Message:
        return Parser().parsestr(self._inside("METADATA"))

    def licences(self) -> Iterator[tuple[str, str]]:
        """Yield (file name, text) of each licence."""
        with zipfile.ZipFile(self.path) as archive:
            for name in sorted(archive.namelist()):
                directory, _, file = name.partition(".dist-info/")
                if re.match(r"(licenses/.+|LICEN[CS]E|COPYING|NOTICE)", file) and not file.endswith("/"):
                    yield file.rpartition("/")[2], archive.read(name).decode()

    def _inside(self, file: str) -> str:
        with zipfile.ZipFile(self.path) as archive:
            (name,) = (n for n in archive.namelist() if re.fullmatch(rf"[^/]*\.dist-info/{file}", n))
            return archive.read(name).decode()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def wheels(machine: Target) -> list[Wheel]:
    """Return a machine's wheels of vendored.txt, sorted by name, version and Python. Download them if not cached."""
    text = PINNED.read_text()
    hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", text)
    directory = CACHE / "wheels" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-{machine.machine}"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as new:
            for python in PYTHONS:
                for plain in (False, True):
                    _download(new, machine, python, _requirements(text, plain=plain), "--require-hashes", plain=plain)
            os.rename(new, directory)
            os.mkdir(new)  # TemporaryDirectory removes it
    cached = [Wheel(path, sha256(path)) for path in sorted(directory.iterdir())]
    if changed := [wheel.path.name for wheel in cached if wheel.sha256 not in hashes]:
        raise PackageError(f"{' '.join(changed)}: hash not in {PINNED.name}, run: rm -r {directory}")
    if {wheel.name for wheel in cached} != set(KEPT):
        raise PackageError(f"{PINNED.name} and KEPT in packages/vendored.py name different distributions")
    return cached


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _requirements(text: str, *, plain: bool) -> list[str]:
    """With ``plain``, return the requirements of vendored.txt that are in PLAIN. Otherwise return all others."""
    lines = [line for line in text.replace("\\\n", "").splitlines() if line and not line.startswith("#")]
    return [line for line in lines if (line.partition("==")[0] in PLAIN) == plain]


def _download(
    to: str, target: Target, python: str, requirements: Iterable[str], *options: str, plain: bool = False
) -> None:
    """Download wheels for one machine and Python. Raises PackageError with pip's error."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements) + "\n")
        file.flush()
        platforms = (
            ["--platform=any"] if plain else [f"--platform={platform}_{target.machine}" for platform in PLATFORMS]
        )
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += [f"--python-version={python}", *platforms, *options, f"--dest={to}", f"--requirement={file.name}"]
        if plain:
            command += ["--implementation=py", "--abi=none"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise PackageError(f"{target.machine}, Python {python}: {done.stderr.strip()}")


def declared() -> dict[str, str]:
    """Return the requirements in pyproject.toml, without their markers, by name."""
    text = (PROJECT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|ssh|signatures|swarm) = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    requirements = [words.partition(";")[0].strip() for words in re.findall(r'"([^"]+)"', " ".join(lists))]
    return {normal(re.split(r"[<>=!~ \[]", words)[0]): words for words in requirements}


# Libraries in KEPT that pyproject.toml does not name, because only other libraries require them.
INDIRECT = ("typing-extensions",)


def refresh() -> str:
    """Return the text of vendored.txt with the newest versions that exist for every Python."""
    requirements = declared()
    if set(KEPT) != {*requirements, *INDIRECT}:
        mismatched = sorted(set(KEPT) ^ {*requirements, *INDIRECT})
        raise PackageError(f"KEPT and the dependencies in pyproject.toml differ: {mismatched}")
    text = "# Made by `python -m packages.vendored`: wheels that packages bring, for " + ", ".join(PYTHONS) + ".\n"
    with tempfile.TemporaryDirectory() as directory:
        for name in sorted(KEPT):
            version = _fetch(name, requirements.get(name, name), Path(directory, name))
            files = sorted(Path(directory, name).iterdir())
            hashes = "".join(f" \\\n    --hash=sha256:{sha256(path)}" for path in files)
            text += f"{name}=={version}{hashes}\n"
    return text


def _fetch(name: str, requirement: str, to: Path) -> str:
    """Download the wheels of one distribution for each machine and Python. Return their version."""
    for each in TARGETS.values():
        for python in PYTHONS:  # the first Python chooses the version: it is the oldest, with the fewest versions
            _download(str(to), each, python, [requirement], plain=name in PLAIN)
            versions = {Wheel(path, "").version for path in to.iterdir()}
            if len(versions) != 1:
                raise PackageError(f"{name}: more than one version: {sorted(versions)}")
            (version,) = versions
            requirement = f"{name}=={version}"
            fitting = [path.name for path in to.iterdir() if path.name.endswith(("any.whl", f"{each.machine}.whl"))]
            if any(f"-{abi}-" in file for abi in ANY for file in fitting):
                break  # the wheel for the oldest Python fits all Pythons
    return version


if __name__ == "__main__":
    try:
        PINNED.write_text(refresh())
    except PackageError as e:
        sys.exit(f"packages: {e}")
