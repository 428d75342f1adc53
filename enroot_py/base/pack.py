"""Writes PACK: the code of all modules in one file, from which ``enroot_py/__init__.py`` has them imported."""

from __future__ import annotations
import __future__

import ast
import marshal
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from types import CodeType

from enroot_py import HEAD, HELP, HOOKS, IMAGE, LIBRARY, PACK, START

_Kept = tuple[str, str, int, int, CodeType | str | None]  # a module, its source, size and time, and what was made of it
_PIECE = 100_000  # bytes: from 128 KiB on malloc(3) takes a block from the kernel, and gives it back
_STANDARD = "enroot_py.standard_hooks"
_IN_C = {"_cffi_backend": "", "enroot_py.base._linux": "/enroot_py/base"}  # and their directories


def write() -> None:
    """Write it for the sources as they are now, in place of the one there is.

    By a Python that notes no columns, which a start would load with each line.
    """
    _run("from enroot_py.base import pack; pack.rewrite()", "-X", "no_debug_ranges")


def rewrite() -> None:
    """What write() does, in this process."""
    modules = dict(_modules())
    kept = {name: [module] for name, module in modules.items()}
    kept[HELP] = _help(modules)
    kept[START] = [*(modules[name] for name in _IN_C if name in modules), *_loaded(modules, "enroot_py.cli.start")]
    of_image = _loaded(modules, "enroot_py.store.squashfs", "enroot_py.runtime.squashfuse")
    kept[IMAGE] = [module for module in of_image if module not in kept[START]]
    kept[HOOKS] = [module for name, module in modules.items() if name.rpartition(".")[0] == _STANDARD]
    lines, blobs, offset = ["\n"], [], HEAD
    for name, values in kept.items():
        pieces = list(map(marshal.dumps, _pieces(values)))
        lines.append(f"{name} {','.join(str(len(piece)) for piece in pieces)} {offset}\n")
        blobs += pieces
        offset += sum(map(len, pieces))
    head = "".join(lines).encode().ljust(HEAD, b"\0")
    assert len(head) == HEAD, f"HEAD is to be more than {len(head)}"
    temporary = f"{PACK}.{os.getpid()}"
    with open(temporary, "wb") as f:
        f.write(head + b"".join(blobs))
    os.rename(temporary, PACK)


def _modules() -> Iterator[tuple[str, _Kept]]:
    """The modules of both packages and the hooks, in LIBRARY."""
    for package in ("enroot_py", "pyxis_py"):
        for directory, _, names in os.walk(f"{LIBRARY}/{package}"):
            for path in (f"{directory}/{name}" for name in names if name.endswith(".py")):
                with open(path, "rb") as f:
                    code = _compiled(f.read(), path)
                name = os.path.relpath(path, LIBRARY).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                yield name, _kept(name, path, code)
    for name, directory in _IN_C.items():
        spec = PathFinder.find_spec(name, [LIBRARY + directory])
        if spec and spec.origin:
            yield name, _kept(name, spec.origin, None)


def _kept(name: str, path: str, value: CodeType | None) -> _Kept:
    state = os.stat(path)
    return name, os.path.relpath(path, LIBRARY), state.st_size, state.st_mtime_ns, value


def _pieces(values: list[_Kept]) -> Iterator[list[_Kept]]:
    """What a line has, in pieces that are read into memory of the last one: the kernel has to clear all other."""
    piece: list[_Kept] = []
    for value in values:
        if piece and len(marshal.dumps([*piece, value])) > _PIECE:
            yield piece
            piece = []
        piece.append(value)
    yield piece


def _help(modules: dict[str, _Kept]) -> list[_Kept]:
    """What ``penroot --help`` says, of the modules of ours that say it."""
    done = _run("from enroot_py.cli.verbs import help_text; print(help_text()); print(*sys.modules)")
    text, _, names = done[:-1].rpartition("\n")
    sources = [modules[name][:4] for name in names.split() if name in modules]
    return [(*source, "" if number else text) for number, source in enumerate(sources)]


def _loaded(modules: dict[str, _Kept], *names: str) -> list[_Kept]:
    """The modules of ours that an import of these loads, each behind those that it imports."""
    code = (
        "import enroot_py; sys.meta_path = [finder for finder in sys.meta_path if finder is not enroot_py.pack]\n"
        "from importlib.machinery import SourceFileLoader as Loader; run = Loader.exec_module\n"
        "def exec_module(self, module): run(self, module); print(module.__name__)\n"
        f"Loader.exec_module = exec_module; import {', '.join(names)}"
    )
    return [modules[name] for name in _run(code).split() if name in modules]


def _run(code: str, *options: str) -> str:
    """What Python code says with the modules in LIBRARY."""
    code = f"import sys; sys.path.insert(0, {LIBRARY!r}); {code}"
    command = [sys.executable, "-ISB", *options, "-c", code]
    return subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout


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
