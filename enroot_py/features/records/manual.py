"""Manual pages about records."""

from __future__ import annotations

from enroot_py.features.records import events

_EVENTS = """\
If the setting events has a destination, each event adds one line to it: a JSON object with these keys, as far as their
values are known. A file must belong to the caller or to root. Lines of journald and syslog have the facility user and
the priority info.
"""
SECTIONS = (("penroot.yaml.5", "EVENTS", _EVENTS, tuple(events.FIELDS.items())),)
