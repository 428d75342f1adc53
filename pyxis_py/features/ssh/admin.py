"""``pyxis-py ssh-server``, which penroot ssh-proxy runs on a compute node."""

from __future__ import annotations

import os
import sys

import click

from enroot_py.base import log
from enroot_py.base.build import missing
from enroot_py.base.errors import PenrootError


def add(commands: click.Group) -> None:
    """Add ssh-server to the commands of pyxis-py."""
    commands.add_command(ssh_server)


@click.command("ssh-server", hidden=True)
@click.argument("job", type=int)
@click.argument("keys")
@click.argument("container")
def ssh_server(job: int, keys: str, container: str) -> None:
    """Serve one ssh connection on stdin and stdout, in a step that penroot ssh-proxy starts.

    CONTAINER is a step or the name of a container, or "" if the job has only one container.
    """
    hint = ""
    try:
        from pyxis_py.features.ssh import sshd

        sshd.serve(job, container, keys)
    except ModuleNotFoundError as e:
        error = missing("ssh", e)
        log.error(f"{os.uname().nodename}: {error}")
        hint = error.hint
    except PenrootError as e:
        log.error(str(e))
        hint = e.hint
    if hint:
        log.hint(hint)
    sys.exit(0)  # otherwise srun prints another error
