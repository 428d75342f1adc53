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

from enroot_py.base import capture, linux, log
from enroot_py.base.errors import CommandError, PenrootError
from enroot_py.base.fds import Fd
from pyxis_py.channel import tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from enroot_py.base.capture import Capture
    from enroot_py.runtime.execute import Container

_STARTED, _END = 8, 9  # of a shell, one digit
# Says who it is, then waits until it has been looked at.
_COMMAND = ("sh", "-c", f"echo $$ >&{_STARTED}; read -r penroot <&{_END}; exit 0")


def run(container: Container, confine: Callable[[], None], *, shown: bool) -> tuple[dict[str, str], str]:
    """Run the entrypoint of a container that this process has entered; ``confine`` leaves it the privileges of a task.

    The user sees its output if that is to be ``shown``, or if it fails.

    Returns environment and working directory. Raises CommandError where the
    entrypoint ends without running what it was given.
    """
    output = capture.shared()
    try:
        environ = _run(container, output, confine)
    except CommandError:
        _show(output, log.error)
        raise
    if shown:
        _show(output, lambda line: tell(f"entrypoint: {line}"))
    return environ


def _show(output: Capture, say: Callable[[str], None]) -> None:
    for line in output.take().splitlines():
        say(line)


def _run(container: Container, output: Capture, confine: Callable[[], None]) -> tuple[dict[str, str], str]:
    started, say = map(Fd, os.pipe())
    wait, end = map(Fd, os.pipe())
    with started, end:
        with say, wait:
            child = os.fork()
            if child == 0:
                _execute(container, output.writer, say, wait, confine)
        with Fd(os.pidfd_open(child)) as process:
            poll = select.poll()
            poll.register(started, select.POLLIN)
            poll.register(process, select.POLLIN)
            poll.register(output.reader, select.POLLIN)
            ready: set[int] = set()
            while not ready & {started, process}:
                ready = {fd for fd, _ in poll.poll()}
                output.read()
        line = os.read(started, 32) if select.select([started], (), (), 0)[0] else b""
        if not line.strip().isdigit():
            os.kill(child, 9)
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            raise CommandError(
                f"the entrypoint of the image ended with status {code} and did not run the command that it was given",
                hint="leave it out: --no-container-entrypoint",
            )
        pid = int(line)
        with open(f"/proc/{pid}/environ", "rb") as f:
            words = os.fsdecode(f.read()).split("\0")
        environ = dict(word.partition("=")[::2] for word in words if "=" in word)
        return environ, os.readlink(f"/proc/{pid}/cwd")


def _execute(container: Container, output: int, say: int, wait: int, confine: Callable[[], None]) -> NoReturn:
    try:
        # First out of the way, as any of them may be where another one goes.
        say, wait = (fcntl.fcntl(fd, fcntl.F_DUPFD, _END + 1) for fd in (say, wait))
        for number, fd in ((1, output), (2, output), (_STARTED, say), (_END, wait)):
            os.dup2(fd, number)
        linux.close_range(3, _STARTED - 1, 0)
        linux.close_range(_END + 1, 0xFFFFFFFF, 0)
        confine()
        container.execute(_COMMAND)
    except PenrootError as e:
        os.write(2, f"{e}\n".encode())
    finally:
        os._exit(127)
