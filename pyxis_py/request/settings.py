"""The plugin's arguments in plugstack.conf, as a table of settings. Every step imports this module."""

from __future__ import annotations

from enroot_py.base.errors import ConfigError
from enroot_py.config.table import Bool, Choice, Float, Place, Rows, Setting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PLUGIN = "spank_pyxis.so"


class Seconds(Float):
    kind = "seconds"

    def parse(self, text: str) -> float:
        if not text.isdecimal() or not 0 < int(text) <= 3600:
            raise ValueError("must be seconds, 1 to 3600")
        return float(text)


class PluginSettings(Rows):
    """The plugin's arguments."""

    runtime_path = Place("/run/pyxis", "directory for records of running steps, with a subdirectory for each user")
    execute_entrypoint = Bool("0", "run the entrypoint of an image, unless --no-container-entrypoint is given")
    container_scope = Choice(
        "global",
        "lifetime of named containers: they are removed when their job ends (job), or stay on the node (global)",
        "job",
        "global",
    )
    sbatch_support = Bool("1", "accept container options of sbatch and salloc")
    use_enroot_load = Bool("0", "no effect: penroot never converts an image for a container")
    resolve_tags = Bool("1", "resolve tags in srun: all nodes of a step use the same image")
    show_image = Bool("0", "append the image of a batch script, with its digest, to the job's comment")
    resolve_timeout = Seconds("5", "timeout in seconds for resolve_tags; 0.4 times as long for each response")
    importer = Place("", "program that imports images in place of penroot")
    use_squashfuse = Bool("0", "no effect: squashfs images are always mounted")

    @property
    def resolve_silence(self) -> float:
        """Return the timeout in seconds for each response: a login node may not reach the registry at all."""
        return 0.4 * self.resolve_timeout


SETTINGS = {setting.name: setting for setting in vars(PluginSettings).values() if isinstance(setting, Setting)}


def all_settings() -> dict[str, Setting]:
    """Return the arguments of the core, then those of the features."""
    from enroot_py.base.features import plugged  # rarely needed

    return {**SETTINGS, **{row.name: row for feature in plugged("arguments") for row in feature.ARGUMENTS.values()}}


def load(arguments: Iterable[str]) -> PluginSettings:
    """Parse ``name=value`` arguments. If a name is repeated, the last value counts, as in pyxis.

    Raises ConfigError for an unknown name and a bad value.
    """
    values = {name: (setting.default, "default") for name, setting in SETTINGS.items()}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        known = SETTINGS if name in SETTINGS else all_settings()
        if name not in known or not equals:
            raise ConfigError(f"plugstack.conf: unknown argument {argument!r}", hint="known are " + ", ".join(known))
        setting = known[name]
        try:
            if setting.default and not text:
                raise ValueError("needs a value")
            parsed = setting.parse(text)
        except ValueError as e:
            raise ConfigError(f"plugstack.conf: {argument}: {e}", hint=f"{name}: {setting.doc}") from None
        values[name] = parsed if isinstance(parsed, str) else text, "plugstack.conf"
    return PluginSettings(values)
