"""The plugin's argument for event records."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, Place, rows


class RecordArguments(FeatureTable):
    events = Place(
        "",
        "destination of event records of steps, in the form of ENROOT_EVENTS, which it overrides",
        "journald",
        "syslog",
    )


ARGUMENTS = rows(RecordArguments)
