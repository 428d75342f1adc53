"""The manual's examples of ``penroot fabric``."""

from __future__ import annotations

EXAMPLES = {
    "fabric": (
        ("penroot fabric ubuntu+latest.sqsh", "Which libfabric, UCX and plugin of NCCL its programs get, and why."),
        ("penroot fabric --environment pytorch", "The same with what ~/.edf/pytorch.toml asks for."),
    ),
}
