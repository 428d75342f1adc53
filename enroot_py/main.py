"""Entry of the command ``penroot``: the quick verbs here, the others through click."""

import os
import sys


def main() -> None:
    """Run the command line of this process and exit with its status."""
    arguments = sys.argv[1:]
    verb = arguments[0] if arguments else ""
    from enroot_py.errors import PenrootError

    try:
        if verb in ("start", "batch"):
            from enroot_py.start import main as start

            start(arguments[1:], batch=verb == "batch")
            sys.exit(0)
        if verb == "version" and len(arguments) == 1:
            from enroot_py import __version__

            sys.stdout.write(__version__ + "\n")
            sys.exit(0)
        from enroot_py.cli import main as cli

        cli(arguments)
    except PenrootError as e:
        from enroot_py import log

        log.error(str(e))
        if e.hint:
            log.sink("HINT", e.hint)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our stdout is gone; nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
