"""Rules for the source code: imports between packages go one way, a start imports few modules, and code is short."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest

from enroot_py.base.features import FEATURES, PARTS, SOCKETS
from enroot_py.runtime.hooks import OURS
from pyxis_py import helper

ROOT = pathlib.Path(__file__).parent.parent.parent

# Package -> the packages that it may import, besides itself and top-level __init__.py files.
# docs/explanation/developing.md has a picture of these rules.
ROOMS = {
    "base": "",
    "config": "base",
    "registry": "base config",
    "runtime": "base config",
    "store": "base config registry runtime",
    "cli": "base config registry runtime store",
    "api": "base config registry runtime store cli",
    "features": "base config registry runtime store cli request node admin",
    "main": "base cli",
    "errors": "base",
    "request": "base config registry runtime",
    "submit": "base config registry store request",
    "node": "base config registry runtime store request submit",
    "admin": "base config runtime cli request",
    "helper": "base request submit node",
}
# Modules of pyxis_py that may import all packages of enroot_py: they enter containers, or run outside of steps.
# All other modules run in steps, and import only base.
ENTERING = set(
    "held step container image environment owned save leave entrypoint attached options header importer submission "
    "check manual settings".split()
)

# Modules with the decisions of a swarm. They use no sockets and clocks, so that a simulation can run them.
DECIDING = {f"enroot_py.features.swarm.{name}" for name in "messages trees fetchers tracker peer".split()}
PURE = set("__future__ collections collections.abc dataclasses random typing".split())

# Modules whose import takes too long at the start of a container
HEAVY = set(
    "re typing enum dataclasses json subprocess pathlib logging click urllib3 socket ctypes yaml shutil tempfile "
    "collections functools contextlib signal inspect hashlib".split()
)

MAX_MODULE_LINES, MAX_FUNCTION_LINES, MAX_TEST_NAME_CHARACTERS = 500, 60, 60


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """Return the path of each module in enroot_py and pyxis_py, by the module's full name."""
    paths = [path for package in ("enroot_py", "pyxis_py") for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@functools.cache
def imports(path: pathlib.Path, *, types: bool = True) -> set[str]:
    """Return the modules of enroot_py and pyxis_py that a file imports, also within functions.

    Imports below ``if TYPE_CHECKING`` count only if ``types`` is true.
    """
    names: set[str] = set()
    known = modules()
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types and not types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            inner_modules = {f"{node.module}.{name.name}" for name in node.names} & set(known)
            names |= inner_modules or {node.module}
        elif isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
    return {name for name in names if name.startswith(("enroot_py", "pyxis_py"))}


def room(module: str) -> str:
    """Return the package that contains a module. Return "" for a top package, which every module may import."""
    return f"{module}.".split(".")[1]


@pytest.mark.parametrize("name", ROOMS)
def test_imports_between_packages_go_one_way(name: str) -> None:
    allowed = {"", name, *ROOMS[name].split()}
    for module, path in modules().items():
        if room(module) == name:
            for imported in imports(path):
                if (
                    module.startswith("enroot_py") and name != "features"
                ):  # a feature may contain code for steps, which imports pyxis_py
                    assert imported.startswith("enroot_py"), f"{module} imports {imported}"
                assert room(imported) in allowed, (
                    f"{module} imports {imported}: {name} may import {ROOMS[name] or 'no package'}"
                )


def test_features_plug_in_and_the_core_imports_none() -> None:
    """FEATURES lists the modules (sockets) by which each feature plugs in. Other code does not name a feature."""
    folders = {
        f"{package}.features.{path.parent.name}"
        for package in ("enroot_py", "pyxis_py")
        for path in (ROOT / package / "features").glob("*/__init__.py")
    }
    assert folders == set(FEATURES)
    for package, sockets in FEATURES.items():
        defined = {socket for socket in SOCKETS if socket != "step" and f"{package}.{socket}" in modules()}
        defined |= {"hooks"} & {path.name for path in (ROOT / package.replace(".", "/")).iterdir()}
        if step := modules().get(f"{package}.step"):
            text = step.read_text()
            defined |= {
                f"step.{name}" for name in PARTS if re.search(rf"^(def {name}\(|{name} = )", text, re.MULTILINE)
            }
        assert set(sockets.split()) == defined
    hooks = [path.name for directory in OURS for path in pathlib.Path(directory).glob("*.py")]
    assert len({*hooks}) == len(hooks), "two hooks have one name"
    for module, path in modules().items():
        parent = ".".join(module.split(".")[:3])
        for feature in FEATURES:
            if parent not in FEATURES and module != "enroot_py.base.features":
                assert feature not in path.read_text(), f"{module} names {feature}"


def test_decisions_of_a_swarm_need_no_sockets_and_no_clock() -> None:
    for module, path in modules().items():
        if module in DECIDING:
            names = {
                imported
                for node in ast.walk(ast.parse(path.read_text()))
                for imported in (
                    [node.module]
                    if isinstance(node, ast.ImportFrom)
                    else [name.name for name in node.names]
                    if isinstance(node, ast.Import)
                    else []
                )
            }
            assert names <= DECIDING | PURE | {"enroot_py.features.swarm"}, f"{module}: {names}"


def test_every_package_has_a_rule() -> None:
    assert {room(module) for module in modules()} == {"", *ROOMS}


def test_modules_and_functions_are_short() -> None:
    for name, path in modules().items():
        text = path.read_text()
        assert text.count("\n") <= MAX_MODULE_LINES, name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, f"{name} {node.name}"


def test_names_of_tests_are_short() -> None:
    names = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(names) > 1000
    assert not {name for name in names if len(name) > MAX_TEST_NAME_CHARACTERS}


def test_no_import_cycles() -> None:
    """Imports within functions and for type checkers count, too: they hide a cycle instead of removing it."""
    # enroot_py imports the API only for type checkers, and otherwise when a program uses a name of the API.
    graph = {module: imports(path, types=module != "enroot_py") - {module} for module, path in modules().items()}

    def walk(module: str, chain: tuple[str, ...]) -> None:
        assert module not in chain, " > ".join((*chain[chain.index(module) :], module))
        if module not in seen:
            for imported in sorted(graph.get(module, ())):
                walk(imported, (*chain, module))
            seen.add(module)

    seen: set[str] = set()
    for module in graph:
        walk(module, ())


def test_only_modules_that_enter_containers_use_enroot() -> None:
    for module, path in modules().items():
        if module.startswith("pyxis_py") and room(module) != "features":
            beyond = {name for name in imports(path, types=False) if name.startswith("enroot_py.")}
            beyond = {name for name in beyond if room(name) != "base"} - {"enroot_py.cli.findings"}
            assert not beyond or path.stem in ENTERING, f"{module} imports {beyond}"


LIGHT = (
    "enroot_py.cli.start enroot_py.store.squashfs enroot_py.store.pull pyxis_py.helper pyxis_py.node.step "
    "pyxis_py.request.settings pyxis_py.submit.submission"
).split()


def loaded_by(code: str, *arguments: str, environ: dict[str, str] | None = None) -> set[str]:
    """Return the modules that ``code`` loads in a new interpreter without site-packages."""
    code = f"import sys; before = set(sys.modules); sys.path[:0] = [{str(ROOT)!r}]; {code}"
    code += "\nprint(*(set(sys.modules) - before))"
    command = [sys.executable, "-IS", "-c", code, *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout.split())


@pytest.mark.parametrize("module", [*LIGHT, *helper._LATER])
def test_start_path_imports_nothing_heavy(module: str) -> None:
    site = next(path for path in sys.path if path.endswith("site-packages"))
    assert not HEAVY & loaded_by(f"sys.path.append({site!r}); import {module}")


@pytest.mark.parity("version")
def test_version_imports_neither_click_nor_cffi() -> None:
    code = (
        "sys.argv[0] = 'penroot'\n"
        "from enroot_py.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code"
    )
    assert not {"click", "cffi", "_cffi_backend"} & loaded_by(code, "version")
