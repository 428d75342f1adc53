"""Read a blob while other processes write it. The reader sleeps until bytes are available."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from enroot_py.base import log
from enroot_py.base.errors import RegistryError

if TYPE_CHECKING:
    from typing_extensions import Self

    from enroot_py.features.swarm.spool import Spool
    from enroot_py.registry.sources import Blob

_STUCK_S = 180.0  # after this time without a byte, read from another source
_NOTICE_AFTER_S = 4.0
_LOOK_S = 1.0  # between two checks for new bytes


class Reader:
    """The bytes of blob ``number`` of ``spool``, in order.

    If no more bytes arrive, ``instead`` opens another source of the blob at the first missing byte. At the end,
    ``keep`` gets the file of the blob, if all bytes came from the spool and the caller read them without an error.
    """

    def __init__(
        self,
        spool: Spool,
        number: int,
        instead: Callable[[int], Blob],
        keep: Callable[[int], None] = lambda descriptor: None,
    ) -> None:
        self._spool, self._number, self._keep = spool, number, keep
        self._open_instead = instead
        self._instead: Blob | None = None
        self._offset = 0
        self._seen, self._seen_at = -1, 0.0  # bytes of all blobs, and the time of their last increase
        self._noticed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        spool, number = self._spool, self._number
        if self._instead is not None:
            self._instead.__exit__(*error)
        elif not any(error) and self._offset == spool.sizes[number] and number not in spool.complete:
            self._keep(spool.descriptor(number))

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes, b"" at the end. Raises RegistryError if the peer has given up."""
        if self._instead is not None:
            return self._instead.read(size)
        spool, number = self._spool, self._number
        while (count := min(size, spool.available(number) - self._offset)) <= 0:
            if self._offset >= spool.sizes[number]:
                return b""
            peer_ended = spool.wait(number, _LOOK_S)
            if given_up := spool.given_up:
                raise RegistryError(given_up[0], hint=given_up[1])
            if (peer_ended or self._is_stuck()) and spool.available(number) <= self._offset:
                log.debug(f"swarm: blob {number}: read from another source from byte {self._offset} on")
                self._instead = self._open_instead(self._offset)
                return self._instead.read(size)
        data = spool.read(number, count, self._offset)
        self._offset += len(data)
        return data

    def _is_stuck(self) -> bool:
        """Return whether no byte of any blob has come for _STUCK_S. Log a notice already after _NOTICE_AFTER_S."""
        seen, now = self._spool.total_available(), time.monotonic()
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        if now > self._seen_at + _NOTICE_AFTER_S and not self._noticed and self._is_first():
            self._noticed = True
            log.info(f"waiting for other nodes: no byte of the image for {_NOTICE_AFTER_S:.0f} s")
        return now > self._seen_at + _STUCK_S

    def _is_first(self) -> bool:
        """Return whether this is the first incomplete blob. Each blob has a reader; only the first logs the notice."""
        spool = self._spool
        return self._number == min(blob for blob in (self._number, *spool.lacking) if not spool.is_complete(blob))
