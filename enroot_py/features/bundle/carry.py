"""Collect the files of a bundle from this node: Python, its modules and programs. Their paths in the bundle:

    programs/   python3, unsquashfs, squashfuse
    loaders/    for each program, a link of the same name to the loader (see base/carried.py)
    libraries/  the loader and the shared libraries
    lib/        modules of the standard library that every start imports; Python finds lib/ beside programs/
    penroot/    penroot's modules, hooks and helper programs
    rest.zip    other modules that a start can import; they stay packed, because unpacking is slow

A module is included if a start can import it. Modules are bytecode without source, so a run compiles nothing.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import io
import marshal
import os
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType

from enroot_py import LIBRARY
from enroot_py.base import carried, pack, run
from enroot_py.base.elf import interpreter
from enroot_py.base.errors import PenrootError
from enroot_py.base.features import FEATURES
from enroot_py.config import files as configuration
from enroot_py.runtime import hooks

ABOUT = "about"
ENTRANCE = ("enroot_py.main", "enroot_py.features.bundle.bundled")
REST = "rest.zip"
# Programs that hooks call, by the module that implements them.
HELPERS = {
    "enroot_py.cli.tools": "unshare nsenter mount switchroot".split(),
}
_STATIC = ("penroot-follow",)
# The modules of a feature that a start imports. Each name is a socket, an extension point: see base/features.py.
_SOCKETS = {"settings", "outside", "start", "recorder"}
_LAZY_PACKAGES = ("base", "config", "runtime", "features")  # in these packages, imports within functions count too
_BY_NAME = ("__future__", "encodings.ascii", "encodings.latin_1", "_sha256", "_sha2")  # imported by Python itself
_OMITTED = ("_hashlib", "_bz2", "_lzma", "yaml._yaml")  # Python works without these; they need large libraries
_FOR_SITE_HOOKS = ("pwd", "grp", "fcntl", "json", "re", "subprocess")
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
_LIST = """\
import sys, importlib
sys.path[:] = sys.argv[1].split(":")
sys.modules.update(dict.fromkeys(sys.argv[3].split(",")))
for name in sys.argv[2].split(","):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for module in list(sys.modules.values()):
    spec = getattr(module, "__spec__", None)
    if spec and getattr(module, "__file__", None) and (spec.origin != "frozen" or spec.name == "os"):
        print(spec.name, module.__file__)
