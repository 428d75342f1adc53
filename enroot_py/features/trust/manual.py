"""Manual pages about signatures."""

from __future__ import annotations

SECTIONS = (
    (
        "penroot-inspect.1",
        "SIGNATURES",
        "",
        (
            (
                "penroot inspect --signatures docker://registry.example.org#approved/box:1",
                "Show the signatures of the image, and the decision of each rule in policy.json.",
            ),
        ),
    ),
)
