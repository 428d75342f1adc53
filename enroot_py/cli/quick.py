"""A table of verbs that run without click, and a parser for them. Importing click takes longer than most verbs take.

The parser accepts only correct command lines. For help and for errors, verbs.py makes click commands from the table.
"""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.errors import OWN_ERROR, PenrootError, with_status
from enroot_py.base.frozen import Frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Option(Frozen):
    """An option; a flag has no metavar. If ``choices`` is not empty, only these values are accepted."""

    names: tuple[str, ...]
    metavar: str
    help: str
    multiple: bool = False
    choices: tuple[str, ...] = ()

    @property
    def attribute(self) -> str:
        """Return the name of the parameter of Verb.run: bool for a flag, tuple if ``multiple``, else str or None."""
        return self.names[-1].lstrip("-").replace("-", "_")


class Argument(Frozen):
    """A positional argument: one word or, with ``many``, all remaining. With ``kind``, complete container names."""

    name: str
    metavar: str
    many: bool = False
    required: bool = True
    kind: str = ""


class Verb(Frozen):
    """A verb of penroot. With ``mixed``, options are also accepted after the first argument.

    ``run`` gets the values of options and arguments by name, and returns the exit status. ``own_error`` is the exit
    status for errors of penroot itself. Verbs that enroot lacks use OWN_ERROR.
    """

    name: str
    help: str
    options: tuple[Option, ...]
    arguments: tuple[Argument, ...]
    run: Callable[..., int]
    mixed: bool = True
    own_error: int = 1


def parse(verb: Verb, words: list[str]) -> dict[str, Any] | None:
    """Return the values of a command line, or None if it is incorrect."""
    by_name = {name: option for option in verb.options for name in option.names}
    values: dict[str, Any] = {o.attribute: () if o.multiple else None if o.metavar else False for o in verb.options}
    rest = list(words)
    arguments: list[str] = []
    while rest:
        word = rest.pop(0)
        if word == "--" or not verb.mixed and (arguments or not word.startswith("-") or word == "-"):
            arguments += rest if word == "--" else [word, *rest]
            break
        if not word.startswith("-") or word == "-":
            arguments.append(word)
            continue
        name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        option = by_name.get(name)
        if option is None or not option.metavar and equals:
            return None
        if option.metavar and not equals:
            value = rest.pop(0) if rest else ""
        if option.metavar and (not value or option.choices and value not in option.choices):
            return None
        text = value if option.metavar else True
        values[option.attribute] = (*values[option.attribute], text) if option.multiple else text
    return _with_arguments(verb, values, arguments)


def _with_arguments(verb: Verb, values: dict[str, Any], words: list[str]) -> dict[str, Any] | None:
    for argument in verb.arguments:
        if not words and argument.required:
            return None
        values[argument.name] = tuple(words) if argument.many else words.pop(0) if words else None
        words = [] if argument.many else words
    return None if words else values


def run(verb: Verb, values: dict[str, Any]) -> int:
    """Run a verb and return its exit status. Raises PenrootError."""
    try:
        return verb.run(**values)
    except PenrootError as e:
        raise with_status(e, verb.own_error) from e.__cause__


def main(verb: Verb, words: list[str]) -> int | None:
    """Run a verb and return its exit status. Return None for an incorrect command line, which click must handle."""
    values = parse(verb, words)
    if values is None:
        return None
    from enroot_py.config.table import slips

    for line in slips(os.environ):
        log.warn(line)
    return run(verb, values)


def _list(fancy: bool, json: bool, format: str | None) -> int:
    from enroot_py.cli import listing

    return listing.show(fancy=fancy, as_json=json or format == "json")


def _exec(**values: Any) -> int:
    from enroot_py.cli import running

    return running.execute(**values)


def _ps(**values: Any) -> int:
    from enroot_py.cli import running

    return running.ps(**values)


def _logs(**values: Any) -> int:
    from enroot_py.cli import detached

    return detached.logs(**values)


def _wait(**values: Any) -> int:
    from enroot_py.cli import detached

    return detached.wait(**values)


def _stop(**values: Any) -> int:
    from enroot_py.cli import detached

    return detached.stop(**values)


def _cp(**values: Any) -> int:
    from enroot_py.cli import copying

    return copying.cp(**values)


_TARGET = Argument("target", "PID|NAME|JOBID[.STEPID]", kind="running")
_RUNNING = Argument("name", "NAME", kind="running")
_SEVERAL = Argument("names", "NAME...", many=True, kind="running")
_JSON = Option(("--json",), "", "Print JSON.")
_ENV = Option(("-e", "--env"), "KEY[=VALUE]", "Set KEY, or copy it from your environment.", multiple=True)

VERBS = {
    verb.name: verb
    for verb in (
        Verb(
            "exec",
            "Run a command in a running container.\n\nPID is a process of the container, NAME is its name, and "
            "JOBID[.STEPID] is the Slurm step that runs the container.",
            (
                _ENV,
                Option(("-w", "--workdir"), "DIR", "Run in DIR of the container (default: PID's working directory)."),
                Option(("-i", "--interactive"), "", "No effect: a command has its caller's stdin."),
                Option(("-t", "--tty"), "", "No effect: a command has its caller's terminal."),
                Option(("-u", "--user"), "USER", "Be USER in the container: root, or yourself."),
                Option(("--timeout",), "SECONDS", "End the command after SECONDS, and exit with 124."),
            ),
            (_TARGET, Argument("words", "COMMAND [ARG...]", many=True)),
            _exec,
            mixed=False,
        ),
        Verb(
            "list",
            "List the containers.",
            (
                Option(("-f", "--fancy"), "", "Show a table with the processes of each container."),
                _JSON,
                Option(("--format",), "FORMAT", "text or json (default: text).", choices=("text", "json")),
            ),
            (),
            _list,
        ),
        Verb(
            "ps",
            "List the processes of a container, or all running containers.",
            (_JSON,),
            (Argument("name", "[NAME]", required=False, kind="running"),),
            _ps,
            own_error=OWN_ERROR,
        ),
        Verb(
            "logs",
            "Print the output of a container in the background.",
            (Option(("-f", "--follow"), "", "Follow the output until the container ends."),),
            (_RUNNING,),
            _logs,
            own_error=OWN_ERROR,
        ),
        Verb(
            "wait",
            "Wait until containers in the background have ended.\n\nPrints the exit status of each.",
            (),
            (_SEVERAL,),
            _wait,
            own_error=OWN_ERROR,
        ),
        Verb(
            "stop",
            "End running containers.",
            (
                Option(("-s", "--signal"), "SIGNAL", "Send SIGNAL first (default: TERM)."),
                Option(("-t", "--timeout"), "SECONDS", "Kill after SECONDS (default: 10)."),
            ),
            (_SEVERAL,),
            _stop,
            own_error=OWN_ERROR,
        ),
        Verb(
            "cp",
            "Copy files to or from a running container.\n\n"
            "One of SOURCE and TARGET is NAME:PATH, a path in a container; the other is a path on the host.",
            (),
            (Argument("source", "SOURCE"), Argument("target", "TARGET")),
            _cp,
            own_error=OWN_ERROR,
        ),
    )
}
