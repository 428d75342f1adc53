"""The setting that gives devices to containers."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, List, rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings


class DeviceSettings(FeatureTable):
    devices = List("", "additional devices, comma-separated: CDI names (vendor.com/class=name) or paths in /dev")


SETTINGS = rows(DeviceSettings)


def named(settings: Settings) -> list[str]:
    """The devices that the caller names, as they are written."""
    return [word for word in (word.strip() for word in DeviceSettings(settings).devices.split(",")) if word]
