"""``penroot start --lock``."""

from __future__ import annotations

import os

from enroot_py.cli.start import FeatureFlag
from enroot_py.config.settings import Settings


def _locked(settings: Settings, path: str) -> Settings:
    return settings.replace("--lock", lock=os.path.abspath(path))


FLAGS = (FeatureFlag("--lock", "FILE", "take the digest of the image from this lock file", _locked),)
