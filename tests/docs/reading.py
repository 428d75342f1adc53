"""What an expression of our source may say: texts with the names of what is put into them in capitals.

This reads syntax alone and runs nothing. It follows a name to where it was last assigned, a parameter to what callers
give, a constant to its module, and a function to what it returns; where that ends in a value, it has the value's name.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = ("enroot_py", "pyxis_py", "hooks")
DEPTH = 3  # callers of callers, functions of functions
MOST = 24  # alternatives of one expression: beyond it the name of a value says enough

# What a parameter or a variable is called that holds words to print, rather than a value.
WORDS = frozenset(("message", "why", "hint", "what", "wrong", "way_out", "how", "or_else", "own", "which"))
# Values whose own names say less.
NAMES = {
    "strerror": "REASON",
    "e": "REASON",
    "error": "REASON",
    "nodename": "NODE",
    "failure": "REASON",
    "reason": "REASON",
    "origin": "ORIGIN",
    "describe": "MOUNT",
}
SHOWN = ("shown", "escape")  # functions that make a value fit to be printed
PASSED_THROUGH = ("rstrip", "strip", "removesuffix", "removeprefix", "lower", "replace", "format")


class Function:
    """A function where it is written, and who calls it with what."""

    def __init__(self, module: Module, node: ast.FunctionDef) -> None:
        self.module = module
        self.node = node
        arguments = node.args
        self.parameters = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        self.defaults: dict[str, ast.expr] = dict(zip(self.parameters[::-1], arguments.defaults[::-1], strict=False))
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if default is not None:
                self.defaults[argument.arg] = default
        self.all = {*self.parameters, *(a.arg for a in arguments.kwonlyargs)}

    def given(self, call: ast.Call) -> dict[str, ast.expr]:
        """What ``call`` gives for the parameters."""
        parameters = self.parameters
        if parameters[:1] in (["self"], ["cls"]) and isinstance(call.func, ast.Attribute):
            parameters = parameters[1:]
        found = dict(self.defaults)
        found.update(zip(parameters, call.args, strict=False))
        found.update({k.arg: k.value for k in call.keywords if k.arg})
        return found


class Module:
    """The syntax of one file."""

    def __init__(self, source: Source, path: Path) -> None:
        self.source = source
        self.path = path
        self.tree = ast.parse(path.read_text())
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.functions = {n.name: Function(self, n) for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)}
        self.constants = dict(assignments(self.tree.body))
        imports = [n for n in ast.walk(self.tree) if isinstance(n, ast.ImportFrom) and n.module]
        # The module of each name that is imported from one.
        self.imported = {a.asname or a.name: (n.module or "").rpartition(".")[2] for n in imports for a in n.names}

    @property
    def room(self) -> str:
        """The directory, or the module where that is the package itself."""
        return self.path.parent.name

    def function(self, node: ast.AST) -> Function | None:
        """The function that ``node`` is in."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, ast.FunctionDef):
                return next(f for f in (self.functions[node.name], Function(self, node)) if f.node is node)
        return None

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node


