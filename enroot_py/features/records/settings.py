"""The setting for event records."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, Place, rows


class RecordSettings(FeatureTable):
    events = Place(
        "",
        "destination of event records: a file, a directory (for a file UID.jsonl), journald or syslog; empty: none",
        *("journald", "syslog"),
    )


SETTINGS = rows(RecordSettings)
