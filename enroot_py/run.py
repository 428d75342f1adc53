"""The only door to other programs. Nothing on the start path comes here."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from enroot_py import log
from enroot_py.errors import PenrootError


def find(program: str, *, package: str) -> str:
    """Absolute path of ``program``, or PenrootError naming the package that has it."""
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin:/usr/local/sbin")
    if path is None:
        raise PenrootError(f"{program} is not installed", hint=f"it is in the package {package}")
    return path


def run(
    command: Sequence[str],
    *,
    error: type[PenrootError] = PenrootError,
    environ: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
) -> str:
    """Run ``command`` to its end and return its stdout, unless it goes to the descriptor ``stdout``.

    Raises ``error`` with the last two lines that it wrote, to stderr if it did, when it fails.
    """
    log.debug("run " + " ".join(command))
    done = subprocess.run(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environ,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr if done.stderr.strip() else done.stdout or ""  # docker-credential-* complain on stdout
        lines = [line for line in said.splitlines() if line.strip()]
        why = "; ".join(lines[-2:]) if lines else f"exit status {done.returncode}"
        raise error(f"{command[0]} failed: {why}", hint="command: " + " ".join(command))
    return done.stdout or ""
