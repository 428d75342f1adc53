"""Descriptors that a ``with`` closes. On the start path: contextlib costs more than it."""

from __future__ import annotations

import os

_AT_ONCE = 1 << 14  # bytes


class Fd(int):
    """An open file descriptor, a number as any other: at the end of its ``with`` it is closed."""

    _kept = False

    def __enter__(self) -> Fd:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            os.close(self)
        self._kept = False

    def content(self, limit: int = 1 << 62) -> bytes:
        """What is left to be read, up to ``limit`` bytes: a file of open() has a buffer, and five more system calls."""
        parts = []
        while limit > 0 and (part := os.read(self, min(limit, _AT_ONCE))):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)

    def keep(self) -> Fd:
        """Leave it open at the end of this ``with``, for whoever gets it."""
        self._kept = True
        return self
