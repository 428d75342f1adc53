"""Platforms of images: architectures and their variants.

Source: OCI image specification, "Image Index", which uses Go's names (GOARCH). Container starts import this module.
"""

from __future__ import annotations

import os

_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "armv6l": "arm",
    "i386": "386",
    "i686": "386",
    "loongarch64": "loong64",
}
_VARIANTS = {"armv7l": "v7", "armv6l": "v6", "arm": "v7", "aarch64": "v8", "arm64": "v8"}
_ARM_VARIANTS = ("", "v5", "v6", "v7", "v8")


def architecture(name: str | None = None) -> str:
    """Convert an architecture name of uname(2) (default: this machine's) to the name in OCI images."""
    name = name or os.uname().machine
    return _ARCHITECTURES.get(name, name)


class Platform:
    """The platform to find an image for: ARCHITECTURE[/VARIANT]. Default: this machine's."""

    __slots__ = ("architecture", "variant")

    def __init__(self, arch: str | None = None) -> None:
        name, _, variant = (arch or os.uname().machine).partition("/")
        self.architecture = architecture(name)
        self.variant = variant or _VARIANTS.get(name, "")

    def __str__(self) -> str:
        return "/".join(filter(None, ("linux", self.architecture, self.variant)))

    def rank(self, architecture: str, variant: str) -> int:
        """Rank an image for this platform: higher is better, and -1 means that the image cannot run.

        A 32-bit ARM processor runs images for older variants. For other architectures the variant must be equal,
        because an image for amd64/v2 or higher may need instructions that this machine lacks.
        """
        if architecture != self.architecture:
            return -1
        if architecture == "arm":
            known = variant in _ARM_VARIANTS and self.variant in _ARM_VARIANTS
            fits = known and _ARM_VARIANTS.index(variant) <= _ARM_VARIANTS.index(self.variant)
            return _ARM_VARIANTS.index(variant) if fits else -1
        if variant == self.variant:
            return 2
        baseline = {"amd64": ("", "v1"), "arm64": ("", "v8")}.get(architecture, ("",))  # equivalent variants
        return 1 if variant in baseline and self.variant in baseline else -1
