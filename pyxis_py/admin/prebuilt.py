"""Plugins that came with a package, one for each release of Slurm: LIBRARY/plugins/RELEASE/spank_pyxis.so.

Slurm loads a plugin of its own year and month alone. The one in use is a link beside the packages; what an admin has
compiled is a file in its place.
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
_PATIENCE = 10  # seconds with a program of Slurm: without a slurm.conf, or a slurmctld, each tries for a minute


def built_for(plugin: str) -> int | None:
    """The SLURM_VERSION_NUMBER of the headers that a plugin was built with. Raises OSError."""
    with open(plugin, "rb") as file:
        mark = re.search(_MARK, file.read())
    return int(mark[1], 16) if mark else None


def installed() -> str:
    """The version of the Slurm on this machine, as 22.05.8; empty where there is none.

    Raises PenrootError where none tells it: before it does, srun wants a slurm.conf, and slurmd does not.
    """
    error = None
    for program in ("slurmd", "srun"):
        path = shutil.which(program) or shutil.which(program, path=f"{SBIN}:/opt/slurm/sbin")
        if path:
            try:
                return Program([path, "-V"], timeout=_PATIENCE).run().split()[-1]
            except PenrootError as e:
                error = e
    if error:
        raise error
    return ""


def release_of(version: str) -> str:
    """Of 24.11.5, or of 24.11.0-0rc1, what a plugin has to match."""
    return ".".join(re.findall(r"\d+", version)[:2])


def releases(library: str) -> list[str]:
    """Those for which a plugin is there, the oldest first."""
    try:
        return sorted(os.listdir(f"{library}/plugins"))
    except FileNotFoundError:
        return []


def take(library: str) -> str | None:
    """Have LIBRARY/spank_pyxis.so be the plugin for this machine's Slurm; its release, or None where none came.

    A file that an admin has compiled for this Slurm stays. Raises PenrootError where Slurm does not tell its version.
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
    """take(), and say in one line what it came to: for the scripts of packages."""
    release = take(library)
    version = installed()
    if release:
        log.info(f"the plugin is that for Slurm {release}")
    elif version:
        came = ", ".join(releases(library)) or "none"
        log.error(f"Slurm {version} has no prebuilt plugin; there are plugins for {came}")
        log.hint(f"with gcc and slurm/spank.h: pyxis-py build --output {versions.link(library)}/{PLUGIN}")
    else:
        log.info("Slurm is not installed on this machine; the plugin is chosen when there is")


def _take_interpreter(library: str) -> None:
    """Let the plugin run what runs this: LIBRARY/python3, which a plugin that came has in place of a path."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    system = ("/usr/bin/python3", f"/usr/bin/python{version}")
    python = next((path for path in system if _same(path, sys.executable)), sys.executable)
    if not os.path.isabs(python):
        raise ConfigError(f"{python or 'the interpreter'} is no absolute path", hint="run this by an absolute path")
    _link(python, f"{library}/python3")


def _same(path: str, other: str) -> bool:
    return os.path.exists(path) and os.path.realpath(path) == os.path.realpath(other)


def _link(to: str, path: str) -> None:
    """At once: a step may begin in this moment."""
    if os.path.islink(path) and os.readlink(path) == to:
        return
    making.symlink(to, path)
