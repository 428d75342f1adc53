"""The setting that says where records go."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, Place, rows


class RecordSettings(FeatureTable):
    events = Place(
        "",
        "where pulls, creations, starts and steps are recorded, a line of JSON each; in a directory that is UID.jsonl",
        *("journald", "syslog"),
    )


SETTINGS = rows(RecordSettings)
