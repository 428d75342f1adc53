"""The setting that names a lock file."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, Place, rows


class LockSettings(FeatureTable):
    lock = Place("", "lock file that says which digest each tag is, and which tags there are: penroot-lock(1)")


SETTINGS = rows(LockSettings)
