"""The machine that packages are for: this machine, or ARCH in the environment, with a cross compiler of Debian."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from packages import debs
from packages.place import CACHE, PackageError, run

# Debian's Python: a Python earlier in PATH may have any version.
PYTHON = "/usr/bin/python3"


@dataclass(frozen=True)
class Target:
    """An architecture: ``debian`` is its name in dpkg(1) and OCI images, ``machine`` in uname(2), rpm(8) and wheels."""

    debian: str
    machine: str

    @property
    def foreign(self) -> bool:
        return self.machine != os.uname().machine

    @property
    def gcc(self) -> str:
        """Return the C compiler."""
        return f"{self.toolchain()}/usr/bin/{self.triplet}-gcc-{gcc_version()}" if self.foreign else "gcc"

    @property
    def triplet(self) -> str:
        return f"{self.machine}-linux-gnu"

    def binutils(self, name: str) -> str:
        return f"{self.triplet}-{name}" if self.foreign else name

    def strip(self, path: Path) -> None:
        run(self.binutils("strip"), "--strip-unneeded", path)

    def compiler(self) -> dict[str, str]:
        """Return the variables with which setuptools compiles a module for this target."""
        return {"CC": f"{self.gcc} -I{self.toolchain()}/usr/include"} if self.foreign else {}

    def programs(self) -> list[str]:
        """Return the variables with which c_shims/programs/Makefile compiles static programs for this target."""
        if not self.foreign:
            return []
        specs = f"{self.toolchain()}/usr/lib/{self.machine}-linux-musl/musl-gcc.specs"
        kernel = f"{self.toolchain()}/usr/{self.triplet}/include"
        return [f"CC={self.gcc} -specs={specs}", f"SYSTEM=-idirafter {kernel}"]

    def toolchain(self) -> Path:
        """Return a directory with Debian's cross compiler, musl, and pyconfig.h for the target and this Python version.

        We unpack these packages instead of installing them: Debian's gcc-multilib conflicts with each cross compiler.
        """
        if not shutil.which(self.binutils("strip")):
            raise PackageError(f"no binutils for {self.machine}, run: tests/prerequisites cross")
        gcc, python = gcc_version(), run(PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
        directory = CACHE / f"toolchain-{self.debian}-gcc{gcc}-python{python}"
        if not directory.exists():
            suffix, cross = self.triplet.replace("_", "-"), f"{self.debian}-cross"
            tools = [f"{name}-{gcc}-{suffix}" for name in ("gcc", "cpp")]
            libraries = [f"{name}-{cross}" for name in ("libc6", "libc6-dev", "libgcc-s1", f"libgcc-{gcc}-dev")]
            CACHE.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=CACHE) as new:
                root = Path(new, "root")
                debs.unpack(root, *tools, *libraries, f"linux-libc-dev-{cross}")
                debs.unpack(root, "musl-dev", f"libpython{python}-dev", architecture=self.debian)
                for pattern in ("lib/*/musl-gcc.specs", "*-linux-gnu/lib/libc.so"):  # texts with absolute paths
                    (text,) = (root / "usr").glob(pattern)
                    text.write_text(text.read_text().replace("/usr/", f"{directory}/usr/"))
                (root / f"usr/{self.triplet}/bin").symlink_to(f"/usr/{self.triplet}/bin")  # the installed binutils
                root.rename(directory)
        return directory


TARGETS = {each.debian: each for each in (Target("amd64", "x86_64"), Target("arm64", "aarch64"))}


def target() -> Target:
    """Return the target that ARCH names, by default this machine. Raises PackageError if there is none."""
    name = os.environ.get("ARCH")
    matching = [each for each in TARGETS.values() if (each.debian == name if name else not each.foreign)]
    if not matching:
        raise PackageError(f"ARCH={name or os.uname().machine}: not one of {', '.join(TARGETS)}")
    return matching[0]


def this_machine() -> Target:
    return next(each for each in TARGETS.values() if not each.foreign)


def gcc_version() -> str:
    return run("gcc", "-dumpversion").strip()
