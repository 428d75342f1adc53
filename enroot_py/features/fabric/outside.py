"""Tell whether 99-fabric must look at the host before a start enters a user namespace, which hides owners of files."""

from __future__ import annotations

from enroot_py.features.fabric.settings import FabricSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from enroot_py.config.settings import Settings


def looks_outside(settings: Settings, host: Mapping[str, str]) -> bool:
    """Check whether a setting, or an annotation of an environment file, requests the host's libraries."""
    return bool(FabricSettings(settings).fabric) or "com.hooks." in host.get("PENROOT_ANNOTATIONS", "")
