"""``penroot inspect --signatures``."""

from __future__ import annotations

import click

from enroot_py.cli.commands import loaded, shown_json


def add(penroot: click.Group) -> None:
    """Add the option to ``penroot inspect``."""
    inspect = penroot.commands["inspect"]
    inspect_unsigned = inspect.callback
    assert inspect_unsigned is not None

    def callback(arch: str | None, signatures: bool, image: str) -> None:
        if not signatures:
            inspect_unsigned(arch=arch, image=image)
            return
        from enroot_py.features.trust import signed

        click.echo(shown_json(signed.inspect(image, loaded(), arch)))

    text = "Show the signatures of a registry image, and the decision of each rule in policy.json."
    inspect.params.insert(1, click.Option(["--signatures"], is_flag=True, help=text))
    inspect.callback = callback
