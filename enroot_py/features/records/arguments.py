"""The argument of the plugin that says where steps are recorded."""

from __future__ import annotations

from pyxis_py.settings import PluginSetting

EVENTS = PluginSetting(
    "events", "", "where steps are recorded, whatever ENROOT_EVENTS says", kind="path|journald|syslog"
)
ARGUMENTS = (EVENTS,)
