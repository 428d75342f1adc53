"""The entrypoint of an image, run once in a container before its tasks.

It gets a command of ours as its arguments, as it would get the user's. When it
runs that command, it has done its work, and the environment and the working
directory that the command sees are those of the tasks. What it has started
beside it goes on.
"""

from __future__ import annotations

import fcntl
import os
import select

from enroot_py.base import linux
from enroot_py.base.errors import CommandError, PenrootError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from enroot_py.runtime.execute import Container

_STARTED, _END = 8, 9  # of a shell, one digit
# Says who it is, then waits until it has been looked at.
_COMMAND = ("sh", "-c", f"echo $$ >&{_STARTED}; read -r penroot <&{_END}; exit 0")


def run(container: Container, log: int, confine: Callable[[], None]) -> tuple[dict[str, str], str]:
    """Run the entrypoint of a container that this process has entered; its output goes to the descriptor ``log``.

    ``confine`` leaves it the privileges of a task.

    Returns environment and working directory. Raises CommandError where the
    entrypoint ends without running what it was given.
    """
    started, say = os.pipe()
    wait, end = os.pipe()
    child = os.fork()
    if child == 0:
        _execute(container, log, say, wait, confine)
    os.close(say)
    os.close(wait)
    process = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(started, select.POLLIN)
        poll.register(process, select.POLLIN)
        poll.poll()
        said = os.read(started, 32) if select.select([started], (), (), 0)[0] else b""
        if not said.strip().isdigit():
            os.kill(child, 9)
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            raise CommandError(
                f"the entrypoint of the image ended with status {code} and did not run the command that it was given",
                hint="leave it out: --no-container-entrypoint",
            )
        pid = int(said)
        with open(f"/proc/{pid}/environ", "rb") as f:
            words = os.fsdecode(f.read()).split("\0")
        environ = dict(word.partition("=")[::2] for word in words if "=" in word)
        workdir = os.readlink(f"/proc/{pid}/cwd")
    finally:
        for fd in (started, end, process):
            os.close(fd)
    return environ, workdir


def _execute(container: Container, log: int, say: int, wait: int, confine: Callable[[], None]) -> NoReturn:
    try:
        # First out of the way, as any of them may be where another one goes.
        say, wait = (fcntl.fcntl(fd, fcntl.F_DUPFD, _END + 1) for fd in (say, wait))
        for number, fd in ((1, log), (2, log), (_STARTED, say), (_END, wait)):
            os.dup2(fd, number)
        linux.close_range(3, _STARTED - 1, 0)
        linux.close_range(_END + 1, 0xFFFFFFFF, 0)
        confine()
        container.execute(_COMMAND)
    except PenrootError as e:
        os.write(2, f"{e}\n".encode())
    finally:
        os._exit(127)
