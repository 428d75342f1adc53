"""The plugin's arguments in plugstack.conf: one table, as for options. On the step path."""

from __future__ import annotations

from enroot_py.base.errors import ConfigError
from enroot_py.base.frozen import Frozen
from pyxis_py.options import NO, YES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

PLUGIN = "spank_pyxis.so"


class PluginSetting:
    """One row: name, default as it would be written, meaning, and the values that it may have."""

    __slots__ = ("name", "default", "doc", "kind")

    def __init__(self, name: str, default: str, doc: str, *, kind: str = "bool") -> None:
        self.name = name
        self.default = default
        self.doc = doc
        self.kind = kind

    def parse(self, text: str) -> str | bool | float:
        """Raises ValueError with what the value should have been."""
        if self.kind == "bool":
            if text.lower() not in YES + NO:
                raise ValueError("must be yes or no")
            return text.lower() in YES
        if self.kind == "seconds":
            if not text.isdecimal() or not 0 < int(text) <= 3600:
                raise ValueError("must be seconds, 1 to 3600")
            return float(text)
        if self.kind == "path":
            if text and not text.startswith("/"):
                raise ValueError("must be an absolute path")
            return text.rstrip("/") or text[:1]
        if text not in self.kind.split("|"):
            raise ValueError(f"must be one of {self.kind}")
        return text


SETTINGS = {
    setting.name: setting
    for setting in (
        PluginSetting("runtime_path", "/run/pyxis", "where each user has a directory for running steps", kind="path"),
        PluginSetting("execute_entrypoint", "0", "run entrypoints unless --no-container-entrypoint"),
        PluginSetting("container_scope", "global", "whether named containers outlive the job", kind="job|global"),
        PluginSetting("sbatch_support", "1", "let sbatch and salloc have the container options"),
        PluginSetting("use_enroot_load", "0", "without effect: a container is never converted from an image"),
        PluginSetting("resolve_tags", "1", "let srun resolve a tag, so that all nodes of a step see one image"),
        PluginSetting("resolve_timeout", "5", "seconds that srun tries to, and 0.4 of it in silence", kind="seconds"),
        PluginSetting("importer", "", "program that imports images instead of penroot", kind="path"),
        PluginSetting("use_squashfuse", "0", "without effect: squashfs images are always mounted"),
    )
}


class PluginSettings(Frozen):
    """The plugin's arguments."""

    runtime_path: str
    execute_entrypoint: bool
    container_scope: str
    sbatch_support: bool
    use_enroot_load: bool
    resolve_tags: bool
    resolve_timeout: float
    importer: str
    use_squashfuse: bool


def load(arguments: Iterable[str]) -> PluginSettings:
    """Parse ``name=value`` arguments; the last of a name counts, as in pyxis.

    Raises ConfigError for an unknown name and a bad value.
    """
    values: dict[str, Any] = {name: setting.parse(setting.default) for name, setting in SETTINGS.items()}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name not in SETTINGS or not equals:
            raise ConfigError(f"plugstack.conf: unknown argument {argument!r}", hint="known are " + ", ".join(SETTINGS))
        setting = SETTINGS[name]
        try:
            values[name] = setting.parse(text)
        except ValueError as e:
            raise ConfigError(f"plugstack.conf: {argument}: {e}", hint=f"it means: {setting.doc}") from None
    return PluginSettings(**values)
