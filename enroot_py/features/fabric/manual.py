"""The manual's examples of ``penroot fabric``."""

from __future__ import annotations

EXAMPLES = {
    "fabric": (
        ("penroot fabric ubuntu+latest.sqsh", "Show which libfabric, UCX and NCCL plugin the image uses, and why."),
        ("penroot fabric --environment pytorch", "Show the same for the image and annotations in ~/.edf/pytorch.toml."),
    ),
}
