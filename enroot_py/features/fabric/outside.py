"""The owners of the host's libraries can only be seen outside of a user namespace."""

from __future__ import annotations

from enroot_py.features.fabric.settings import FabricSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from enroot_py.config.settings import Settings


def looks_outside(settings: Settings, host: Mapping[str, str]) -> bool:
    """Whether a setting asks for libraries of the host, or an annotation of an environment file does."""
    return bool(FabricSettings(settings).fabric) or "com.hooks." in host.get("PENROOT_ANNOTATIONS", "")
