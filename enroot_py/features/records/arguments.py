"""The plugin's argument for event records."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, Place, rows


class RecordArguments(FeatureTable):
    events = Place(
        "",
        "destination of event records of steps; overrides ENROOT_EVENTS, with the same values",
        "journald",
        "syslog",
    )


ARGUMENTS = rows(RecordArguments)
