"""/etc/rc: what an image runs.

It is a shell script, but nearly always the one that an import wrote; then its
meaning is read from it and no shell is started. Anything else runs in the
image's /bin/sh. Source: enroot(1), image format.
"""

from __future__ import annotations


class Exec:
    """Working directory, entrypoint and command of an image (OCI image config, "config")."""

    __slots__ = ("workdir", "entrypoint", "command")

    def __init__(self, workdir: str, entrypoint: tuple[str, ...], command: tuple[str, ...]) -> None:
        self.workdir = workdir
        self.entrypoint = entrypoint
        self.command = command

    def argv(self, arguments: tuple[str, ...]) -> tuple[str, ...]:
        """What runs: the entrypoint, then ``arguments`` or else the image's command."""
        if not self.entrypoint and arguments[:1] == ("--",):
            arguments = arguments[1:]  # of exec in the script, to which that is the end of its options
        return self.entrypoint + (arguments or self.command)


_LONGEST = 1 << 20  # characters of a script that is looked at: a kernel's limit of arguments is near
_FORM = (
    ("mkdir -p ", " 2> /dev/null"),
    ("cd ", " && unset OLDPWD || exit 1"),
    ("if [ -s /etc/rc.local ]; then", ""),
    (". /etc/rc.local", ""),
    ("fi", ""),
    ("if [ $# -gt 0 ]; then", ""),
    ("exec ", ' "$@"'),
    ("else", ""),
    ("exec ", ""),
    ("fi", ""),
)


def parse(rc: str, rc_local: str) -> Exec | None:
    """The meaning of the script that an import writes, or None where it is another script.

    None also where /etc/rc.local holds commands, or a word needs a shell, or it is far longer
    than what an import writes.
    """
    if len(rc) > _LONGEST or len(rc_local) > _LONGEST or any(_statements(rc_local)):
        return None
    lines = list(_statements(rc))
    if len(lines) != len(_FORM):
        return None
    inner = []
    for line, (start, end) in zip(lines, _FORM, strict=True):
        if not line.startswith(start.rstrip()) or not line.endswith(end):
            return None
        inner.append(line[len(start) : len(line) - len(end)])
    made, workdir, entrypoint, full = (_words(inner[i]) for i in (0, 1, 6, 8))
    if made is None or workdir is None or entrypoint is None or full is None:
        return None
    if len(workdir) != 1 or made != workdir or full[: len(entrypoint)] != entrypoint:
        return None
    return Exec(workdir[0], entrypoint, full[len(entrypoint) :])


def _statements(script: str) -> list[str]:
    """Lines that are neither blank nor comments; a quoted newline keeps a line going."""
    out: list[str] = []
    going: list[str] = []  # lines of one statement
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
    """The quote that is open at the end of a line, where ``quote`` is at its beginning; "" for none."""
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
    """Shell words, or None where more than quotes would be needed to know them."""
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
