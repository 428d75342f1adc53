"""Where packages are made, and what all of it has to know: the version, the commit, and the time that files have."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

PROJECT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("PENROOT_PACKAGES") or "/var/cache/penroot-packages")
ARCHITECTURE = "x86_64"


class PackageError(Exception):
    """A package cannot be made; the message says what was tried."""


def run(*command: str | Path, cwd: Path | None = None, **environ: str) -> str:
    """What a program writes to stdout. Raises PackageError with its last words."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise PackageError(f"{' '.join(words)}: exit status {done.returncode}\n{tail}")
    return done.stdout


def version() -> str:
    """As Python spells it: 1.0.0rc1."""
    found = re.search(r'^__version__ = "([^"]+)"', (PROJECT / "enroot_py/__init__.py").read_text(), re.MULTILINE)
    assert found
    return found[1]


def packaged_version() -> str:
    """As dpkg and rpm order it: 1.0.0~rc1 comes before 1.0.0."""
    return re.sub(r"(a|b|rc)(\d+)$", r"~\1\2", version())


@functools.cache
def commit() -> str:
    """What the packages are made of; with a plus where the working tree has changes."""
    short = run("git", "-C", PROJECT, "rev-parse", "--short=12", "HEAD").strip()
    changed = run("git", "-C", PROJECT, "status", "--porcelain", "--untracked-files=no").strip()
    return short + ("+" if changed else "")


@functools.cache
def epoch() -> int:
    """Seconds since 1970 that every file has: the commit's, or those that SOURCE_DATE_EPOCH says."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return int(given or run("git", "-C", PROJECT, "log", "-1", "--format=%ct"))
