"""Report operations, such as pulls and starts, to optional features that record events.

Without such a feature, a report costs almost nothing. On the start path.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class OperationEvent(Protocol):
        """One operation and its facts."""

        facts: dict[str, str | int]
        phases: dict[str, float]

        def phase(self, name: str) -> None: ...
        def add(self, name: str, seconds: float) -> None: ...
        def again(self) -> None: ...
        def words(self) -> str: ...
        def end(self, error: BaseException | None) -> None: ...


event: OperationEvent | None = None  # the current operation


class Operation:
    """Record the operation in the ``with`` as one event, if the settings request events or ``timed`` is set.

    An operation within a recorded operation is recorded too. The inner and the outer event exchange some facts.
    """

    def __init__(self, kind: str, settings: Any, *, timed: bool = False, **facts: str | int) -> None:
        self._kind, self._settings, self._timed, self._facts = kind, settings, timed, facts
        self._wanted = settings.is_extended or timed or event is not None

    def __enter__(self) -> OperationEvent | None:
        global event
        self._outer, self._event = event, None
        if self._wanted:
            from enroot_py.base.features import plugged

            for recorder in plugged("recorder"):
                self._event = recorder.begin(self._kind, self._settings, self._timed, self._facts, self._outer)
            event = self._event or event
        return self._event

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        global event
        event = self._outer
        if self._event is not None:
            self._event.end(error)


def phase(name: str) -> None:
    """End the phase ``name`` of the current event. The phase began at the previous call, or with the event."""
    if event is not None:
        event.phase(name)


def fact(**facts: str | int) -> None:
    """Add facts to the current event."""
    if event is not None:
        event.facts.update(facts)
