"""Write and read /etc/rc and /etc/environment, the files that turn a root file system into an enroot image.

/etc/rc is a shell script that executes the image's program. If an import wrote the script, as is usual, penroot parses
the script and starts no shell. Any other script runs in the image's /bin/sh.

/etc/environment has plain values, with newlines replaced by spaces. A start replaces ``${VAR}`` in a line, and may
strip outer quotes and spaces. If any of this would change a value, a comment before the line has the exact value, with
``\\\\`` and ``\\n`` for a backslash and a newline. enroot skips the comment::

    # penroot-exact: MOTD=one\\ntwo
    MOTD=one two

The comment counts only if the next line is unchanged, so that an edited line takes effect. fstab.py handles the third
file of an image, /etc/fstab. Sources: enroot(1), image format; OCI image specification, "Image Configuration".

Every start imports this module, so it imports neither re nor json.
"""

from __future__ import annotations

from enroot_py.base import digests, paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_PROVENANCE = "enroot-provenance: "
_DIGEST = "# penroot-image: "
_RC = """\
mkdir -p {workdir} 2> /dev/null
cd {workdir} && unset OLDPWD || exit 1

if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi

if [ $# -gt 0 ]; then
    exec {entrypoint} "$@"
else
    exec {entrypoint} {command}
fi
"""
RC_LOCAL = """\
# Sourced by /etc/rc when the container starts: change the environment, the
# positional parameters or the working directory of its command here.
"""
_EXACT = "# penroot-exact: "
_QUOTED_CHARS, _QUOTED_LINES = 40, 5  # a warning quotes at most 40 characters of a line, and 5 lines
_MAX_SCRIPT_CHARS = 1 << 20  # do not parse longer scripts: their words come near the kernel's limit for arguments


