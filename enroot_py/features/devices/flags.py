"""``penroot start --device``."""

from __future__ import annotations

from enroot_py.cli.start import FeatureFlag
from enroot_py.config.settings import Settings


def _give(settings: Settings, device: str) -> Settings:
    return settings.with_devices((device,), "command line")


FLAGS = (
    FeatureFlag("--device", "DEVICE", "add a device: a CDI name such as nvidia.com/gpu=0, or a path in /dev", _give),
)
