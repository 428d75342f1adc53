"""``penroot start --memory SIZE --cpus N --pids N``."""

from __future__ import annotations

from enroot_py.base.errors import UsageError
from enroot_py.cli.start import FeatureFlag
from enroot_py.config.settings import Settings
from enroot_py.features.limits.settings import SETTINGS


def _flag(name: str, metavar: str, example: str, help: str) -> FeatureFlag:
    setting = SETTINGS[f"ENROOT_LIMIT_{name.upper()}"]

    def change(settings: Settings, text: str) -> Settings:
        try:
            if not setting.parse(text):
                raise ValueError("must be more than 0")
        except ValueError as e:
            raise UsageError(f"--{name}={text} {e}", hint=f"for example --{name}={example}") from None
        return settings.replace(f"--{name}", **{setting.name: text})

    return FeatureFlag(f"--{name}", metavar, help, change)


FLAGS = (
    _flag("memory", "SIZE", "500M", "limit the memory of the container"),
    _flag("cpus", "N", "1.5", "limit the processor time of the container"),
    _flag("pids", "N", "100", "limit the number of processes and threads of the container"),
)
