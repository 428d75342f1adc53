"""The destination of a step's records: the plugin's argument takes precedence over the setting."""

from __future__ import annotations

from enroot_py.features.records.arguments import RecordArguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyxis_py.node.step import Step


def settings(step: Step) -> dict[str, object]:
    """Return the setting ``events`` from the plugin's argument, or nothing without this argument."""
    where = RecordArguments(step.plugin).events
    return {"events": where} if where else {}
