"""The site's importer, a program that ``importer=`` in plugstack.conf names.

``PROGRAM get URI`` prints the absolute path of a squashfs file. The file stays until ``PROGRAM release``. A step may
call release more than once.
"""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.errors import ImageError
from enroot_py.base.run import Program
from enroot_py.config.words import DEFAULT_PATH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Importer:
    """Runs the program with the environment of the job, except for PATH."""

    def __init__(self, program: str, environ: Mapping[str, str]) -> None:
        self.program = program
        self.environ = {**environ, "PATH": DEFAULT_PATH}

    def get(self, uri: str) -> str:
        """Return the squashfs file of an image. Raises ImageError."""
        try:
            lines = self._run("get", uri).splitlines()
        except ImageError:
            self.release()
            raise
        if len(lines) != 1 or not lines[0].startswith("/") or not os.path.isfile(lines[0]):
            self.release()
            hint = "it must print the absolute path of a squashfs file"
            raise ImageError(f"{self.program} get {uri} printed {lines!r}", hint=hint)
        return lines[0]

    def release(self) -> None:
        """Release the file. A failure is logged for the administrator and does not fail the job."""
        try:
            self._run("release")
        except ImageError as e:
            log.info(str(e))

    def _run(self, *arguments: str) -> str:
        return Program((self.program, *arguments), error=ImageError, environ=self.environ).run()
