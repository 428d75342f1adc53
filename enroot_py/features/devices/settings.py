"""The setting that adds devices to containers."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, List, rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings


class DeviceSettings(FeatureTable):
    devices = List("", "devices to add (comma-separated): CDI names such as vendor.com/class=name, or paths in /dev")


SETTINGS = rows(DeviceSettings)


def named(settings: Settings) -> list[str]:
    """Return the devices that the caller lists in ENROOT_DEVICES or with --device."""
    return [word for word in (word.strip() for word in DeviceSettings(settings).devices.split(",")) if word]
