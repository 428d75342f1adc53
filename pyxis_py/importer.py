"""The site's own importer: ``importer=`` of plugstack.conf names a program.

``PROGRAM get URI`` prints the absolute path of a squashfs file, which stays
until ``PROGRAM release``; that may be called more than once for a step.
"""

from __future__ import annotations

import os

from enroot_py.base import log, run
from enroot_py.base.errors import ImageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyxis_py.settings import PluginSettings


def get(plugin: PluginSettings, host: Mapping[str, str], uri: str) -> str:
    """The squashfs file of an image. Raises ImageError."""
    command = [plugin.importer, "get", uri]
    try:
        lines = run.Program(command, error=ImageError, environ=_environ(host)).run().splitlines()
    except ImageError:
        release(plugin, host)
        raise
    if len(lines) != 1 or not lines[0].startswith("/") or not os.path.isfile(lines[0]):
        release(plugin, host)
        raise ImageError(f"{plugin.importer} get {uri} printed {lines!r}", hint="it must be the path of a file")
    return lines[0]


def release(plugin: PluginSettings, host: Mapping[str, str]) -> None:
    """The file is not needed any more. That a release fails is for the administrator, not for the job."""
    try:
        run.Program([plugin.importer, "release"], error=ImageError, environ=_environ(host)).run()
    except ImageError as e:
        log.info(str(e))


def _environ(host: Mapping[str, str]) -> dict[str, str]:
    return {**host, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
