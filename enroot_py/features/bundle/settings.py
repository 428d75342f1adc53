"""The settings of ``penroot bundle``."""

from __future__ import annotations

from enroot_py.config.table import Bool, FeatureTable, rows


class BundleSettings(FeatureTable):
    bundle_all = Bool("no", "let bundles take the user's configuration along")
    bundle_checksum = Bool("no", "let bundles embed a checksum, which every run verifies")


SETTINGS = rows(BundleSettings)
