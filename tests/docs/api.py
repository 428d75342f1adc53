"""The reference of the Python API, generated from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import enroot_py
from tests.docs import NOTE, escaped

HEAD = f"""{NOTE}

# Python

`import enroot_py` costs nothing until a name is used. These names are stable. [Containers from
Python](../tutorials/python.md) introduces them.

`Path` is a string or an `os.PathLike`. `Stream` is what `subprocess.Popen` takes: a file, a descriptor, `PIPE`,
`STDOUT`, `DEVNULL`, or None.
"""
CLASSES = ("Container", "Image", "Process")
FUNCTIONS = ("pull", "run")


def pages() -> dict[str, str]:
    """Return the page of the site."""
    lines = [HEAD]
    for name in FUNCTIONS:
        lines += section(f"enroot_py.{name}", getattr(enroot_py, name))
    for name in CLASSES:
        kind = getattr(enroot_py, name)
        lines += section(f"enroot_py.{name}", kind, signature=name != "Process")
        for method, function in vars(kind).items():
            if inspect.isfunction(function) and method[0] != "_" and function.__doc__:
                lines += section(f"{name}.{method}", function)
    lines += ["## Errors", "", "All derive from `enroot_py.PenrootError`, and have `hint` and `exit_code`.", ""]
    lines += [f"- `{name}`: {escaped(first)}" for name, first in errors()]
    return {"python.md": "\n".join([*lines, ""])}


def section(title: str, thing: object, *, signature: bool = True) -> Iterator[str]:
    """Return a heading, the signature and the docstring."""
    yield f"## {title}"
    yield ""
    if signature:
        asynchronous = "await " if inspect.iscoroutinefunction(thing) else ""
        yield f"```python\n{asynchronous}{title.removeprefix('enroot_py.')}{arguments(thing)}\n```"
        yield ""
    for line in (inspect.getdoc(thing) or "").splitlines():
        item = re.match(r"    (\S[^:]*): (.*)", line)
        if re.fullmatch(r"(Args|Attributes|Raises):", line):
            yield f"**{line[:-1]}**\n"
        elif item:
            yield f"- `{item[1]}`: {item[2].replace('``', '`')}"
        else:
            yield line.replace("``", "`")
    yield ""


def arguments(thing: object) -> str:
    """Return the signature with one argument per line."""
    signature = inspect.signature(thing)  # type: ignore[arg-type]
    parameters = [each for name, each in signature.parameters.items() if name != "self"]
    star = next((number for number, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY), len(parameters))
    rows = [str(each) for each in parameters]
    rows[star:star] = ["*"] * (star < len(parameters))
    returned = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    text = "(" + "".join(f"\n    {row}," for row in rows) + "\n)" * bool(rows) + ")" * (not rows) + returned
    return text.replace("'", "")  # strip the quotes of annotations; no default is a string


def errors() -> Iterator[tuple[str, str]]:
    """Return the error classes with the first sentences of their docstrings."""
    for name in enroot_py.__all__:
        kind = getattr(enroot_py, name)
        if isinstance(kind, type) and issubclass(kind, enroot_py.PenrootError):
            yield name, " ".join((kind.__doc__ or "").split("\n\n")[0].split())
