"""Run other programs. Do not import this in the code that starts a container: subprocess is slow to import."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from enroot_py.base import filesystems, log, workers
from enroot_py.base.errors import PenrootError

SBIN = "/usr/sbin:/sbin:/usr/local/sbin"  # PATH does not include these for every user
_SHOWN_LINES = 10


def find(program: str, *, package: str, path: str | None = None) -> str:
    """Return the absolute path of ``program`` in ``path`` (default: PATH) or SBIN.

    Raises PenrootError, whose hint names ``package``.
    """
    executable = shutil.which(program, path=path) or shutil.which(program, path=SBIN)
    if executable is None:
        raise PenrootError(f"{program} is not installed", hint=f"install the package {package}")
    return executable


@dataclass(frozen=True, slots=True)
class Program:
    """A program with its arguments, environment and descriptors."""

    command: Sequence[str]
    error: type[PenrootError] = PenrootError  # raised if it fails
    environ: Mapping[str, str] | None = None
    stdin: int = subprocess.DEVNULL
    stdout: int | None = None  # a descriptor
    before: Callable[[], None] | None = None  # called in the child before execve(2)
    timeout: float | None = None  # seconds until it is killed
    tolerate: Callable[[int, list[str]], bool] | None = None  # (status, stderr lines): whether to accept a failure
    warnings: bool = False  # show the stderr of a program that succeeds
    expected: str = "\n"  # with ``warnings``: a prefix of lines not to show

    def run(self) -> str:
        """Run the program, and return its stdout, or "" if stdout is redirected. The program dies with this process.

        If the program fails, raises ``error`` with the first line of stderr that begins with the program's name: a
        usage text may follow this line. Without such a line, ``error`` has the last two lines. If stderr is empty, the
        lines come from stdout.
        """
        log.debug("run " + " ".join(self.command))
        done = self._done()
        if done.returncode < 0:
            name = signal.Signals(-done.returncode).name
            hint = "out of memory? see --mem and dmesg" if done.returncode == -signal.SIGKILL else ""
            raise self.error(f"{self.command[0]} was killed by {name}", hint=hint)
        if done.returncode != 0:
            written = done.stderr if done.stderr.strip() else done.stdout or ""  # docker-credential-* uses stdout
            self._judge(done.returncode, _lines(written))
        elif self.warnings:
            self._show([line for line in _lines(done.stderr) if not line.startswith(self.expected)])
        return done.stdout or ""

    def _done(self) -> subprocess.CompletedProcess[str]:
        parent = os.getpid()

        def begin() -> None:
            if self.before:
                self.before()
            workers.die_with_parent(signal.SIGKILL)  # last, because a change of credentials cancels it: prctl(2)
            if os.getppid() != parent:
                os._exit(128 + signal.SIGKILL)

        try:
            return subprocess.run(
                self.command,
                stdin=self.stdin,
                stdout=subprocess.PIPE if self.stdout is None else self.stdout,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=self.environ,
                preexec_fn=begin,  # safe: begin() takes no lock that another thread may hold
                timeout=self.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self.error(f"{self.command[0]} has not ended within {self.timeout:.0f} s") from None
        except OSError as e:  # for example, a script whose interpreter is missing
            reason, hint = e.strerror, filesystems.OF_PROCESS.get(e.errno or 0, "")
            if e.errno == errno.EAGAIN:
                reason, hint = filesystems.no_process()
            raise self.error(f"cannot execute {self.command[0]}: {reason}", hint=hint) from e

    def _judge(self, status: int, lines: list[str]) -> None:
        """Raise ``error`` unless the exit status is tolerated."""
        if self.tolerate and self.tolerate(status, lines):
            return
        program = self.command[0]
        own_lines = [
            line.partition(": ")[2] for line in lines if line.startswith((f"{program}: ", f"{_name(program)}: "))
        ]
        reason = "; ".join(own_lines[:1] or lines[-2:]) if lines else f"exit status {status}"
        raise self.error(f"{program} failed: {reason}", hint="command: " + " ".join(self.command))

    def _show(self, lines: list[str]) -> None:
        """Log the warnings of a successful program."""
        name = _name(self.command[0])
        for line in lines[:_SHOWN_LINES]:
            log.warn(f"{name}: {line}")
        if len(lines) > _SHOWN_LINES:
            log.warn(f"{name}: {len(lines) - _SHOWN_LINES} more lines")


def _name(program: str) -> str:
    return os.path.basename(program)


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]
