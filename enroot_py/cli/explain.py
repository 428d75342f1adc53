"""``penroot start --explain``: print each mount, variable and hook of a start with its origin."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from enroot_py.base import log
from enroot_py.base.errors import ContainerError, PenrootError
from enroot_py.config.settings import Settings
from enroot_py.config.table import all_settings
from enroot_py.runtime.execute import Container
from enroot_py.runtime.rootfs import Source
from enroot_py.runtime.supervise import fork, wait

_SIGPIPE_STATUS = 128 + 13  # exit status of main() if the reader of stdout has gone


def explain(
    source: Source, settings: Settings, command: tuple[str, ...], enter: Callable[[Settings], Container]
) -> None:
    """Start the container in a child without running the command, and print what the start does.

    Nothing outside the container changes. The container's namespaces end with the child, and changes of its root file
    system go to a temporary overlay.
    """
    write = sys.stdout.write
    for setting in all_settings().values():
        if settings.origin(setting) != "default":
            write(f"setting  {setting.variable}={settings.text(setting)}  ({settings.origin(setting)})\n")
    for path in settings.policies:
        write(f"policy   {path} accepts the image\n")
    write(f"rootfs   {source.describe()}{', writable' if settings.rootfs_writable else ''}\n")
    sys.stdout.flush()
    child = fork()
    if child:
        status = wait(child)
        if status == _SIGPIPE_STATUS:
            raise BrokenPipeError
        if status:
            raise ContainerError("the start would fail as shown above")
        return
    log.explain = lambda line: print(line, flush=True)
    try:
        container = enter(settings.replace("--explain", rootfs_writable=False))
        for key, value in sorted(container.environ.items()):
            log.explain(f"set      {key}={value}  ({container.origins.get(key, 'login')})")
        if container.workdir:
            log.explain(f"workdir  {container.workdir}  ({container.origins['PWD']})")
        log.explain("run      " + " ".join(container.argv(command)))
    except PenrootError as e:
        log.error(str(e))
        if e.hint:
            log.hint(e.hint)
        os._exit(1)
    os._exit(0)
