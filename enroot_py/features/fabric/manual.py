"""The manual's examples of ``penroot fabric``."""

from __future__ import annotations

EXAMPLES = {
    "fabric": (
        (
            "penroot fabric ubuntu+latest.sqsh",
            "Show the libfabric, UCX and NCCL plugin that its programs use, and why.",
        ),
        ("penroot fabric --environment pytorch", "The same with the requests of ~/.edf/pytorch.toml."),
    ),
}
