"""The settings for the host's network libraries."""

from __future__ import annotations

from enroot_py.config.table import Choice, FeatureTable, Paths, Words, rows


class FabricSettings(FeatureTable):
    fabric = Words(
        "",
        "host's network libraries to use in containers, comma-separated: libfabric, ucx, nccl (the NCCL plugin)",
        *("libfabric", "ucx", "nccl"),
    )
    fabric_path = Paths(
        "",
        "directories of the host to search for them first, colon-separated; {variant} stands for the plugin's variant",
    )
    fabric_unfit = Choice(
        "error",
        "reaction if the host's libraries do not fit the image: error, or warn and use the image's",
        *("error", "warn"),
    )


SETTINGS = rows(FabricSettings)
