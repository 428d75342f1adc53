"""Apply an environment file to ``penroot start``. A start without such a file does not import this module."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from enroot_py.base import log
from enroot_py.base.errors import ImageReferenceError, UsageError
from enroot_py.config.settings import Settings
from enroot_py.config.table import all_settings
from enroot_py.features.environments import edf_parser
from enroot_py.features.environments.edf import Environment
from enroot_py.registry import reference
from enroot_py.runtime import container_mounts
from enroot_py.runtime.execute import Container
from enroot_py.runtime.mounting import Mount

_EXAMPLE = 'for example mounts = ["/data:/data:ro"]'


class StartFile:
    """The environment file of one start. Methods raise PenrootError.

    ``job`` has the environment variables of the job. To check a file before the job runs, pass None.
    """

    def __init__(self, file: Environment, job: Mapping[str, str] | None = os.environ) -> None:
        self._file = file
        self._job = job
        self.mounts = tuple(_mounts(file, job))
        self.host = file.for_hooks(job)
        self._text("workdir")  # raises if the value is invalid
        self.identity = file.dumps()  # MPI ranks with equal identities share a container

    @property
    def target(self) -> str:
        """Return the image for penroot start, or ""."""
        image = self._text("image")
        entry = self._file.last("image")
        if not entry or image.startswith(("/", ".")) or image.endswith(".sqsh") and os.path.isfile(image):
            return image
        uri = image if reference.is_uri(image) else reference.DOCKER + image
        try:
            reference.parse(uri, os.getcwd())
        except ImageReferenceError as e:
            raise UsageError(f"{entry.where}={e}", hint=e.hint) from None
        return uri

    def settings(self, settings: Settings) -> Settings:
        """Return the settings with the values of the file. The command line overrides them later."""
        writable, origin = self._file.flag("writable")
        changed = settings.replace(origin, rootfs_writable=writable)
        for row in (row for row in all_settings().values() if row.annotated):
            if annotation := self._file.annotation(f"com.pyxis.{row.name}"):
                value, where = annotation
                changed = changed.replace(where, **{row.name: value})
        return changed.with_devices(self._file.devices(os.environ), self._file.path)

    def variables(self, image: Mapping[str, str]) -> dict[str, tuple[str | None, str]]:
        return self._file.variables(image, os.environ)

    def fit(self, container: Container, command: tuple[str, ...]) -> Container:
        """Apply the working directory and the entrypoint of the file to the container.

        If there is no command and the file does not set ``entrypoint``, run the entrypoint: there is nothing else to
        run.
        """
        workdir = self._file.last("workdir")
        if workdir:
            container.workdir = self._text("workdir")
            container.origins["PWD"] = workdir.where
        is_only_program = not command and self._file.last("entrypoint") is None
        container.runs_entrypoint = is_only_program or self._file.flag("entrypoint")[0]
        return container

    def _text(self, key: str) -> str:
        entry = self._file.last(key)
        return self._file.value(entry, self._job) if entry else ""


def _mounts(file: Environment, job: Mapping[str, str] | None) -> Iterator[Mount]:
    for entry in file.all("mounts"):
        try:
            mount = container_mounts.parse_one(file.mount(entry, job), entry.where)
            yield (mount if job is None else mount.resolved(os.getcwd(), {})).fstab("")
        except ValueError as e:
            why, hint = e.args if len(e.args) == 2 else (e.args[0], _EXAMPLE)
            raise UsageError(f"{entry.where}: {why}", hint=hint) from None


def read(name: str) -> Environment:
    """Read the environment ``name``, and warn about annotations that no hook implements."""
    file = edf_parser.read(name, name, os.getcwd(), os.environ)
    edf_parser.check(file)
    if warning := edf_parser.annotation_warning(file):
        log.warn(warning)
    return file
