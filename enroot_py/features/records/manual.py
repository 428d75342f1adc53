"""Manual pages about records."""

from __future__ import annotations

from enroot_py.features.records import events

_EVENTS = """\
With the setting events, each event adds one line to its destination: a JSON object with these keys, as far as known. A
file belongs to the caller or to root. Lines of journald and syslog have the facility user and the priority info.
"""
SECTIONS = (("penroot.yaml.5", "EVENTS", _EVENTS, tuple(events.FIELDS.items())),)
