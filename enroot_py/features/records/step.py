"""Record a step: the plugin's argument takes precedence over the setting."""

from __future__ import annotations

from enroot_py.features.records.arguments import RecordArguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyxis_py.node.step import Step


def settings(step: Step) -> dict[str, object]:
    """Return the settings of a step with the destination of records."""
    where = RecordArguments(step.plugin).events
    return {"events": where} if where else {}
