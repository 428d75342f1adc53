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

    def parse(self, text: str) -> str | bool | int | float:
        """Raises ValueError with what the value should have been."""
        if self.kind == "bool":
            if text.lower() not in YES + NO:
                raise ValueError("must be yes or no")
            return text.lower() in YES
        if self.kind == "seconds":
            if not text.isdecimal() or not 0 < int(text) <= 3600:
                raise ValueError("must be seconds, 1 to 3600")
            return float(text)
        if self.kind.startswith("path"):
            words = self.kind.split("|")[1:]
            if text and not text.startswith("/") and text not in words:
                raise ValueError(" or ".join(("must be an absolute path", *words)))
            return text.rstrip("/") or text[:1]
        if self.kind == "size":
            if text == "0":
                return 0
            from enroot_py.base import log  # rarely, too

            return log.parse_size(text)
        if self.kind == "networks":
            if text:
                import ipaddress  # rarely: it takes two milliseconds

                for network in text.split(","):
                    ipaddress.ip_network(network)
            return text
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
        PluginSetting("show_image", "0", "add the image of a batch script, with its digest, to the comment of the job"),
        PluginSetting("swarm", "1", "let the nodes of a step fetch an image once, and give it to each other"),
        PluginSetting("swarm_network", "", "networks, as 10.1.0.0/16,fd00::/8, over which alone", kind="networks"),
        PluginSetting("swarm_tls", "1", "by TLS, where Python has it with a key alone: 3.13"),
        PluginSetting("swarm_keep", "0", "bytes of compressed layers that a node keeps to give them", kind="size"),
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
    show_image: bool
    swarm: bool
    swarm_network: str
    swarm_tls: bool
    swarm_keep: int
    resolve_timeout: float
    importer: str
    use_squashfuse: bool
    of_features: dict[str, Any]

    def value(self, row: PluginSetting) -> Any:
        """The value of an argument that a feature has."""
        return self.of_features.get(row.name, row.parse(row.default))

    @property
    def resolve_silence(self) -> float:
        """Seconds: a login node may not reach the registry, and then each node resolves the tag."""
        return 0.4 * self.resolve_timeout


def all_settings() -> dict[str, PluginSetting]:
    """The arguments of the core, then those of the features."""
    from enroot_py.base.features import plugged  # rarely

    return {**SETTINGS, **{row.name: row for feature in plugged("arguments") for row in feature.ARGUMENTS}}


def load(arguments: Iterable[str]) -> PluginSettings:
    """Parse ``name=value`` arguments; the last of a name counts, as in pyxis.

    Raises ConfigError for an unknown name and a bad value.
    """
    values: dict[str, Any] = {name: setting.parse(setting.default) for name, setting in SETTINGS.items()}
    of_features: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        known = SETTINGS if name in SETTINGS else all_settings()
        if name not in known or not equals:
            raise ConfigError(f"plugstack.conf: unknown argument {argument!r}", hint="known are " + ", ".join(known))
        setting = known[name]
        try:
            (values if name in SETTINGS else of_features)[name] = setting.parse(text)
        except ValueError as e:
            raise ConfigError(f"plugstack.conf: {argument}: {e}", hint=f"it means: {setting.doc}") from None
    return PluginSettings(**values, of_features=of_features)