"""
_HELPER = """\
#!/bin/sh
top=${{0%/*}}/../..
unset LD_PRELOAD LD_AUDIT
exec "$top/loaders/python3" --library-path "$top/libraries" "$top/programs/python3" -ISBX utf8 -c \\
    'import sys; sys.path = [sys.argv[1] + "/penroot", *sys.path, sys.argv[1] + "/rest.zip"]; del sys.argv[:2]
from {module} import main; main()' "$top" "$0" "$@"
"""

File = tuple[str, bytes, int]  # path in the bundle, content, mode; mode 0: a symbolic link, content is its target


def files(site_hooks: Iterable[str]) -> Iterator[File]:
    """Yield the files for a start. ``site_hooks`` are paths of Python hooks. Raises PenrootError."""
    programs = _programs()
    modules = _modules(site_hooks)
    for name, path in programs.items():
        yield f"programs/{name}", _content(path), 0o755
    extensions = {path for path in modules.values() if not path.endswith(".py")}
    yield from _libraries(programs, sorted(extensions))
    stdlib = os.path.dirname(os.path.realpath(os.__file__))
    top = os.path.relpath(stdlib, os.path.realpath(sys.base_prefix))
    yield f"{top}/lib-dynload/", b"", 0o755  # Python looks for this directory to find its library
    always = {name.partition(".")[0] for name in (*_loaded({*ENTRANCE}), *_BY_NAME)} | {"os"}
    rest = {}
    for name, path in modules.items():
        real, target, root = os.path.realpath(path), top, stdlib
        if not real.startswith(stdlib + "/"):
            roots = (pack.MODULES, LIBRARY, *sys.path)
            root = max((root for root in roots if path.startswith(root.rstrip("/") + "/")), key=len)
            real, target = path, "penroot"
        inner = os.path.relpath(real, root)
        if path in extensions:
            yield f"{target}/{inner}", _content(path), 0o755
        elif name.partition(".")[0] in always:
            yield f"{target}/{inner}c", _bytecode(_code(name)), 0o644
        else:
            rest[inner + "c"] = _bytecode(_code(name))
    yield REST, _zip(rest), 0o644
    yield from _hooks()
    yield from _helpers()


def _zip(contents: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in sorted(contents.items()):
            file.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _programs() -> dict[str, str]:
    """Return this interpreter, unsquashfs and each squashfuse that this node has. Raises PenrootError."""
    executable = getattr(sys, "_base_executable", "") or sys.executable
    programs = {"python3": executable, "unsquashfs": run.find("unsquashfs", package="squashfs-tools")}
    programs |= {name: path for name in ("squashfuse", "squashfuse_ll") if (path := carried.installed(name))}
    return {name: os.path.realpath(path) for name, path in programs.items()}


def _modules(site_hooks: Iterable[str]) -> dict[str, str]:
    """Return the modules that a start can import, and their files."""
    names = {*_BY_NAME, *_FOR_SITE_HOOKS}
    pending = [*ENTRANCE, *HELPERS]
    for package, sockets in FEATURES.items():
        if package.startswith("enroot_py."):
            pending += (f"{package}.{socket}" for socket in _SOCKETS & {*sockets.split()})
    seen = set(pending)
    sources = [*_own_hooks(), *site_hooks]
    while pending or sources:
        if pending:
            name = pending.pop()
            source = _source(name)
            everything = name.split(".")[1] in _LAZY_PACKAGES or name in (ENTRANCE[1], *HELPERS)
        else:
            source, everything = _content(sources.pop()), True
        for module in _imported(source, everything=everything):
            names.add(module)
            if module.startswith("enroot_py.") and module not in seen:
                seen.add(module)
                pending.append(module)
    return _loaded(names | seen)


def _loaded(names: set[str]) -> dict[str, str]:
    """Return the modules that importing ``names`` loads, and their files."""
    search = ":".join([LIBRARY, *(path for path in sys.path if path)])
    command = [sys.executable, "-ISB", "-c", _LIST, search, ",".join(sorted(names)), ",".join(_OMITTED)]
    lines = (line.partition(" ") for line in run.Program(command).run().splitlines())
    return {name: path for name, _, path in sorted(lines)}


@functools.cache
def _archive() -> dict[str, bytes]:
    """Return the sources in the archive of penroot's modules, by path. A source tree has no archive: return {}."""
    if not os.path.exists(pack.MODULES):
        return {}
    with zipfile.ZipFile(pack.MODULES) as file:
        return {name: file.read(name) for name in file.namelist()}


def _source(module: str) -> bytes:
    """Return the source of a module of penroot; b"" if it does not exist or is in C."""
    path = module.replace(".", "/")
    for name in (f"{path}.py", f"{path}/__init__.py"):
        if name in _archive():
            return _archive()[name]
        if os.path.exists(f"{LIBRARY}/{name}"):
            return _content(f"{LIBRARY}/{name}")
    return b""


def _imported(source: bytes, *, everything: bool) -> Iterator[str]:
    """Yield the modules that a source imports at load time. With ``everything``, include imports in functions."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return  # a site's hook: running it will report the error
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module.startswith("enroot_py"):
                inner = [f"{node.module}.{name.name}" for name in node.names]
                yield from (name for name in inner if _source(name))
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            pending += node.orelse
        elif everything or not isinstance(node, ast.FunctionDef):  # expressions have no imports
            pending += (inner for inner in ast.iter_child_nodes(node) if isinstance(inner, _STATEMENTS))


def _code(module: str) -> CodeType:
    """Return the code of a module as import finds it: in an installation, the compiled code."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    code = spec.loader_state if isinstance(spec.loader_state, CodeType) else spec.loader.get_code(module)  # type: ignore[union-attr]
    assert isinstance(code, CodeType)
    return code


def _bytecode(code: CodeType | None) -> bytes:
    """Return code as an unchecked hash-based .pyc file, PEP 552. Equal code gives equal bytes."""
    data = marshal.dumps(marshal.loads(marshal.dumps(code)))
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + data


def _libraries(programs: dict[str, str], extensions: list[str]) -> Iterator[File]:
    """Yield the loader and the libraries of programs and extension modules. Raises PenrootError."""
    loader = interpreter(programs["python3"])
    if not loader:
        raise PenrootError(f"cannot bundle {programs['python3']}: it has no ELF interpreter")
    name = os.path.basename(loader)
    libraries = {name: loader}
    environ = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "LD_AUDIT")}
    for path in (*programs.values(), *extensions):
        if path in programs.values() and interpreter(path) != loader:
            raise PenrootError(f"cannot bundle {path}: its loader is not {loader}, the loader of Python")
        for line in run.Program([loader, "--list", path], environ=environ).run().splitlines():
            soname, arrow, location = line.strip().partition(" => ")
            if arrow and location.startswith("/"):
                libraries.setdefault(os.path.basename(soname), location.rpartition(" (")[0])
    for soname, path in sorted(libraries.items()):
        yield f"libraries/{soname}", _content(path), 0o755
    yield from ((f"loaders/{program}", f"../libraries/{name}".encode(), 0) for program in programs)


def _own_hooks() -> list[str]:
    return [
        f"{directory}/{name}"
        for directory in hooks.OURS
        for name in configuration.names(directory)
        if name.endswith(".py")
    ]


def _hooks() -> Iterator[File]:
    """Yield penroot's hooks, as source and bytecode.

    For names such as 10-home, Python finds the bytecode only beside the source.
    """
    standard = "enroot_py/standard_hooks"
    for name in ("common.sh", "driver.sh", "originals.b2sum"):
        yield f"penroot/{standard}/{name}", _content(f"{hooks.STANDARD}/{name}"), 0o644
    for path in _own_hooks():
        directory, name = os.path.split(path)
        target = standard if directory == hooks.STANDARD else os.path.relpath(directory, LIBRARY)
        yield f"penroot/{target}/{name}", _content(path), 0o644
        cached = os.path.basename(importlib.util.cache_from_source(path))
        yield f"penroot/{target}/__pycache__/{cached}", _bytecode(SourceFileLoader("", path).get_code("")), 0o644


def _helpers() -> Iterator[File]:
    """Yield the programs that hooks call, as penroot-NAME and enroot-NAME, and static programs that a start calls."""
    for module, names in HELPERS.items():
        for name in names:
            for prefix in ("penroot", "enroot"):
                yield f"penroot/libexec/{prefix}-{name}", _HELPER.format(module=module).encode(), 0o755
    for name in _STATIC:
        for directory in ("libexec", "c_shims/programs/build"):  # of an installation, else of a source tree
            if os.path.isfile(path := f"{LIBRARY}/{directory}/{name}"):
                yield f"penroot/libexec/{name}", _content(path), 0o755


def _content(path: str) -> bytes:
    with open(path, "rb") as f:
        return f.read()
