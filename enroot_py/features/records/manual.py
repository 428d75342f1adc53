"""Manual pages about records."""

from __future__ import annotations

from enroot_py.features.records import events

_EVENTS = """\
Where the setting events names a place, each line there is a JSON object with those of these keys that are known. A file
belongs to the caller or to root; the lines of journald and syslog are of the facility user and the priority info.
"""
SECTIONS = (("penroot.yaml.5", "EVENTS", _EVENTS, tuple(events.FIELDS.items())),)
