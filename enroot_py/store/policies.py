"""Find the feature that checks images against the policies of the site and the user."""

from __future__ import annotations

from enroot_py.base.errors import PolicyError
from enroot_py.base.features import plugged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from enroot_py.config.settings import Settings


def admission(settings: Settings) -> Any:
    """Return the module that checks images against ``settings.policies``.

    Raises PolicyError, which rejects every image, if this installation lacks the module.
    """
    for module in plugged("admission"):
        return module
    raise PolicyError(
        f"cannot check images against {settings.policies[0]}: this installation lacks a feature",
        hint="install penroot again: enroot_py/features lacks a folder",
    )
