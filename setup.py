"""The parts of the build that pyproject.toml cannot describe: the cffi module, and BUILD with the commit."""

from __future__ import annotations

import os
import subprocess
import time

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

BUILD = "enroot_py/BUILD"


def build() -> str:
    """Return "COMMIT DATE KIND" from the environment, from BUILD of a source distribution, or from git."""
    kind = os.environ.get("PENROOT_BUILD", "pip")
    if commit := os.environ.get("PENROOT_COMMIT"):
        date = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"])))
    elif os.path.exists(BUILD):
        with open(BUILD) as file:
            commit, date, _ = file.read().split(" ", 2)
    else:
        command = ["git", "log", "-1", "--format=%h %cd", "--abbrev=12", "--date=format:%Y-%m-%d"]
        done = subprocess.run(command, capture_output=True, text=True) if os.path.exists(".git") else None
        commit, date = done.stdout.split() if done and done.returncode == 0 else ("unknown", "unknown")
    return f"{commit} {date} {kind}\n"


class Modules(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            with open(os.path.join(self.build_lib, BUILD), "w") as file:
                file.write(build())


class Extensions(build_ext):
    """Allow an editable install without a compiler: linters and unit tests do not need the C module."""

    def run(self) -> None:
        for extension in self.extensions if self.editable_mode else ():
            extension.optional = True
        super().run()


class Source(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        with open(os.path.join(base_dir, BUILD), "w") as file:
            file.write(build())


setup(
    cffi_modules=["c_shims/linux_build.py:ffibuilder"],
    cmdclass={"build_ext": Extensions, "build_py": Modules, "sdist": Source},
)
