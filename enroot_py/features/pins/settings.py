"""The setting for a lock file."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, Place, rows


class LockSettings(FeatureTable):
    lock = Place("", "lock file with the digest of each tag; other tags are errors: penroot-lock(1)")


SETTINGS = rows(LockSettings)
