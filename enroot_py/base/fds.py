"""Descriptors that a ``with`` closes. On the start path, so this module does not import contextlib."""

from __future__ import annotations

import os

_READ_BYTES = 1 << 14


class Fd(int):
    """An open file descriptor, as an int. The end of the ``with`` closes the descriptor."""

    _kept = False

    def __enter__(self) -> Fd:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            os.close(self)
        self._kept = False

    def content(self, limit: int = 1 << 62) -> bytes:
        """Read the rest of the file, up to ``limit`` bytes. open() would make five more system calls."""
        parts = []
        while limit > 0 and (part := os.read(self, min(limit, _READ_BYTES))):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)

    def keep(self) -> Fd:
        """Leave the descriptor open at the end of this ``with``; the caller passes it on."""
        self._kept = True
        return self
