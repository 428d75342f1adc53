"""Writes PACK: the code of all modules in one file, from which ``enroot_py/__init__.py`` has them imported."""

from __future__ import annotations
import __future__

import ast
import marshal
import os
from collections.abc import Iterator
from types import CodeType

from enroot_py import HEAD, LIBRARY, PACK


def write() -> None:
    """Write it for the sources as they are now, in place of the one there is."""
    lines, codes, offset = [], [], HEAD
    for file in _sources():
        path = f"{LIBRARY}/{file}"
        state = os.stat(path)
        with open(path, "rb") as f:
            code = marshal.dumps(_compiled(f.read(), path))
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        lines.append(f"{name} {file} {state.st_size} {state.st_mtime_ns} {len(code)} {offset}\n")
        codes.append(code)
        offset += len(code)
    head = "".join(lines).encode().ljust(HEAD, b"\0")
    assert len(head) == HEAD, f"HEAD is to be more than {len(head)}"
    temporary = f"{PACK}.{os.getpid()}"
    with open(temporary, "wb") as f:
        f.write(head + b"".join(codes))
    os.rename(temporary, PACK)


def _sources() -> Iterator[str]:
    """The sources of both packages and the hooks, in LIBRARY."""
    for package in ("enroot_py", "pyxis_py"):
        for directory, _, names in os.walk(f"{LIBRARY}/{package}"):
            yield from (os.path.relpath(f"{directory}/{name}", LIBRARY) for name in names if name.endswith(".py"))


def _compiled(source: bytes, path: str) -> CodeType:
    """The code of a module, less annotations and docstrings: a start would load them, and nobody reads them.

    A decorated function keeps its docstring, which click makes help of.
    """
    tree = ast.parse(source, path)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            decorated = getattr(node, "decorator_list", [])
            if ast.get_docstring(node, clean=False) and not decorated:
                node.body[0] = ast.copy_location(ast.Pass(), node.body[0])
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    code: CodeType = compile(tree, path, "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    return code
