"""The settings of ``penroot bundle``."""

from __future__ import annotations

from enroot_py.config.table import Bool, FeatureTable, rows


class BundleSettings(FeatureTable):
    bundle_all = Bool("no", "include the user's configuration in bundles")
    bundle_checksum = Bool("no", "embed a checksum in bundles, which every run verifies")


SETTINGS = rows(BundleSettings)
