"""Select a package's prebuilt plugin for the release of Slurm: LIBRARY/plugins/RELEASE/spank_pyxis.so.

Slurm loads only a plugin that was built for its own release (year and month). LIBRARY/spank_pyxis.so is a link to the
prebuilt plugin in use, or a file that an admin compiled.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys

from enroot_py.base import log, making, versions
from enroot_py.base.errors import ConfigError, PenrootError
from enroot_py.base.run import SBIN, Program
from pyxis_py.request.settings import PLUGIN

_MARK = rb"penroot plugin for Slurm 0x([0-9a-f]+)"
_TIMEOUT_S = 10  # a Slurm program without a slurm.conf or a slurmctld retries for a minute


def built_for(plugin: str) -> int | None:
    """Return the SLURM_VERSION_NUMBER that a plugin was built for. Raises OSError."""
    with open(plugin, "rb") as file:
        mark = re.search(_MARK, file.read())
    return int(mark[1], 16) if mark else None


def installed() -> str:
    """Return the version of Slurm on this machine, such as 22.05.8, or "" if Slurm is not installed.

    Asks slurmd before srun, because srun -V needs a slurm.conf. Raises PenrootError if both fail.
    """
    error = None
    for program in ("slurmd", "srun"):
        path = shutil.which(program) or shutil.which(program, path=f"{SBIN}:/opt/slurm/sbin")
        if path:
            try:
                return Program([path, "-V"], timeout=_TIMEOUT_S).run().split()[-1]
            except PenrootError as e:
                error = e
    if error:
        raise error
    return ""


def release_of(version: str) -> str:
    """Return the release that a plugin must match: 24.11 for 24.11.5 or 24.11.0-0rc1."""
    return ".".join(re.findall(r"\d+", version)[:2])


def releases(library: str) -> list[str]:
    """Return the Slurm releases that have a prebuilt plugin, the oldest first."""
    try:
        return sorted(os.listdir(f"{library}/plugins"))
    except FileNotFoundError:
        return []


def take(library: str) -> str | None:
    """Link LIBRARY/spank_pyxis.so to the prebuilt plugin for this Slurm. Return its release, or None if there is none.

    A file that an admin compiled for this release stays. Raises PenrootError if the version of Slurm is unknown.
    """
    plugin = f"{library}/{PLUGIN}"
    _take_interpreter(library)
    release = release_of(installed())
    if not release or release not in releases(library):
        return None
    if not os.path.islink(plugin) and _is_for(plugin, release):
        return release
    _link(f"plugins/{release}/{PLUGIN}", plugin)
    return release


def _is_for(plugin: str, release: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        number = built_for(plugin)
        return number is not None and f"{number >> 16}.{number >> 8 & 0xFF:02}" == release
    return False


def choose(library: str) -> None:
    """Select the prebuilt plugin and print the result, for package scripts."""
    release = take(library)
    version = installed()
    if release:
        log.info(f"selected the plugin for Slurm {release}")
    elif version:
        available = ", ".join(releases(library)) or "none"
        log.error(f"Slurm {version} has no prebuilt plugin; there are plugins for {available}")
        log.hint(f"with gcc and slurm/spank.h: pyxis-py build --output {versions.link(library)}/{PLUGIN}")
    else:
        log.info("Slurm is not installed on this machine; installing Slurm selects the plugin")


def _take_interpreter(library: str) -> None:
    """Link LIBRARY/python3, which prebuilt plugins run, to the interpreter of this process."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    system = ("/usr/bin/python3", f"/usr/bin/python{version}")
    python = next((path for path in system if _same(path, sys.executable)), sys.executable)
    if not os.path.isabs(python):
        raise ConfigError(
            f"{python or 'the interpreter'} is not an absolute path", hint="run pyxis-py by its absolute path"
        )
    _link(python, f"{library}/python3")


def _same(path: str, other: str) -> bool:
    return os.path.exists(path) and os.path.realpath(path) == os.path.realpath(other)


def _link(to: str, path: str) -> None:
    """Replace a link atomically: a step may start at any moment."""
    if os.path.islink(path) and os.readlink(path) == to:
        return
    making.symlink(to, path)
