"""The manual's examples of ``penroot fabric``."""

from __future__ import annotations

EXAMPLES = {
    "fabric": (
        ("penroot fabric ubuntu+latest.sqsh", "Show which libfabric, UCX and NCCL plugin the image uses, and why."),
        ("penroot fabric --environment pytorch", "The same with the image and annotations of ~/.edf/pytorch.toml."),
    ),
}
