"""The setting for a lock file."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, Place, rows


class LockSettings(FeatureTable):
    lock = Place(
        "",
        "lock file with the digest of each tag, see penroot-lock(1); commands fail if a tag is not in the file",
    )


SETTINGS = rows(LockSettings)
