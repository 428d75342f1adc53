"""Entry of the command ``penroot``: the quick verbs here, the others through click."""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from enroot_py.base.errors import PenrootError


def main(command: Callable[[list[str]], int] | None = None) -> None:
    """Run the command line of this process, penroot's or that of another ``command``, and exit with its status."""
    import _signal

    from enroot_py.base import pack

    if sys.argv[1:2] in (["start"], ["batch"]):
        # Nothing lives long enough there to be garbage, and collections cost a twentieth; a pull has them again.
        gc.disable()
        pack.load(pack.START)
    from enroot_py.base.errors import PenrootError, cause

    # Whose parent ignores it loses the status of each child, and Python would take failures for successes.
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    if sys.stdin is None or sys.stdout is None or sys.stderr is None:
        _plug()
    try:
        status = (command or _run)(sys.argv[1:])
        sys.stdout.flush()  # or what cannot be written is told at exit, not by us
        sys.exit(status)
    except PenrootError as e:
        from enroot_py import called_as

        if called_as() == "enroot":
            sys.stdout.write(getattr(e, "usage", ""))
        of_image = cause(e)
        _say(of_image or e)
        sys.exit((of_image or e).exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our stdout is gone; nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except ImportError as e:
        if os.environ.get("PENROOT_DEBUG"):
            raise
        from enroot_py import LIBRARY

        hint = f"install it again, or make a source tree ready: make dev; see {LIBRARY}"
        _say(PenrootError(f"penroot is not whole: {e}", hint=hint))
        sys.exit(1)
    except OSError as e:
        if os.environ.get("PENROOT_DEBUG"):
            raise
        if of_image := cause(e):
            _say(of_image)
        else:
            _failed(e)
        sys.exit(1)
    finally:
        # Python would look for garbage three times as it ends. An exception and the frames of its traceback are a
        # cycle, which may hold a tuple with named fields, as of pwd.getpwuid(). In the last collection its type may be
        # cleared first, and CPython 3.11 then prints a SystemError: structseq_dealloc() asks the type for a length.
        gc.freeze()


def _plug() -> None:
    """Give what was closed among stdin, stdout and stderr something that cannot be read or written.

    Else the next file that is opened takes the number, and what a program prints goes into it. What goes to stderr
    nobody misses.
    """
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDWR)):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, flags)
            os.dup2(fd, number)  # which lets programs have it
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
    gc.disable()  # nothing of what is imported is garbage
    from enroot_py.cli.verbs import main as cli

    gc.freeze()
    gc.enable()
    os.umask(os.umask(0o077) & 0o077)  # what is made here, its owner can use
    return cli(arguments)


def _help() -> str:
    """What click would say, where that is known; "" where it would be another text."""
    from enroot_py.base import pack

    if os.path.basename(sys.argv[0]) != "penroot":
        return ""
    asked = os.environ.get("COLUMNS", "").strip()
    columns = int(asked) if asked.isdecimal() else 0
    try:
        columns = columns or os.get_terminal_size(1).columns
    except OSError:
        pass  # as many as it takes
    return "" if 0 < columns < 80 else pack.help_text()


def _say(error: PenrootError) -> None:
    from enroot_py.base import log

    log.error(str(error))
    if error.hint:
        log.hint(error.hint)


def _failed(error: OSError) -> None:
    """Report a failed system call for which no caller has words."""
    import errno

    from enroot_py.base import log

    try:
        from enroot_py.base import filesystems
    except ImportError:  # in the container: rootfs.import_no_files()
        log.error(str(error))
        return
    message, hint = filesystems.in_words(error)
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the exit fails with what is still buffered
        message = f"cannot write the output: {error.strerror}"
        hint = "what stdout goes to is full, broken or closed"
    log.error(message)
    log.hint(hint or "PENROOT_DEBUG=1 shows where")
