"""``penroot start --environment``."""

from __future__ import annotations

from enroot_py.cli.start import FeatureFlag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.features.environments.startfile import StartFile


def _read(name: str) -> StartFile:
    from enroot_py.features.environments import startfile

    return startfile.StartFile(startfile.read(name))


FLAGS = (
    FeatureFlag(
        "--environment",
        "NAME|FILE",
        "environment file; if the file names an image, all arguments are the command",
        describe=_read,
    ),
)
