"""``penroot cache metrics``."""

from __future__ import annotations

import click

from enroot_py.cli.commands import CONTEXT, synopsis
from enroot_py.config import settings


def add(penroot: click.Group) -> None:
    """Add the verb to ``penroot cache``."""
    cache = penroot.commands["cache"]
    assert isinstance(cache, click.Group)
    cache.add_command(cache_metrics)


@synopsis
@click.command("metrics", context_settings=CONTEXT)
@click.option("-o", "--output", metavar="FILE", help="Write to FILE for node_exporter. FILE is replaced by rename.")
def cache_metrics(output: str | None) -> None:
    """Print metrics of the store and the event records for Prometheus."""
    from enroot_py.features.records import metrics

    content = metrics.text(settings.load())
    if output is None:
        click.echo(content, nl=False)
    else:
        metrics.write(output, content)
