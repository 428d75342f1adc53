"""The manual's examples of ``penroot bundle``."""

from __future__ import annotations

EXAMPLES = {
    "bundle": (
        ("penroot bundle --output ubuntu.run ubuntu+latest.sqsh", "Create an executable that needs no installation."),
        ("./ubuntu.run --root bash", "Run it with options of start: see ./ubuntu.run --help."),
    ),
}
