"""The settings for the host's network libraries."""

from __future__ import annotations

from enroot_py.config.table import Choice, FeatureTable, Paths, Words, rows


class FabricSettings(FeatureTable):
    fabric = Words(
        "",
        "network libraries of the host to add to containers if they fit: libfabric, ucx, nccl (the NCCL plugin)",
        *("libfabric", "ucx", "nccl"),
    )
    fabric_path = Paths(
        "",
        "directories to search first for network libraries of the host; {variant} stands for the NCCL plugin's variant",
    )
    fabric_unfit = Choice(
        "error",
        "if the host's network libraries do not fit the image: error (fail) or warn (use the image's libraries)",
        *("error", "warn"),
    )


SETTINGS = rows(FabricSettings)
