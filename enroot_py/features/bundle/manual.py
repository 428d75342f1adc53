"""The manual's examples of ``penroot bundle``."""

from __future__ import annotations

EXAMPLES = {
    "bundle": (
        ("penroot bundle --output ubuntu.run ubuntu+latest.sqsh", "One file that runs where nothing is installed."),
        ("./ubuntu.run --root bash", "Run it: it takes most options of start, see ./ubuntu.run --help."),
    ),
}
