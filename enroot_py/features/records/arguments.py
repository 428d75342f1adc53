"""The plugin's argument for event records."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, Place, rows


class RecordArguments(FeatureTable):
    events = Place(
        "",
        "write the steps' event records to this file, journald or syslog; takes the same values as ENROOT_EVENTS and "
        "overrides it",
        "journald",
        "syslog",
    )


ARGUMENTS = rows(RecordArguments)
