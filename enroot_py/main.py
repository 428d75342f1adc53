"""Entry point of ``penroot``. start, batch, version, --help and the verbs of cli/quick.py do not import click."""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from enroot_py.base.errors import PenrootError


QUICK = ("cp", "exec", "list", "logs", "ps", "stop", "wait")  # the keys of quick.VERBS
# verb -> name of the line for the verb's modules in PACK, the file of compiled modules (see base/pack.py)
_LINES = {"start": "start", "batch": "start", **dict.fromkeys(QUICK, "exec"), "list": "list"}


def main(command: Callable[[list[str]], int] | None = None) -> None:
    """Call ``command`` (default: _run) with this process's arguments, and exit with the status that it returns."""
    import _signal

    from enroot_py.base import pack

    line = _LINES.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if line and command is None:
        # A start needs no garbage collection, which would take 5 % of its time. A pull turns it on again.
        gc.disable()
        pack.load(line)
    from enroot_py.base.errors import PenrootError, cause

    # A parent that ignores SIGCHLD passes this setting on. With it, the kernel would drop the exit statuses of our
    # children, and Python would report success.
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    if sys.stdin is None or sys.stdout is None or sys.stderr is None:
        _open_standard_streams()
    try:
        status = (command or _run)(sys.argv[1:])
        sys.stdout.flush()  # report a write error here instead of at exit
        sys.exit(status)
    except PenrootError as e:
        from enroot_py import called_as

        if called_as() == "enroot":
            sys.stdout.write(getattr(e, "usage", ""))
        root_cause = cause(e)
        _print_error(root_cause or e)
        sys.exit((root_cause or e).exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of stdout has gone: discard the rest of the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except ImportError as e:
        if os.environ.get("PENROOT_DEBUG"):
            raise
        from enroot_py import LIBRARY

        hint = f"install penroot again, or run `make dev` in a source tree ({LIBRARY})"
        _print_error(PenrootError(f"the installation of penroot is incomplete: {e}", hint=hint))
        sys.exit(1)
    except OSError as e:
        if os.environ.get("PENROOT_DEBUG"):
            raise
        if root_cause := cause(e):
            _print_error(root_cause)
        else:
            _report(e)
        sys.exit(1)
    finally:
        # Skip the three garbage collections at exit. An exception and its traceback are a cycle, which may include a
        # struct sequence, such as the result of pwd.getpwuid(). If the last collection clears the type of the struct
        # sequence first, CPython 3.11 prints a SystemError, because structseq_dealloc() reads the length from the type.
        gc.freeze()


def _open_standard_streams() -> None:
    """Open /dev/null for closed standard streams: stdin write-only and stdout read-only, so that I/O fails.

    If a stream stayed closed, the next open(2) would return its number, and output would go to the opened file.
    """
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDWR)):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, flags)
            os.dup2(fd, number)  # also makes the descriptor inheritable
            if fd != number:
                os.close(fd)
            else:
                os.set_inheritable(fd, True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _run(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else ""
    if verb in ("start", "batch"):
        from enroot_py.cli.start import main as start

        start(arguments[1:], batch=verb == "batch")
        return 0
    if verb == "version" and len(arguments) == 1:
        from enroot_py import version

        sys.stdout.write(version() + "\n")
        return 0
    if arguments in (["-h"], ["--help"]) and (text := _help()):
        sys.stdout.write(text)
        return 0
    gc.disable()  # imports leave no garbage
    if verb in QUICK:
        from enroot_py.cli import quick

        status = quick.main(quick.VERBS[verb], arguments[1:])
        if status is not None:
            sys.stdout.flush()
            os._exit(status)  # freeing all objects would take a tenth of the time
    from enroot_py.cli.verbs import main as cli

    gc.freeze()
    gc.enable()
    os.umask(os.umask(0o077) & 0o077)  # a umask must not keep us from using our new files
    return cli(arguments)


def _help() -> str:
    """Return the help text in PACK, or "" if click would print another text for this program name or width."""
    from enroot_py.base import pack

    if os.path.basename(sys.argv[0]) != "penroot":
        return ""
    variable = os.environ.get("COLUMNS", "").strip()
    columns = int(variable) if variable.isdecimal() else 0
    try:
        columns = columns or os.get_terminal_size(1).columns
    except OSError:
        pass  # stdout is not a terminal: the width is not limited
    return "" if 0 < columns < 80 else pack.help_text()


def _print_error(error: PenrootError) -> None:
    from enroot_py.base import log

    log.error(str(error))
    if error.hint:
        log.hint(error.hint)


def _report(error: OSError) -> None:
    """Report an OSError that no caller has turned into a PenrootError."""
    import errno

    from enroot_py.base import log

    try:
        from enroot_py.base import filesystems
    except ImportError:  # in the container: rootfs.import_no_files() forbids imports
        log.error(str(error))
        return
    message, hint = filesystems.in_words(error)
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise flushing the buffered output fails again at exit
        message = f"cannot write the output: {error.strerror}"
        hint = "check the file or pipe that stdout goes to: it is full, broken or closed"
    log.error(message)
    log.hint(hint or "set PENROOT_DEBUG=1 to show a traceback")
