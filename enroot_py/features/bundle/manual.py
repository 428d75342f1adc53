"""The manual's examples of ``penroot bundle``."""

from __future__ import annotations

EXAMPLES = {
    "bundle": (
        ("penroot bundle --output ubuntu.run ubuntu+latest.sqsh", "One file that runs on hosts without penroot."),
        ("./ubuntu.run --root bash", "Run the bundle. It takes most options of start: see ./ubuntu.run --help."),
    ),
}
