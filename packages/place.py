"""Facts that all modules of the build share: the directories, the version, the commit, and the time of all files."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

PROJECT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("PENROOT_PACKAGES") or "/var/cache/penroot-packages")


class PackageError(Exception):
    """The build failed."""


def run(*command: str | Path, cwd: Path | None = None, **environ: str) -> str:
    """Run a program and return its stdout. Raises PackageError with the last lines of its output."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise PackageError(f"{' '.join(words)}: exit status {done.returncode}\n{tail}")
    return done.stdout


def version() -> str:
    """Return the version in Python's spelling: 1.0.0rc1."""
    match = re.search(r'^__version__ = "([^"]+)"', (PROJECT / "enroot_py/__init__.py").read_text(), re.MULTILINE)
    assert match
    return match[1]


def packaged_version() -> str:
    """Return the version in dpkg's and rpm's spelling: they sort 1.0.0~rc1 before 1.0.0."""
    return re.sub(r"(a|b|rc)(\d+)$", r"~\1\2", version())


@functools.cache
def commit() -> str:
    """Return the commit of the working tree, with a plus if the tree has changes."""
    short = run("git", "-C", PROJECT, "rev-parse", "--short=12", "HEAD").strip()
    changed = run("git", "-C", PROJECT, "status", "--porcelain", "--untracked-files=no").strip()
    return short + ("+" if changed else "")


@functools.cache
def epoch() -> int:
    """Return the time of all files, in seconds since 1970: SOURCE_DATE_EPOCH or the time of the commit."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    return int(seconds or run("git", "-C", PROJECT, "log", "-1", "--format=%ct"))
