"""The only door to other programs. Nothing on the start path comes here."""

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

SBIN = "/usr/sbin:/sbin:/usr/local/sbin"  # not in the PATH of every user
_SHOWN = 10  # lines


def find(program: str, *, package: str, path: str | None = None) -> str:
    """Absolute path of ``program``, looked up in ``path`` or PATH; PenrootError naming the package that has it."""
    there = shutil.which(program, path=path) or shutil.which(program, path=SBIN)
    if there is None:
        raise PenrootError(f"{program} is not installed", hint=f"it is in the package {package}")
    return there


@dataclass(frozen=True, slots=True)
class Program:
    """A program with its arguments, and what it runs with."""

    command: Sequence[str]
    error: type[PenrootError] = PenrootError  # what is raised where it fails
    environ: Mapping[str, str] | None = None
    stdin: int = subprocess.DEVNULL
    stdout: int | None = None  # a descriptor
    before: Callable[[], None] | None = None  # called by the process that becomes it
    timeout: float | None = None  # seconds after which it is killed
    tolerate: Callable[[int, list[str]], bool] | None = None  # whether a status and these lines are a success
    warnings: bool = False  # show what it wrote to stderr where it succeeds
    expected: str = "\n"  # do not show stderr lines with this prefix

    def run(self) -> str:
        """Run it to its end, or ours, and return its stdout unless that is elsewhere.

        Raises ``error`` with what it wrote, to stderr if it did: the line that begins with its own name, which
        a usage text may follow, or else the last two.
        """
        log.debug("run " + " ".join(self.command))
        done = self._done()
        if done.returncode < 0:
            name = signal.Signals(-done.returncode).name
            hint = "out of memory? see --mem and dmesg" if done.returncode == -signal.SIGKILL else ""
            raise self.error(f"{self.command[0]} was killed by {name}", hint=hint)
        if done.returncode != 0:
            written = done.stderr if done.stderr.strip() else done.stdout or ""  # docker-credential-*: to stdout
            self._judge(done.returncode, _lines(written))
        elif self.warnings:
            self._show([line for line in _lines(done.stderr) if not line.startswith(self.expected)])
        return done.stdout or ""

    def _done(self) -> subprocess.CompletedProcess[str]:
        parent = os.getpid()

        def begin() -> None:
            if self.before:
                self.before()
            workers.die_with_parent(signal.SIGKILL)  # last, for a change of credentials takes it back
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
                preexec_fn=begin,  # there is one thread
                timeout=self.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self.error(f"{self.command[0]} has not ended within {self.timeout:.0f} s") from None
        except OSError as e:  # a script without its interpreter, say
            why, hint = e.strerror, filesystems.OF_PROCESS.get(e.errno or 0, "")
            if e.errno == errno.EAGAIN:
                why, hint = filesystems.no_process()
            raise self.error(f"cannot execute {self.command[0]}: {why}", hint=hint) from e

    def _judge(self, status: int, lines: list[str]) -> None:
        """Raises ``error`` for a status that is no success."""
        if self.tolerate and self.tolerate(status, lines):
            return
        program = self.command[0]
        own = [line.partition(": ")[2] for line in lines if line.startswith((f"{program}: ", f"{_name(program)}: "))]
        why = "; ".join(own[:1] or lines[-2:]) if lines else f"exit status {status}"
        raise self.error(f"{program} failed: {why}", hint="command: " + " ".join(self.command))

    def _show(self, lines: list[str]) -> None:
        """What it could not do, and does not count as a failure."""
        name = _name(self.command[0])
        for line in lines[:_SHOWN]:
            log.warn(f"{name}: {line}")
        if len(lines) > _SHOWN:
            log.warn(f"{name}: {len(lines) - _SHOWN} more lines")


def _name(program: str) -> str:
    return os.path.basename(program)


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]
