"""The errors for hooks of a site. This module name is stable."""

from __future__ import annotations

from enroot_py.base.errors import HookError

__all__ = ["HookError"]