class Exec:
    """Working directory, entrypoint and command of an image (OCI image config, "config")."""

    __slots__ = ("workdir", "entrypoint", "command")

    def __init__(self, workdir: str, entrypoint: tuple[str, ...], command: tuple[str, ...]) -> None:
        self.workdir = workdir
        self.entrypoint = entrypoint
        self.command = command

    def argv(self, arguments: tuple[str, ...], entrypoint: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return the words to execute: the entrypoint, then ``arguments`` or the image's command."""
        entrypoint = self.entrypoint if entrypoint is None else entrypoint
        if not entrypoint and arguments[:1] == ("--",):
            arguments = arguments[1:]  # exec in /etc/rc would take -- as the end of its own options
        return entrypoint + (arguments or self.command)


def write_rc(provenance: str, labels: Mapping[str, str], run: Exec) -> str:
    """Return /etc/rc: provenance and labels as comments, then the program of the image with every word quoted.

    The text is identical to enroot's, unless enroot's script would change the meaning of the image config.
    """
    comments = [_PROVENANCE + provenance, *(f"{key} {value}" for key, value in labels.items())]
    script = _RC.format(
        workdir=f'"{run.workdir}"' if not set(run.workdir) & set('"$`\\\n') else quote(run.workdir),
        entrypoint=" ".join(map(quote, run.entrypoint)),
        command=" ".join(map(quote, run.command)),
    )
    return "".join(f"# {_one_line(comment)}\n" for comment in comments) + "\n" + script


def quote(word: str) -> str:
    """Quote a word for sh(1) with single quotes."""
    return "'" + word.replace("'", "'\\''") + "'"


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def provenance(rc: str) -> str:
    """Return the reference that write_rc() has recorded, or ""."""
    mark = "# " + _PROVENANCE
    return next((line.removeprefix(mark) for line in rc.splitlines() if line.startswith(mark)), "")


def write_digest(digest: str) -> str:
    """Return the line of /etc/rc.local that records the image of a root filesystem."""
    return f"{_DIGEST}{digest}\n"


def image_digest(rc_local: str) -> str:
    """Return the digest in the last line that write_digest() made, or ""."""
    lines = [line for line in rc_local.split("\n") if line.startswith(_DIGEST)]
    digest = lines[-1].removeprefix(_DIGEST) if lines else ""
    return digest if digests.is_digest(digest) else ""


class ImageScripts:
    """The scripts of the image beneath the directory ``root``, read again only after a change."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._states: list[tuple[int, ...]] = []
        self._exec: Exec | None = None

    def exec(self) -> Exec | None:
        """Return the image's program, or None if only a shell can run /etc/rc. Raises ContainerError."""
        states = [paths.state(self._root, path) for path in ("/etc/rc", "/etc/rc.local")]
        if states != self._states:
            self._exec, self._states = of_image(self._root), states
        return self._exec


def of_image(root: int) -> Exec | None:
    """Return the program of the image in the directory ``root``, or None if only a shell can run /etc/rc."""
    return read_rc(paths.text(root, "/etc/rc"), paths.text(root, "/etc/rc.local"))


def read_rc(rc: str, rc_local: str) -> Exec | None:
    """Return the program of an /etc/rc that an import wrote, or None if the script may do anything else.

    Also returns None if /etc/rc.local has commands, if a word needs a shell, or if a script is too long.
    """
    if len(rc) > _MAX_SCRIPT_CHARS or len(rc_local) > _MAX_SCRIPT_CHARS or any(_statements(rc_local)):
        return None
    statements, form = _statements(rc), [line.strip() for line in _RC.splitlines() if line]
    if len(statements) != len(form):
        return None
    fields = []
    for statement, line in zip(statements, form, strict=True):
        start, brace, rest = line.partition("{")
        end = rest.rpartition("}")[2]
        if not statement.startswith(start.rstrip()) or not statement.endswith(end) or not brace and statement != line:
            return None
        if brace:
            fields.append(_words(statement[len(start) : len(statement) - len(end)]))
    made, workdir, entrypoint, full = fields
    if made is None or workdir is None or entrypoint is None or full is None:
        return None
    if len(workdir) != 1 or made != workdir or full[: len(entrypoint)] != entrypoint:
        return None
    return Exec(workdir[0], entrypoint, full[len(entrypoint) :])


def _statements(script: str) -> list[str]:
    """Return the statements of a script without blank lines and comments. A quoted newline is part of a statement."""
    out: list[str] = []
    going: list[str] = []  # lines of the current statement
    quote = ""
    for line in script.split("\n"):
        if not going:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
        going.append(line)
        quote = _open_quote(line, quote)
        if not quote:
            out.append("\n".join(going))
            going = []
    return [*out, "\n".join(going)] if going else out


def _open_quote(line: str, quote: str) -> str:
    """Return the quote that is open at the end of a line, or ""; ``quote`` is open at its beginning."""
    at = 0
    while at < len(line):
        c = line[at]
        if quote == "'":
            quote = "" if c == "'" else quote
        elif c == "\\":
            at += 1
        elif quote == '"':
            quote = "" if c == '"' else quote
        elif c in "'\"":
            quote = c
        at += 1
    return quote


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=+,@%^")


def _words(text: str) -> tuple[str, ...] | None:
    """Return shell words, or None if the text needs more than quote removal."""
    words: list[str] = []
    word: str | None = None
    at = 0
    while at < len(text):
        c = text[at]
        at += 1
        if c in " \t":
            if word is not None:
                words.append(word)
            word = None
        elif c == "'":
            end = text.find("'", at)
            if end < 0:
                return None
            word, at = (word or "") + text[at:end], end + 1
        elif c == '"':
            end = text.find('"', at)
            inner = text[at:end]
            if end < 0 or any(special in inner for special in "$`\\"):
                return None
            word, at = (word or "") + inner, end + 1
        elif c == "\\" and text[at : at + 1] == "'":
            word, at = (word or "") + "'", at + 1
        elif c in _PLAIN:
            word = (word or "") + c
        else:
            return None
    if word is not None:
        words.append(word)
    return tuple(words)


def assignment(line: str) -> tuple[str, str, str]:
    """Split a line of an environment file into key, ``=`` and value. Trailing spaces are part of the value.

    An image's /etc/environment, the files in environ.d and the files that hooks write all have this syntax.
    """
    return line.lstrip().partition("=")


def read_environment(
    text: str, read: Callable[[str], str] | None = None, ignored: list[str] | None = None
) -> dict[str, str]:
    """Return the variables of an image's /etc/environment. Append lines that are not ``KEY=VALUE`` to ``ignored``.

    ``read`` interprets a value, unless the comment above the line gives the exact value.
    """
    environ: dict[str, str] = {}
    exact = ""
    for line in text.split("\n"):
        if line.startswith("#"):
            exact = line[len(_EXACT) :] if line.startswith(_EXACT) else ""
            continue
        line = line.lstrip()
        key, equals, value = assignment(line)
        if equals and key:
            unescaped = _unescape(exact)
            if unescaped.startswith(key + "=") and _flat(unescaped) == line:
                environ[key] = unescaped[len(key) + 1 :]
            else:
                environ[key] = read(value) if read else value
        elif line.strip() and ignored is not None:
            ignored.append(line)
        exact = ""
    return environ


def write_environment(variables: Mapping[str, str]) -> str:
    """Return /etc/environment, from which read_environment() reads ``variables`` back exactly."""
    out = []
    for key, value in variables.items():
        line = f"{key}={value}"
        if "${" in value or _flat(line) != line or value.strip() != value or value[:1] in ("'", '"'):
            out.append(_EXACT + line.replace("\\", "\\\\").replace("\n", "\\n") + "\n")
        out.append(_flat(line) + "\n")
    return "".join(out)


def _flat(line: str) -> str:
    return line.replace("\n", " ")


def _unescape(text: str) -> str:
    return "\\".join(part.replace("\\n", "\n") for part in text.split("\\\\"))


def variables(env: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return ``config.Env`` of an image config as a mapping, and the words that set no variable."""
    out, ignored = {}, []
    for word in env:
        key, equals, value = word.partition("=")
        if equals and key and "\n" not in key:
            out[key] = value
        else:
            ignored.append(word)
    return out, ignored


def no_variables(lines: Sequence[str]) -> str:
    """Describe ``lines`` that set no variable, for a warning."""
    short = [line[:_QUOTED_CHARS] + "..." * (len(line) > _QUOTED_CHARS) for line in lines[:_QUOTED_LINES]]
    return f"{', '.join(map(repr, short))}{', ...' if len(lines) > _QUOTED_LINES else ''}: not NAME=VALUE, ignored"
