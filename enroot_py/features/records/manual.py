"""Manual pages about records."""

from __future__ import annotations

from enroot_py.features.records import events

_EVENTS = """\
If the setting events names a destination, each event adds a line to this destination: a JSON object with the following
keys. Keys without a known value are omitted. If the destination is a file, it must belong to the caller or to root.
Lines in journald and syslog have the priority "info". Lines in syslog have the facility "user".
"""
SECTIONS = (("penroot.yaml.5", "EVENTS", _EVENTS, tuple(events.FIELDS.items())),)
