"""Expand variables, parse yes and no, find base directories, and suggest a word for a typo.

Every start imports this module, so it imports nothing slow.
"""

from __future__ import annotations

import os
from _collections_abc import Callable, Iterable, Iterator, Mapping

# Commands that sites use in enroot.conf. expand() computes their output without a shell.
COMMANDS: dict[str, Callable[[], object]] = {
    "id -u": lambda: _ids()[0],
    "id -g": lambda: _ids()[1],
    "id -un": lambda: _user_name(),
    "whoami": lambda: _user_name(),
    "nproc": lambda: len(os.sched_getaffinity(0)),
    "hostname": lambda: os.uname().nodename,
    "hostname -s": lambda: os.uname().nodename.partition(".")[0],
}

# PATH if the environment has none. login(1) sets this value for root.
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

YES = ("1", "true", "yes", "y", "t", "on")
NO = ("0", "false", "no", "n", "f", "off")

_MAX_NESTED_DEFAULTS = 32  # such as ${A:-${B:-...}}
_MAX_VALUE_CHARS = 1 << 17  # MAX_ARG_STRLEN, execve(2): no program can get a longer value

_caller: tuple[int, int] | None = None


def expand(text: str, variables: Mapping[str, str], *, may_be_unset: Callable[[str], bool] = lambda _: True) -> str:
    """Replace variables and the commands of COMMANDS, without running a shell.

    A variable is ``$NAME``, ``${NAME}``, ``${NAME-default}`` or ``${NAME:-default}``.
    An unset variable is an empty string if ``may_be_unset`` accepts its name. Raises ValueError for other unset
    variables, for an unknown ``$(command)``, and for a value that is too long or too deeply nested.
    """

    if "$" not in text:
        return text

    def value(name: str) -> str:
        if name in variables:
            return variables[name]
        if name in ("USER", "LOGNAME"):  # login(1) sets these; a job with --export=NONE lacks them
            return _user_name()
        if not may_be_unset(name):
            raise ValueError(f"the variable {name} is not set: write ${{{name}:-}} if it may be unset")
        return ""

    out = ""
    while (at := text.find("$")) >= 0:
        _check_length(out)
        out, text = out + text[:at], text[at + 1 :]
        if text.startswith("("):
            command, close, text = text[1:].partition(")")
            known = COMMANDS.get(" ".join(command.split()))
            if not close or known is None:
                raise ValueError(f"$({command}) is not run: only {', '.join(f'$({c})' for c in COMMANDS)} are known")
            out += str(known())
        elif text.startswith("{"):
            end = _closing(text)
            inner, text = text[1:end], text[end + 1 :]
            name, dash, default = inner.partition("-")
            bare = name.removesuffix(":") if dash else name
            if not bare.replace("_", "a").isalnum():
                raise ValueError(f"${{{inner}}}: only ${{NAME}}, ${{NAME-default}} and ${{NAME:-default}} are known")
            if dash and (bare not in variables or not variables[bare] and bare != name):
                out += expand(default, variables, may_be_unset=may_be_unset)
            else:
                out += value(bare)
        else:
            name = _name(text)
            text = text[len(name) :]
            out += value(name) if name else "$"
    _check_length(out)
    return out + text


def cut(text: str) -> Iterator[tuple[str, str, str | None, str]]:
    """Split a text before each ``$``. Yield (variable as written, name, default or None, text behind the variable).

    A variable is ``$NAME``, ``${NAME}`` or ``${NAME:-DEFAULT}`` without a nested variable. The name is "" for any other
    ``$``. The first tuple has only the text before the first ``$``.
    """
    before, *parts = text.split("$")
    yield "", "", None, before
    for part in parts:
        inner, close, after = part[1:].partition("}") if part.startswith("{") else (part, "", "")
        name, dash, default = inner.partition(":-") if close else (_name(part), "", "")
        if not (name.isascii() and name.isidentifier()):
            yield "$", "", None, part
        elif close:
            yield f"${{{inner}}}", name, default if dash else None, after
        else:
            yield f"${name}", name, None, part[len(name) :]


