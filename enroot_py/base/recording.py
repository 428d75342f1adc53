"""Report what is being done to a feature that records it. Free of cost without one. On the start path."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class Recorded(Protocol):
        """One thing that is done, and what is known of it."""

        facts: dict[str, str | int]
        phases: dict[str, float]

        def phase(self, name: str) -> None: ...
        def add(self, name: str, seconds: float) -> None: ...
        def again(self) -> None: ...
        def words(self) -> str: ...
        def end(self, error: BaseException | None) -> None: ...


event: Recorded | None = None  # that which is being done now


class Recording:
    """For a ``with``: a feature may record what is done in it as one event, if the settings ask for that.

    It does also if the event is to be ``timed``. Another event around it learns what it has found.
    """

    def __init__(self, kind: str, settings: Any, *, timed: bool = False, **facts: str | int) -> None:
        self._kind, self._settings, self._timed, self._facts = kind, settings, timed, facts
        self._wanted = settings.is_extended or timed or event is not None

    def __enter__(self) -> Recorded | None:
        global event
        self._around, self._event = event, None
        if self._wanted:
            from enroot_py.base.features import plugged

            for recorder in plugged("recorder"):
                self._event = recorder.begin(self._kind, self._settings, self._timed, self._facts, self._around)
            event = self._event or event
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
