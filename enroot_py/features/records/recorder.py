"""Begin an event if its record or its times are needed."""

from __future__ import annotations

from enroot_py.config.table import Rows
from enroot_py.features.records.events import Event
from enroot_py.features.records.settings import RecordSettings


def begin(kind: str, settings: Rows, timed: bool, facts: dict[str, str | int], around: Event | None) -> Event | None:
    """Begin an event and return it, or return None if nothing needs it.

    The event is needed if the settings name a destination, if the times are requested (``timed``), or if there is an
    outer event ``around``.
    """
    where = RecordSettings(settings).events
    return Event(kind, where, facts, around) if where or timed or around is not None else None
