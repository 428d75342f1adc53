"""The setting for event records."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, Place, rows


class RecordSettings(FeatureTable):
    events = Place(
        "",
        "destination of event records, one line of JSON each: a file, a directory (UID.jsonl), journald or syslog",
        *("journald", "syslog"),
    )


SETTINGS = rows(RecordSettings)
