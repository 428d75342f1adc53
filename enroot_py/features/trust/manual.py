"""What the manual says of signatures."""

from __future__ import annotations

SECTIONS = (
    (
        "penroot-inspect.1",
        "SIGNATURES",
        "",
        (
            (
                "penroot inspect --signatures docker://registry.example.org#approved/box:1",
                "Who has signed it, and what each rule of policy.json makes of that.",
            ),
        ),
    ),
)
