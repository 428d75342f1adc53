"""The only door to other programs. Nothing on the start path comes here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from enroot_py.base import filesystems, log, workers
from enroot_py.base.errors import PenrootError

_SHOWN = 10  # lines


def find(program: str, *, package: str, path: str | None = None) -> str:
    """Absolute path of ``program``, looked up in ``path`` or PATH; PenrootError naming the package that has it."""
    found = shutil.which(program, path=path) or shutil.which(program, path="/usr/sbin:/sbin:/usr/local/sbin")
    if found is None:
        raise PenrootError(f"{program} is not installed", hint=f"it is in the package {package}")
    return found


def run(
    command: Sequence[str],
    *,
    error: type[PenrootError] = PenrootError,
    environ: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    before: Callable[[], None] | None = None,
    timeout: float | None = None,
    tolerate: Callable[[int, list[str]], bool] | None = None,
    warnings: bool = False,
) -> str:
    """Run ``command`` to its end and return its stdout, unless it goes to the descriptor ``stdout``.

    The process that becomes it calls ``before``, and is killed after ``timeout`` seconds, or when we are.
    With ``warnings`` what it wrote to stderr is shown where it succeeds.

    Raises ``error`` when it fails, and ``tolerate`` does not take its status and lines for a success: with what it
    wrote, to stderr if it did: the line that begins with its own name, which a usage text may follow, or else the
    last two.
    """
    log.debug("run " + " ".join(command))
    parent = os.getpid()

    def begin() -> None:
        if before:
            before()
        workers.die_with_parent(signal.SIGKILL)  # last, for a change of credentials takes it back
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)

    try:
        done = subprocess.run(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environ,
            preexec_fn=begin,  # there is one thread
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise error(f"{command[0]} has not ended within {timeout:.0f} s") from None
    except OSError as e:  # a script without its interpreter, say
        hint = filesystems.OF_PROCESS.get(e.errno or 0, "")
        raise error(f"cannot execute {command[0]}: {e.strerror}", hint=hint) from e
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        hint = "out of memory? see --mem and dmesg" if done.returncode == -signal.SIGKILL else ""
        raise error(f"{command[0]} was killed by {name}", hint=hint)
    if done.returncode != 0:
        said = done.stderr if done.stderr.strip() else done.stdout or ""  # docker-credential-* complain on stdout
        lines = [line for line in said.splitlines() if line.strip()]
        if tolerate and tolerate(done.returncode, lines):
            return done.stdout or ""
        prefixes = (f"{command[0]}: ", f"{os.path.basename(command[0])}: ")
        own = [line.partition(": ")[2] for line in lines if line.startswith(prefixes)]
        why = "; ".join(own[:1] or lines[-2:]) if lines else f"exit status {done.returncode}"
        raise error(f"{command[0]} failed: {why}", hint="command: " + " ".join(command))
    if warnings:  # what it could not do, and does not count as a failure
        name = os.path.basename(command[0])
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        for line in lines[:_SHOWN]:
            log.warn(f"{name}: {line}")
        if len(lines) > _SHOWN:
            log.warn(f"{name}: {len(lines) - _SHOWN} more lines")
    return done.stdout or ""
