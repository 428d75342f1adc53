"""The error that hooks of a site raise. The name of this module stays the same in later versions."""

from __future__ import annotations

from enroot_py.base.errors import HookError

__all__ = ["HookError"]
