"""Entry of the command ``penroot``: the quick verbs here, the others through click."""

import os
import sys


def main() -> None:
    """Run the command line of this process and exit with its status."""
    import _signal

    from enroot_py.errors import PenrootError

    # Whose parent ignores it loses the status of each child, and Python would take failures for successes.
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    try:
        status = _run(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()  # or what cannot be written is told at exit, not by us
        sys.exit(status)
    except PenrootError as e:
        from enroot_py import called_as, log

        if called_as() == "enroot":
            sys.stdout.write(getattr(e, "usage", ""))
        log.error(str(e))
        if e.hint:
            log.hint(e.hint)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our stdout is gone; nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except OSError as e:
        if os.environ.get("PENROOT_DEBUG"):
            raise
        _failed(e)
        sys.exit(1)


def _run(arguments: "list[str]") -> int:
    verb = arguments[0] if arguments else ""
    if verb in ("start", "batch"):
        from enroot_py.start import main as start

        start(arguments[1:], batch=verb == "batch")
        return 0
    if verb == "version" and len(arguments) == 1:
        from enroot_py import version

        sys.stdout.write(version() + "\n")
        return 0
    from enroot_py.cli import main as cli

    return cli(arguments)


def _failed(error: OSError) -> None:
    """Say in one line what no caller had words for: mostly the file system is not as it should be."""
    import errno

    from enroot_py import log

    hint = "PENROOT_DEBUG=1 shows where"
    if error.filename is not None:
        where = error.filename
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            from enroot_py import filesystems

            hint = filesystems.way_out(error, os.fsdecode(where))
    elif isinstance(error, FileNotFoundError) and os.stat(".").st_nlink == 0:
        where, hint = "the working directory is gone", "cd to one that exists"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        where, hint = "cannot write the output", "what stdout goes to is full or broken"
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the exit fails with what is still buffered
    else:
        where = "a system call failed"
    log.error(f"{where}: {error.strerror or error}")
    log.hint(hint)
