"""Compile the modules of an installation to PACK, which base/pack.py describes and reads."""

from __future__ import annotations
import __future__

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.machinery import PathFinder
from marshal import dumps
from types import CodeType, ModuleType
from typing import Any
from zipfile import ZipFile

from enroot_py.base import pack
from enroot_py.base.features import FEATURES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.base.pack import Kept

_PIECE_BYTES = 100_000  # less than 128 KiB: for a larger block, malloc(3) maps new memory, which the kernel must clear
_IN_C = {"_cffi_backend": "", "enroot_py.base._linux": "/enroot_py/base"}  # modules in C, and their directories


def write() -> None:
    """Compile the archive to pack.PACK, in a Python that omits column numbers: each start would have to load them."""
    code = f"import sys; sys.path.insert(0, {pack.LIBRARY!r}); from enroot_py.base import packing; packing.rewrite()"
    subprocess.run([sys.executable, "-ISB", "-X", "no_debug_ranges", "-c", code], stdout=subprocess.PIPE, check=True)


def rewrite() -> None:
    """Do the work of write(), in the process that write() starts."""
    modules = dict(_modules())
    recorder = _Recorder(modules)
    sys.meta_path[:] = [recorder, *(finder for finder in sys.meta_path if finder is not pack.current)]
    lines: dict[str, list[Any]] = {name: [module] for name, module in modules.items()}
    in_c = [modules[name] for name in _IN_C if name in modules]
    start = recorder.record("enroot_py.cli.start")
    image = recorder.record(
        "enroot_py.cli.start", "enroot_py.store.squashfs", "enroot_py.runtime.squashfuse", "enroot_py.runtime.sharing"
    )
    execute = recorder.record("enroot_py.cli.quick", "enroot_py.cli.running", "enroot_py.runtime.joining")
    listing = recorder.record("enroot_py.cli.quick", "enroot_py.cli.listing")
    check = recorder.record("pyxis_py.helper", "pyxis_py.submit.submission")
    parts = [name for package in FEATURES if (name := f"{package}.step") in modules]
    step = recorder.record(
        "pyxis_py.helper", "pyxis_py.node.held", "pyxis_py.node.container", "pyxis_py.node.step", *parts
    )
    lines |= {
        pack.START: [*in_c, *start],
        pack.EXEC: [*in_c, *execute],
        pack.LIST: [*in_c, *listing],
        pack.CHECK: check,
        pack.STEP: [*in_c, *step],
    }
    lines[pack.IMAGE] = [module for module in image if module not in start]
    lines[pack.HOOKS] = list(_hooks(import_module("enroot_py.runtime.hooks").OURS))
    lines[pack.HELP] = [import_module("enroot_py.cli.verbs").help_text()]
    head, blobs, offset = pack.stamp(), [], pack.HEAD_BYTES
    for name, values in lines.items():
        pieces = [dumps(piece) for piece in _pieces(values)]
        head += f"{name} {','.join(str(len(piece)) for piece in pieces)} {offset}\n".encode()
        blobs += pieces
        offset += sum(map(len, pieces))
    assert len(head) < pack.HEAD_BYTES, f"HEAD_BYTES must be more than {len(head)}"
    temporary = f"{pack.PACK}.{os.getpid()}"
    with open(temporary, "wb") as f:
        f.write(head.ljust(pack.HEAD_BYTES, b"\0") + b"".join(blobs))
    os.rename(temporary, pack.PACK)


class _Recorder(pack.Pack):
    """Import compiled modules, and record the order in which their imports end."""

    def __init__(self, modules: dict[str, Kept]) -> None:
        self._modules = modules
        self._imported: list[Kept] = []

    def find(self, name: str) -> Kept | None:
        return self._modules.get(name)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._imported.append(self._modules[module.__name__])

    def record(self, *names: str) -> list[Kept]:
        """Import ``names``, and return all Python modules of ours that were imported."""
        self._imported = []
        for name in self._modules.keys() - _IN_C:
            sys.modules.pop(name, None)
            above, _, last = name.rpartition(".")
            if above in sys.modules:
                # Otherwise "from above import last" would not import the module again.
                vars(sys.modules[above]).pop(last, None)
        for name in names:
            import_module(name)
        return self._imported


def _modules() -> Iterator[tuple[str, Kept]]:
    """Yield the name and the code of each module: first modules in the archive, then modules in C."""
    with ZipFile(pack.MODULES) as archive:
        for file in archive.namelist():
            name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            yield name, (name, file, _compiled(archive.read(file), f"{pack.MODULES}/{file}"))
    for name, directory in _IN_C.items():
        spec = PathFinder.find_spec(name, [pack.LIBRARY + directory])
        if spec and spec.origin:
            yield name, (name, spec.origin[len(pack.LIBRARY) + 1 :], None)


def _hooks(directories: Iterable[str]) -> Iterator[tuple[str, int, int, CodeType]]:
    for path in (
        f"{place}/{name}" for place in directories if os.path.isdir(place) for name in sorted(os.listdir(place))
    ):
        if path.endswith(".py"):
            with open(path, "rb") as f:
                state = os.stat(f.fileno())
                yield path[len(pack.LIBRARY) + 1 :], state.st_size, state.st_mtime_ns, _compiled(f.read(), path)


def _pieces(values: list[Any]) -> Iterator[list[Any]]:
    """Cut a list into pieces of about _PIECE_BYTES. A single larger value makes a larger piece.

    When the pieces are read, malloc(3) gives each piece the block that the previous piece has freed.
    """
    piece: list[Any] = []
    for value in values:
        if piece and len(dumps([*piece, value])) > _PIECE_BYTES:
            yield piece
            piece = []
        piece.append(value)
    yield piece


def _compiled(source: bytes, path: str) -> CodeType:
    """Return the code of a module without most annotations and docstrings: each start would load them, and uses none.

    Annotations of variables stay. Decorated functions and classes keep their docstrings, because click makes help texts
    from docstrings of functions; ``async def`` functions keep theirs too.
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
