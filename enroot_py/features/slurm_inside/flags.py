"""``penroot start --slurm``."""

from __future__ import annotations

from enroot_py.cli.start import FeatureFlag
from enroot_py.config.settings import Settings


def _enable(settings: Settings, value: str) -> Settings:
    return settings.replace("command line", slurm=True)


FLAGS = (FeatureFlag("--slurm", "", "make the node's Slurm commands available in the container", _enable),)
