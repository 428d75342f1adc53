"""Add the host's libfabric, UCX and NCCL plugin if ENROOT_FABRIC or annotations request them and they fit."""

from __future__ import annotations

from enroot_py.runtime.hooks import look_outside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from enroot_py.config.settings import Settings
    from enroot_py.runtime.hooks import Context


def outside(settings: Settings, host: Mapping[str, str]) -> Callable[[Context], None] | None:
    """Find the host's libraries before the user namespace hides who owns a file. Return a function that adds them."""
    if not look_outside(settings, host):
        return None
    from enroot_py.features.fabric import fabric

    wanted = fabric.wanted(settings, host)
    if not wanted:
        return None
    stock = fabric.Stock(settings, host)
    parts = [stock.part(want) for want in wanted]

    def run(context: Context) -> None:
        from enroot_py.features.fabric import fitting

        fitting.add_parts(context, stock, parts)

    return run
