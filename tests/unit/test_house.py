"""How the house is kept: modules and functions of a size to read, each name for one thing, and nothing unused."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.unit.test_imports import ROOT, modules

MODULE, FUNCTION, PARAMETERS = 500, 60, 5  # the most: lines, lines, how many

# A table is the reason: a row has as many columns, a system call as many arguments.
TABLES = {
    "enroot_py.base.linux mount_setattr": "the arguments of mount_setattr(2), and one that is a field of its struct",
    "enroot_py.cli.verbs bundle": "click gives each option in a parameter of its own",
    "enroot_py.cli.verbs import_": "the same",
    "enroot_py.runtime.mounts Mount.__init__": "the fields of fstab(5), and where they come from",
    "pyxis_py.options Option.__init__": "the columns of OPTIONS",
}

# Called by name from elsewhere: hooks, scripts, the plugin, libraries that we give an object of ours.
CALLED = {
    *(
        f"hooks.{path.relative_to(ROOT / 'hooks').with_suffix('')} {'outside' if 'fabric' in path.name else 'run'}"
        for path in (ROOT / "hooks").rglob("*.py")
    ),
    "enroot_py Pack.create_module",  # import
    "enroot_py.cli.doctor _Quota._fields_",  # ctypes
    "enroot_py.cli.commands Commands.list_commands",  # click
    "enroot_py.base.pack rewrite",  # of itself, in another process
    "enroot_py.base.versions use",  # Makefile, packages/scripts/packaged
    "enroot_py.cli.ovlfs main",
    "enroot_py.cli.tools main",
    "enroot_py.cli.verbs help_text",  # base/pack.py
    "enroot_py.main main",
    "enroot_py.runtime.hooks Context.is_directory",  # hooks/README.md
    "enroot_py.registry.connections _Patient.readable",  # io.RawIOBase
    *(f"pyxis_py.sftp _Files.format_{what}" for what in ("user", "group")),  # asyncssh, as what follows
    "pyxis_py.sftp _Stream.logger",
    *(
        f"pyxis_py.sshsession JobServer.{what}_requested"
        for what in "connection server session unix_connection".split()
    ),
    "pyxis_py.sshsession JobServer.connection_made",
    *(f"pyxis_py.sshsession JobSession.{what}_requested" for what in ("pty", "shell", "exec", "subsystem")),
    *(
        f"pyxis_py.sshsession JobSession.{what}"
        for what in "session_started terminal_size_changed signal_received".split()
    ),
    *(
        f"pyxis_py.sshsession {whose}.{what}"  # asyncio
        for whose in ("JobSession", "Pump")
        for what in "connection_made connection_lost data_received pause_writing resume_writing".split()
    ),
    "pyxis_py.helper main",
    "pyxis_py.reach answer",  # by the step that it starts
    "pyxis_py.settings PluginSettings.use_enroot_load",  # a setting that pyxis has, accepted without effect
    "pyxis_py.settings PluginSettings.use_squashfuse",
}


@functools.cache
def ours() -> dict[str, ast.Module]:
    """The modules of both packages and the hooks, by name."""
    hooks = {
        f"hooks.{path.relative_to(ROOT / 'hooks').with_suffix('')}": path for path in (ROOT / "hooks").rglob("*.py")
    }
    return {name: ast.parse(path.read_text()) for name, path in {**modules(), **hooks}.items()}


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Each function with its name, after that of its class."""
    for node in ast.iter_child_nodes(tree):
        inside = f"{within}{node.name}." if isinstance(node, ast.ClassDef) else within
        if isinstance(node, ast.FunctionDef):
            yield within + node.name, node
        yield from functions(node, inside)


def long_modules() -> set[str]:
    return {name for name, path in modules().items() if len(path.read_text().splitlines()) > MODULE}


def long_functions() -> set[str]:
    return {
        f"{module} {name}"
        for module, tree in ours().items()
        for name, function in functions(tree)
        if (function.end_lineno or 0) - function.lineno >= FUNCTION
    }


def many_parameters() -> set[str]:
    return {
        f"{module} {name}"
        for module, tree in ours().items()
        for name, function in functions(tree)
        if len(parameters(function.args)) > PARAMETERS
    }


def parameters(of: ast.arguments) -> list[str]:
    return [each.arg for each in (*of.posonlyargs, *of.args, *of.kwonlyargs) if each.arg not in ("self", "cls")]


def double_classes() -> set[str]:
    names = Counter(
        node.name
        for module, tree in ours().items()
        if not module.startswith("hooks.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    return {name for name, count in names.items() if count > 1}


def unused() -> set[str]:
    """What a module or a class defines and nothing that we install uses; tests do not count.

    A name of a module is used where it or the module is imported, or in the module itself. A name of a class
    is used where an attribute is called so: in its own module, if it begins with an underscore.
    """
    scripts = {
        path.stem: ast.parse(path.read_text()) for path in (ROOT / "setup.py", *(ROOT / "c_shims").rglob("*.py"))
    }
    uses = {use for module, tree in {**scripts, **ours()}.items() for use in used(module, tree)}
    attributes = {
        module: {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for module, tree in ours().items()
    }
    anywhere = set().union(*attributes.values())
    idle = set()
    for module, tree in ours().items():
        for name, node in defined(tree):
            if (module, name) not in uses and not is_command(node):
                idle.add(f"{module} {name}")
            for inner, _ in defined(node) if isinstance(node, ast.ClassDef) else ():
                if inner not in (attributes[module] if inner.startswith("_") else anywhere):
                    idle.add(f"{module} {name}.{inner}")
    return idle


def defined(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
    """What a module or a class defines itself, but __this__."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        else:
            names = [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []
        yield from ((name, node) for name in names if not name.startswith("__"))


def used(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of each name of ours that a module uses."""
    aliases: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                yield node.module, name.name
                if f"{node.module}.{name.name}" in ours():
                    aliases.setdefault(name.asname or name.name, set()).add(f"{node.module}.{name.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield module, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield from ((alias, node.attr) for alias in aliases.get(node.value.id, ()))


def is_command(node: ast.stmt) -> bool:
    """Whether a decorator hands a function to others, as click's do, instead of giving it back in another form."""
    decorators = {ast.unparse(each) for each in node.decorator_list} if isinstance(node, ast.FunctionDef) else set()
    return bool(decorators - {"contextlib.contextmanager", "functools.cache"})


RULES: dict[str, Callable[[], set[str]]] = {
    "modules that are too long": long_modules,
    "functions that are too long": long_functions,
    "functions with too many parameters": lambda: many_parameters() - set(TABLES),
    "names of two classes": double_classes,
    "names that nothing uses": lambda: unused() - CALLED,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_house_is_kept(rule: str) -> None:
    broken = RULES[rule]()
    assert not broken, f"{rule}: {', '.join(sorted(broken))}"


def test_no_exception_is_left_over() -> None:
    assert not set(TABLES) - many_parameters()
    assert not CALLED - unused()


def test_the_walk_of_a_reference_names_what_there_is() -> None:
    text = (ROOT / "docs/developing.md").read_text()
    steps = re.findall(r"^\d+\. `(.+?)`, `(.+?)\(\)`: ", text, re.MULTILINE)
    assert len(steps) == 10
    for path, function in steps:
        definition = rf"^ *def {function}\(" if path.endswith(".py") else rf"^[a-z].* {function}\("
        assert re.search(definition, (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {function}()"
