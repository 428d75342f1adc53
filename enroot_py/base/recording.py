"""What is being done, for a record of it, where one is wanted: else nothing here costs anything. On the start path."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.base.events import Event

event: Event | None = None  # that which is being done now


class Recording:
    """For a ``with``: what is done in it is one event, and recorded ``where`` the setting events says.

    Where that is empty there is one only if it is to be ``timed``. Another one around it learns what it has found.
    """

    def __init__(self, kind: str, where: str, *, timed: bool = False, **facts: str | int) -> None:
        self._kind, self._where, self._facts = kind, where, facts
        self._wanted = bool(where) or timed or event is not None

    def __enter__(self) -> Event | None:
        global event
        self._around, self._event = event, None
        if self._wanted:
            from enroot_py.base.events import Event

            self._event = event = Event(self._kind, self._where, self._facts, self._around)
        return self._event

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        global event
        event = self._around
        if self._event is not None:
            self._event.end(error)


def phase(name: str) -> None:
    """What was done since the last call was this phase of the event."""
    if event is not None:
        event.phase(name)


def fact(**facts: str | int) -> None:
    """Something that is known of the event by now."""
    if event is not None:
        event.facts.update(facts)
