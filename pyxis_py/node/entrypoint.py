"""The entrypoint of an image, run once in a container before its tasks.

Its arguments are a command of penroot instead of the user's command. The entrypoint is finished when it runs penroot's
command. Tasks get the environment and the working directory of penroot's command. Background processes of the
entrypoint continue to run.
"""

from __future__ import annotations

import fcntl
import os
import select
import time

from enroot_py.base import capture, linux, log
from enroot_py.base.errors import CommandError, PenrootError
from enroot_py.base.fds import Fd
from pyxis_py.request.channel import tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

    from enroot_py.base.capture import Capture
    from enroot_py.runtime.execute import Container

_SCRIPT, _STARTED, _END = 7, 8, 9  # descriptors: sh(1) accepts only one digit
_HINT = f"the entrypoint must leave descriptors {_SCRIPT} to {_END} alone, or use --no-container-entrypoint"
_NOTICE_AFTER_S = 10.0  # then print why the step waits
_EXIT_TIMEOUT_S = 1.0  # between the closing of a process's descriptors and its exit


def run(container: Container, confine: Callable[[], None], *, shown: bool) -> tuple[dict[str, str], str]:
    """Run the entrypoint of a container that this process has entered. Return the environment and working directory.

    ``confine`` reduces the entrypoint's process to the privileges of a task. The user sees the output of the entrypoint
    if ``shown`` is set or the entrypoint fails. Raises CommandError if the entrypoint ends without running its command.
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
    mark = f"penroot-{os.urandom(8).hex()}"  # marks our lines: the entrypoint may write lines too
    with started, end:
        with say, wait:
            child = os.fork()
            if child == 0:
                _execute(container, mark, (output.writer, say, wait), confine)
        with Fd(os.pidfd_open(child)) as process:
            reports = _reports(started, process, output, mark)
            pid = next(reports, "")
            if not pid.isdigit():
                raise _failure(child, process)
            try:
                with open(f"/proc/{pid}/environ", "rb") as f:
                    words = os.fsdecode(f.read()).split("\0")
                workdir = os.readlink(f"/proc/{pid}/cwd")
                os.write(end, f"{mark}\n".encode())
                waited = next(reports, "") == mark
            except OSError:
                waited = False
        if not waited:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise CommandError(f"the command of the image's entrypoint did not wait for descriptor {_END}", hint=_HINT)
        return dict(word.partition("=")[::2] for word in words if "=" in word), workdir


def _reports(started: int, process: int, output: Capture, mark: str) -> Iterator[str]:
    """For each line that ends with ``mark`` and a word, yield the word. Stop when the pipe or the entrypoint ends."""
    poll = select.poll()
    for fd in (started, process, output.reader):
        poll.register(fd, select.POLLIN)
    line = b""
    notice_at: float | None = time.monotonic() + _NOTICE_AFTER_S
    while True:
        ready = dict(poll.poll(max(0.0, notice_at - time.monotonic()) * 1000 if notice_at else None))
        if notice_at and time.monotonic() >= notice_at:
            tell("waiting for the image's entrypoint to run its command; use --no-container-entrypoint to skip it")
            notice_at = None
        output.read()
        if started not in ready:
            if process in ready:
                return
            continue
        read = os.read(started, 1 << 12)
        if not read:
            return
        *lines, line = (line + read).split(b"\n")
        for whole in lines:  # the entrypoint may have written the beginning of the line
            _, has_mark, word = os.fsdecode(whole).rpartition(f"{mark} ")
            if has_mark and " " not in word:
                yield word
        line = line[-(1 << 12) :]


def _failure(child: int, process: int) -> CommandError:
    """Kill an entrypoint that has not run penroot's command, if the entrypoint still runs. Return the error."""
    if not select.select([process], (), (), _EXIT_TIMEOUT_S)[0]:
        os.kill(child, 9)
        os.waitpid(child, 0)
        message = f"the entrypoint of the image closed descriptor {_STARTED}, which penroot needs to track its command"
        return CommandError(message, hint=_HINT)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return CommandError(
        f"the entrypoint of the image ended with status {code} and did not run the given command",
        hint=_HINT,
    )


def _execute(
    container: Container, mark: str, descriptors: tuple[int, int, int], confine: Callable[[], None]
) -> NoReturn:
    output, say, wait = descriptors
    try:
        # First move ``say`` and ``wait`` above the fixed numbers: dup2(2) closes a descriptor that has the new number.
        say, wait = (fcntl.fcntl(fd, fcntl.F_DUPFD, _END + 1) for fd in (say, wait))
        for number, fd in ((1, output), (2, output), (_STARTED, say), (_END, wait)):
            os.dup2(fd, number)
        # The command writes its PID, waits until penroot has read its environment, and reports success.
        script = f'echo {mark} $$ >&{_STARTED}; read -r penroot <&{_END}; echo "{mark} $penroot" >&{_STARTED}; exit 0\n'
        lines = os.memfd_create("penroot")
        os.write(lines, script.encode())
        os.dup2(lines, _SCRIPT)
        linux.close_range(3, _SCRIPT - 1, 0)
        linux.close_range(_END + 1, 0xFFFFFFFF, 0)
        confine()
        # Pass the script as a file, not with -c: the entrypoint may join its arguments, as in: exec bash -lc "$*"
        container.execute(("sh", f"/proc/self/fd/{_SCRIPT}"))
    except PenrootError as e:
        os.write(2, f"{e}\n".encode())
    finally:
        os._exit(127)
