"""The errors that a site's own hooks may raise: a name that stays, wherever they live."""

from __future__ import annotations

from enroot_py.base.errors import HookError

__all__ = ["HookError"]
