"""The table of all settings, generated from the tables in the source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from enroot_py.config.table import all_settings
from pyxis_py.request import settings as plugin
from tests.docs import NOTE, escaped

# Settings that most sites set, with an example for each.
COMMON = {
    "cache_path": "/local/enroot/cache-$(id -u)",
    "data_path": "/local/enroot/data-$(id -u)",
    "temp_path": "/local/enroot",
    "cache_limit": "200G",
    "mount_home": "yes",
    "rootfs_writable": "yes",
    "events": "journald",
}
COMMON_ARGUMENTS = {
    "container_scope": "job",
    "execute_entrypoint": "1",
    "events": "journald",
    "swarm_network": "10.1.0.0/16",
}


HEAD = f"""{NOTE}

# Settings

`/etc/enroot/penroot.yaml` and `~/.config/enroot/penroot.yaml` use the names below. Environment variables and
`enroot.conf` use the same names in capitals, with `ENROOT_` in front. Precedence, highest first: options, environment
variables, the user's files, the site's files. `penroot info` shows the origin of each value.
"""
ARGUMENTS = "Arguments are words on the plugin's line in `plugstack.conf`. Most sites set these:"


def pages() -> dict[str, str]:
    """Return the page of the site."""
    settings = {setting.name: setting for setting in all_settings().values()}
    arguments = plugin.all_settings()
    lines = (
        *(HEAD, "## Most sites set these", "", *table(settings, COMMON)),
        *("", "## All settings", "", *table(settings)),
        *("", "## Arguments of the plugin", "", ARGUMENTS, "", *table(arguments, COMMON_ARGUMENTS)),
        *("", "All arguments:", "", *table(arguments), ""),
    )
    return {"settings.md": "\n".join(lines)}


def table(rows: dict[str, Any], examples: dict[str, str] | None = None) -> Iterator[str]:
    """Return a table of all rows, or of the rows that have an example."""
    yield f"| name | {'example' if examples else 'value'} | default | meaning |"
    yield "|---|---|---|---|"
    for name in examples or rows:
        row = rows[name]
        value = f"`{examples[name]}`" if examples else cell(row.kind)
        yield f"| `{name}` | {value} | {f'`{row.default}`' if row.default else 'none'} | {cell(row.doc)} |"


def cell(text: str) -> str:
    return escaped(text).replace("|", "\\|")
