"""Look up a tag in the lock file of the settings."""

from __future__ import annotations

from enroot_py.base.digests import Pin
from enroot_py.config.settings import Settings
from enroot_py.features.pins.settings import LockSettings
from enroot_py.registry.reference import Reference


def pin(reference: Reference, settings: Settings) -> Pin | None:
    """Return the digest of a tag, or None without a lock file. Raises ConfigError."""
    path = LockSettings(settings).lock
    if not path:
        return None
    from enroot_py.features.pins import lockfile

    return lockfile.read(path).pin(reference)
