"""A step is recorded where the plugin says, else where its settings say."""

from __future__ import annotations

from enroot_py.features.records.arguments import RecordArguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyxis_py.node.step import Step


def settings(step: Step) -> dict[str, object]:
    """The settings of a step that this feature decides."""
    where = RecordArguments(step.plugin).events
    return {"events": where} if where else {}