def assignments(statements: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Each name that these statements give a value, and the value."""
    for statement in statements:
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        value = getattr(statement, "value", None)
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and value:
            for target in targets:
                several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                pairs = zip(target.elts, value.elts, strict=False) if several else [(target, value)]
                yield from ((name.id, of_name) for name, of_name in pairs if isinstance(name, ast.Name))


class Source:
    """All modules."""

    def __init__(self, root: Path = ROOT) -> None:
        paths = sorted(path for place in PLACES for path in (root / place).rglob("*.py"))
        self.modules = [Module(self, path) for path in paths]
        self.by_name: dict[str, list[Module]] = defaultdict(list)
        for module in self.modules:
            self.by_name[module.path.stem].append(module)

    @cached_property
    def calls(self) -> dict[str, list[tuple[Module, ast.Call]]]:
        """The calls of each name, as f() or x.f()."""
        found: dict[str, list[tuple[Module, ast.Call]]] = defaultdict(list)
        for module in self.modules:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call):
                    found[name_of(node.func)].append((module, node))
        return found

    def callers(self, function: Function) -> list[tuple[Module, ast.Call]]:
        """Who calls ``function``: within its module, and elsewhere if there is one of that name alone."""
        home, name = function.module, function.node.name
        alone = not name.startswith("__") and sum(name in module.functions for module in self.modules) == 1
        return [
            (module, call)
            for module, call in self.calls[name]
            if module is home or self.called(module, call) is home.functions[name] or alone and _of_object(module, call)
        ]

    def called(self, module: Module, call: ast.Call) -> Function | None:
        """The function of ours that ``call`` calls."""
        if isinstance(call.func, ast.Name) or name_of(getattr(call.func, "value", call)) in ("self", "cls"):
            found = module.functions.get(name_of(call.func))
            if found or not isinstance(call.func, ast.Name):
                return found
            others = [m.functions.get(call.func.id) for m in self.by_name[module.imported.get(call.func.id, "")]]
            return others[0] if len(others) == 1 else None
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            others = [m.functions.get(call.func.attr) for m in self.by_name[call.func.value.id]]
            return others[0] if len(others) == 1 else None
        return None


def _of_object(module: Module, call: ast.Call) -> bool:
    """Whether a call is one of a method."""
    return isinstance(call.func, ast.Attribute) and name_of(call.func.value) not in module.imported


def name_of(node: ast.AST) -> str:
    """The last word of a name, or nothing."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


class Scope:
    """Where an expression is: its module, the function and what this one was called with."""

    def __init__(self, source: Source, module: Module, at: ast.AST, given: dict[str, tuple[ast.expr, Scope]]) -> None:
        self.source = source
        self.module = module
        self.at = at
        self.function = module.function(at)
        self.given = given

    def ways(self, depth: int = DEPTH) -> list[Scope]:
        """The same place, once for each call of its function that gives it words to print."""
        function = self.function
        if not function or not depth or not function.all & WORDS:
            return [self]
        found = []
        for module, call in self.source.callers(function):
            for caller in Scope(self.source, module, call, {}).ways(depth - 1):
                given = {name: (value, caller) for name, value in function.given(call).items()}
                found.append(Scope(self.source, self.module, self.at, given))
        return found or [self]

    def texts(self, node: ast.expr, depth: int = DEPTH) -> list[str]:
        """All that ``node`` may say."""
        found = list(dict.fromkeys(self._texts(node, depth)))
        return found if len(found) <= MOST else [placeholder(node)]

    def _texts(self, node: ast.expr, depth: int) -> list[str]:
        if isinstance(node, ast.Constant):
            return [str(node.value)] if isinstance(node.value, (str, int)) else []
        if isinstance(node, ast.JoinedStr):
            return joined([self._part(part, depth) for part in node.values])
        if isinstance(node, ast.IfExp):
            yes, no = self.texts(node.body, depth), self.texts(node.orelse, depth)
            one_and_many = (
                len(yes) == len(no) == 1 and yes[0][:2] == no[0][:2] != "" and yes[0].isalpha() and no[0].isalpha()
            )
            return no if one_and_many else yes + no
        if isinstance(node, ast.BoolOp):
            return [text for value in node.values for text in self.texts(value, depth)]
        if isinstance(node, ast.BinOp):
            return self._operation(node, depth)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._name(node, depth)
        return [placeholder(node)]

    def _part(self, part: ast.expr, depth: int) -> list[str]:
        if not isinstance(part, ast.FormattedValue):
            return self.texts(part, depth)
        value = part.value
        words = isinstance(value, (ast.IfExp, ast.BoolOp, ast.Constant, ast.Call, ast.BinOp, ast.JoinedStr))
        constant = name_of(value).strip("_").isupper()
        texts = self.texts(value, depth) if words or constant or name_of(value) in WORDS else [placeholder(value)]
        return [f"'{text}'" if part.conversion == ord("r") else text for text in texts]

    def _operation(self, node: ast.BinOp, depth: int) -> list[str]:
        if isinstance(node.op, ast.Add):
            if isinstance(node.right, ast.Constant) and isinstance(node.right.value, int):
                return [placeholder(node.left)]
            return joined([self.texts(node.left, depth), self.texts(node.right, depth)])
        if isinstance(node.op, ast.Mult):  # "words" * condition
            return ["", *self.texts(node.left, depth)]
        (left,), (right,) = self.texts(node.left, depth)[:1], self.texts(node.right, depth)[:1]
        if isinstance(node.op, ast.RShift) and left.isdecimal() and right.isdecimal():
            return [str(int(left) >> int(right))]
        if isinstance(node.op, ast.LShift) and left.isdecimal() and right.isdecimal():
            return [str(int(left) << int(right))]
        return [placeholder(node)]

    def _call(self, node: ast.Call, depth: int) -> list[str]:
        name = name_of(node.func)
        if isinstance(node.func, ast.Attribute) and name in PASSED_THROUGH:
            return self.texts(node.func.value, depth)
        if name == "join" and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
            return self._list(node.func.value, node.args[0])
        if name == "many" and len(node.args) == 2:
            return [f"COUNT {text}s" for text in self.texts(node.args[1], depth)]
        function = self.source.called(self.module, node) if name not in (*NAMES, *SHOWN) else None
        if function and depth and _says_words(function.node):
            inner = {p: (value, self) for p, value in function.given(node).items()}
            returns = [n for n in ast.walk(function.node) if isinstance(n, ast.Return) and n.value]
            scopes = [Scope(self.source, function.module, statement, inner) for statement in returns]
            pairs = zip(scopes, returns, strict=True)
            found = [text for scope, r in pairs for text in scope.texts(r.value or node, depth - 1)]
            if found:
                return found
        return [placeholder(node)]

    def _list(self, between: ast.expr, node: ast.expr) -> list[str]:
        """Words of a table with something between them."""
        nodes = [node.left, node.right] if isinstance(node, ast.BinOp) else [node]
        parts = [word for each in nodes for word in self._words(each)]
        return [self.texts(between)[0].join(parts)] if parts else [placeholder(node)]

    def _words(self, node: ast.expr) -> list[str]:
        """The texts of a tuple, or of the keys of a table, which a constant of the module names."""
        if name_of(node).strip("_").isupper():
            node = self.module.constants.get(name_of(node), node)
        values = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        return [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]

    def _name(self, node: ast.Name | ast.Attribute, depth: int) -> list[str]:
        name = name_of(node)
        if isinstance(node, ast.Name) and self.function:
            assigned = list(self._assigned(name))
            if assigned:
                # What it was made of is what that was before.
                scopes = [Scope(self.source, self.module, statement, self.given) for statement, _ in assigned]
                pairs = zip(scopes, assigned, strict=True)
                return [text for scope, (_, value) in pairs for text in scope.texts(value, depth)]
            if name in self.given and depth:
                value, scope = self.given[name]
                return scope.texts(value, depth - 1)
        if name.strip("_").isupper():
            owner = name_of(node.value) if isinstance(node, ast.Attribute) else ""
            if not owner or owner in ("self", "cls"):
                owner = self.module.imported.get(name, "")
            modules = self.source.by_name[owner] if owner else [self.module]
            if len(modules) == 1 and name in modules[0].constants:
                return Scope(self.source, modules[0], modules[0].tree, {}).texts(modules[0].constants[name], depth)
        return [placeholder(node)]

    def _assigned(self, name: str) -> Iterator[tuple[ast.AST, ast.expr]]:
        """What ``name`` was given last before this place, on each way that leads to it."""
        assert self.function
        line = getattr(self.at, "lineno", 0)
        around = set(self.module.above(self.at))
        statements = [
            n
            for n in ast.walk(self.function.node)
            if isinstance(n, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and n.lineno < line
        ]
        for statement in sorted(statements, key=lambda n: -n.lineno):
            values = [value for target, value in assignments([statement]) if target == name]  # type: ignore[list-item]
            yield from ((statement, value) for value in values)
            if values and self.module.parents[statement] in around:
                return


def _says_words(function: ast.FunctionDef) -> bool:
    """Whether a function returns a text, rather than a value that it has found."""
    kind = function.returns
    return isinstance(kind, ast.Name) and kind.id == "str"


def joined(parts: list[list[str]]) -> list[str]:
    """Each text that takes one of each part."""
    count = 1
    for part in parts:
        count *= max(1, len(part))
    if count > MOST:
        parts = [part if len(part) == 1 else [min(part, key=len)] for part in parts]
    return ["".join(choice) for choice in product(*parts)]


def placeholder(node: ast.AST) -> str:
    """The name of a value, in capitals."""
    if isinstance(node, ast.Call):
        inner = [*node.args, *(k.value for k in node.keywords)]
        if name_of(node.func) in ("len", "log2"):
            return "COUNT"
        if name_of(node.func) in NAMES:
            return NAMES[name_of(node.func)]
        if inner:
            return placeholder(inner[0])
        return placeholder(node.func.value if isinstance(node.func, ast.Attribute) else node.func)
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return placeholder(node.generators[0].iter)
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return placeholder(node.value)
    if isinstance(node, ast.BinOp):
        return placeholder(node.left)
    if isinstance(node, ast.JoinedStr):
        return "…"
    name = name_of(node).strip("_")
    return NAMES.get(name, re.sub("(?<=[a-z])(?=[A-Z])", "-", name).upper().replace("_", "-") or "VALUE")
