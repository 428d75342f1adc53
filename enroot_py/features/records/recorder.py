"""Begin an event if the settings request records, or if the caller wants to know the times."""

from __future__ import annotations

from enroot_py.config.table import Rows
from enroot_py.features.records.events import Event
from enroot_py.features.records.settings import RecordSettings


def begin(kind: str, settings: Rows, timed: bool, facts: dict[str, str | int], around: Event | None) -> Event | None:
    """Begin an event. Return None without a destination and an outer event ``around``, unless it must be ``timed``."""
    where = RecordSettings(settings).events
    return Event(kind, where, facts, around) if where or timed or around is not None else None
