"""The settings for the host's network libraries."""

from __future__ import annotations

from enroot_py.config.table import Choice, FeatureTable, Paths, Words, rows


class FabricSettings(FeatureTable):
    fabric = Words(
        "",
        "what of the host's network goes into containers of its ABI: libfabric, ucx, nccl (its plugin), some of these",
        *("libfabric", "ucx", "nccl"),
    )
    fabric_path = Paths(
        "",
        "directories of the host that have it, if not those of its loader; {variant} in one is that of the plugin",
    )
    fabric_unfit = Choice(
        "error",
        "what becomes of a start where the host's network does not fit into the image: an error, or a warning",
        *("error", "warn"),
    )


SETTINGS = rows(FabricSettings)
