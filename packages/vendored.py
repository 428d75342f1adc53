"""What others made and our packages bring: wheels of PyPI with pinned hashes, for each Python that there may be.

    .venv/bin/python -m packages.vendored     # the newest of each that every Python has, into vendored.txt

vendored.txt is what pip reads: names, versions and hashes of files, none of which comes without its hash. What is
taken of a wheel says KEPT; what pyproject.toml asks for and has no row there fails.
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

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# Of glibc; a wheel says the oldest that it runs with, and the newest of these is as old as Linux 5.12's.
PLATFORMS = [f"manylinux{name}_x86_64" for name in ("2014", "_2_17", "_2_28", "_2_34")]
PINNED = Path(__file__).with_name("vendored.txt")

# By distribution: what of its wheel is installed. Extensions of several Pythons lie side by side under their own names.
KEPT = {
    "asyncssh": ("asyncssh/*.py",),
    "cffi": ("_cffi_backend.*",),  # all that a module it has made needs
    "click": ("click/*.py",),
    "cryptography": ("cryptography/*.py", "cryptography/*.so"),
    "isal": ("isal/*.py", "isal/*.so"),
    "pyyaml": ("yaml/*.py", "yaml/*.so"),
    "tomli": ("tomli/*.py",),
    "typing-extensions": ("typing_extensions.py",),
    "urllib3": ("urllib3/*.py",),
    "zstandard": ("zstandard/__init__.py", "zstandard/backend_c.*"),
}
# Compiled ones are as quick as those without, for what we read with them, and there are five of each.
PLAIN = ("tomli",)

# Of wheels that are for a Python and all that come after it: those without C, and of the stable interface.
ANY = ("none", "abi3")


@dataclass(frozen=True)
class Wheel:
    """A file of PyPI, fetched."""

    path: Path
    sha256: str

    @property
    def name(self) -> str:
        return normal(self.path.name.split("-")[0])

    @property
    def version(self) -> str:
        return self.path.name.split("-")[1]

    def kept(self) -> Iterator[tuple[str, bytes, bool]]:
        """Each file that is installed: its name, its bytes, and whether it is a program or an extension."""
        with zipfile.ZipFile(self.path) as archive:
            for name in sorted(archive.namelist()):
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in KEPT[self.name]) and "__pycache__" not in name:
                    yield name, archive.read(name), name.endswith(".so")

    def metadata(self) -> Message:
        return Parser().parsestr(self._inside("METADATA"))

    def licences(self) -> Iterator[tuple[str, str]]:
        """The texts under which it may be given on, by their names."""
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
def wheels() -> list[Wheel]:
    """All that vendored.txt names, from the cache or fetched; by name, version and Python."""
    text = PINNED.read_text()
    hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", text)
    place = CACHE / "wheels" / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as new:
            for python in PYTHONS:
                for plain in (False, True):
                    _download(new, python, _requirements(text, plain=plain), "--require-hashes", plain=plain)
            os.rename(new, place)
            os.mkdir(new)
    found = [Wheel(path, sha256(path)) for path in sorted(place.iterdir())]
    if strangers := [wheel.path.name for wheel in found if wheel.sha256 not in hashes]:
        raise PackageError(f"{place}: not as {PINNED.name} says: {' '.join(strangers)}; remove that directory")
    if {wheel.name for wheel in found} != set(KEPT):
        raise PackageError(f"{PINNED.name} and KEPT of packages/vendored.py name other distributions")
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _requirements(text: str, *, plain: bool) -> list[str]:
    """The lines of vendored.txt that are fetched in one way, each requirement in one."""
    lines = [line for line in text.replace("\\\n", "").splitlines() if line and not line.startswith("#")]
    return [line for line in lines if (line.partition("==")[0] in PLAIN) == plain]


def _download(to: str, python: str, requirements: Iterable[str], *options: str, plain: bool = False) -> None:
    """Raises PackageError with pip's last words."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements) + "\n")
        file.flush()
        platforms = ["--platform=any"] if plain else [f"--platform={platform}" for platform in PLATFORMS]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += [f"--python-version={python}", *platforms, *options, f"--dest={to}", f"--requirement={file.name}"]
        if plain:
            command += ["--implementation=py", "--abi=none"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise PackageError(f"Python {python}: {done.stderr.strip()}")


def declared() -> dict[str, str]:
    """Return what pyproject.toml says the product and its features need: a requirement without its marker, by name."""
    text = (PROJECT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|ssh|signatures|swarm) = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    found = [words.partition(";")[0].strip() for words in re.findall(r'"([^"]+)"', " ".join(lists))]
    return {normal(re.split(r"[<>=!~ \[]", words)[0]): words for words in found}


# Of our dependencies, for what KEPT has.
INDIRECT = ("typing-extensions",)


def refresh() -> str:
    """The text of vendored.txt with the newest of each distribution that every Python has."""
    wanted = declared()
    if set(KEPT) != {*wanted, *INDIRECT}:
        raise PackageError(f"no row in KEPT, or no dependency: {sorted(set(KEPT) ^ {*wanted, *INDIRECT})}")
    text = "# Made by `python -m packages.vendored`: wheels that packages bring, for " + ", ".join(PYTHONS) + ".\n"
    with tempfile.TemporaryDirectory() as place:
        for name in sorted(KEPT):
            version = ""
            for python in PYTHONS:  # the oldest has the fewest to choose from
                asked = f"{name}=={version}" if version else wanted.get(name, name)
                _download(f"{place}/{name}", python, [asked], plain=name in PLAIN)
                found = {Wheel(path, "").version for path in Path(place, name).iterdir()}
                if len(found) != 1:
                    raise PackageError(f"{name}: {sorted(found)}")
                (version,) = found
                if any(f"-{kind}-" in path.name for kind in ANY for path in Path(place, name).iterdir()):
                    break  # what the oldest loads, all do; and of two for any they would be of one name
            files = sorted(Path(place, name).iterdir())
            hashes = "".join(f" \\\n    --hash=sha256:{sha256(path)}" for path in files)
            text += f"{name}=={version}{hashes}\n"
    return text


if __name__ == "__main__":
    try:
        PINNED.write_text(refresh())
    except PackageError as e:
        sys.exit(f"packages: {e}")