def _name(text: str) -> str:
    """Return the leading ASCII letters, digits and underscores of a text."""
    end = 0
    while end < len(text) and (text[end] == "_" or text[end].isascii() and text[end].isalnum()):
        end += 1
    return text[:end]


def truth(text: str) -> bool:
    """Return True for yes and its synonyms, False for no and its synonyms. Raises ValueError for other words."""
    word = text.lower()
    if word not in YES and word not in NO:
        raise ValueError("must be yes or no")
    return word in YES


def _check_length(text: str) -> None:
    if len(text) > _MAX_VALUE_CHARS:  # in a file whose lines double the previous value, memory would run out
        raise ValueError(f"the value is longer than {_MAX_VALUE_CHARS} characters")


def _closing(text: str) -> int:
    """Return the position of the closing brace. Skips the braces of variables in a default. Raises ValueError."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth > _MAX_NESTED_DEFAULTS:
            raise ValueError(f"more than {_MAX_NESTED_DEFAULTS} nested '${{'")
        if not depth:
            return at
    raise ValueError("'${' without '}'")


def base_directories(environ: Mapping[str, str]) -> dict[str, str]:
    """Return HOME, TMPDIR and the directories of the XDG Base Directory Specification, with defaults."""
    home = (environ.get("HOME") or _home()).rstrip("/")
    tmp = environ.get("TMPDIR") or "/tmp"
    run = environ.get("XDG_RUNTIME_DIR") or ""
    uid = _ids()[0]
    if not run or not os.access(run, os.W_OK):
        # A job inherits TMPDIR from the submission host; the directory may not exist on this node.
        run = f"{tmp if os.access(tmp, os.W_OK) else '/tmp'}/penroot-{uid}"
    return {
        "HOME": home or "/",
        "TMPDIR": tmp,
        "XDG_CONFIG_HOME": environ.get("XDG_CONFIG_HOME") or home + "/.config",
        "XDG_CACHE_HOME": environ.get("XDG_CACHE_HOME") or home + "/.cache",
        "XDG_DATA_HOME": environ.get("XDG_DATA_HOME") or home + "/.local/share",
        "XDG_RUNTIME_DIR": run,
        # Shells set these variables themselves.
        "UID": str(uid),
        "EUID": str(uid),
        "HOSTNAME": os.uname().nodename,
    }


def _ids() -> tuple[int, int]:
    """Return the caller's user and group ID. If `unshare -r` has mapped them to root, return the original IDs.

    Keeps the result of the first call, because a start enters further user namespaces later.
    """
    global _caller
    if _caller is None:
        _caller = os.geteuid(), os.getegid()
        if _caller[0] == 0:  # perhaps under `unshare -r`
            _caller = _outside("uid_map", _caller[0]), _outside("gid_map", _caller[1])
    return _caller


def _outside(map_name: str, inside: int) -> int:
    """Map the ID ``inside`` to the parent user namespace if it is the only mapped ID: user_namespaces(7)."""
    try:
        with open(f"/proc/self/{map_name}") as f:
            first, outside, count = map(int, f.read().split())
    except (OSError, ValueError):  # the map has several lines
        return inside
    return outside if (first, count) == (inside, 1) else inside


def _home() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return "/"


def _user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(_ids()[0]).pw_name
    except KeyError:
        return str(_ids()[0])


def true_or_false(text: str) -> bool | None:
    """Parse ``true`` or ``false`` of TOML; return None for "". Raises ValueError for other words."""
    word = text.strip().lower()
    if word not in ("true", "false", ""):
        raise ValueError(word)
    return word == "true" if word else None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most similar to ``word``, or "" if none is similar."""
    letters = set(word)
    # Compare sets of letters first, because importing difflib is slow. One wrong letter makes the sets differ by two.
    alike = [name for name in known if abs(len(name) - len(word)) < 3 and len(letters ^ set(name)) < 5]
    if not alike:
        return ""
    import difflib

    matcher = difflib.SequenceMatcher(b=word)

    def difference(name: str) -> float:
        matcher.set_seq1(name)
        return 1 - matcher.ratio()

    least, name = min((difference(name), name) for name in alike)
    return name if least <= (0.25 if len(word) > 2 else 0.5) else ""  # one wrong letter in four, or in a word of two
