"""Every error that we print on purpose, as a page for each class: docs/errors."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs import NOTE, ROOT, escaped, plugin
from tests.docs.reading import Module, Scope, Source, assignments, name_of

BASE = "PenrootError"
# Modules whose ValueErrors say what is wrong with a value, after words of who has asked for it.
VALUE = "ValueError"
OF_VALUES = ("log", "edf", "table", "words", "cdi", "addresses", "mountentries", "imageconfig", "options", "settings")
DIRECTORY = ROOT / "docs/errors"
# What the plugin in C prints.
IN_C = "fail()"
# Functions that put a place before the words of another error, or print those of another process or a library.
HANDED_ON = {
    "cdi _parse_yaml",
    "edf _expand",
    "edffile _variables",
    "guest _ask",
    "guest read",
    "leave clean_up",
    "mksquashfs check_writing",
    "options _mounts",
    "options _resolved",
    "reach run",
    "startfile _mounts",
    "startfile target",
    "submit _check_policy",
    "submit check",
    "tracking _learned",
    "verbs main",
    "workers _child",
    "yaml parse",
}
# A class that is caught within its module, and of which no user reads.
INNER = {"Transient"}


class Kind:
    """A class of errors, and the page of it."""

    def __init__(self, doc: str, status: int) -> None:
        self.doc = doc
        self.status = status


OF_PLUGIN = Kind("Slurm has called the plugin, and this cannot be done: the step, or its submission, ends.", 1)


class Message:
    """What an error says, and the directory of who says it first."""

    def __init__(self, text: str, directory: Path) -> None:
        self.text = text
        self.directory = directory
        self.hints: dict[str, None] = {}  # in the order of the source


@cache
def ours() -> Source:
    return Source()


@cache
def kinds(source: Source) -> dict[str, Kind]:
    """The classes of errors by name, each after what it derives from."""
    found: dict[str, Kind] = {}
    of_value = Kind(
        "A value does not fit: before these words the line has what names it, an option, a variable or a line.", 1
    )
    left = [n for module in source.modules for n in ast.walk(module.tree) if isinstance(n, ast.ClassDef)]
    while True:
        derived = [n for n in left if n.name == BASE or any(name_of(base) in found for base in n.bases)]
        if not derived:
            return {**found, VALUE: of_value}
        for node in derived:
            above = next((found[name_of(base)] for base in node.bases if name_of(base) in found), None)
            codes = [value for name, value in assignments(node.body) if name == "exit_code"]
            status = ast.literal_eval(codes[0]) if codes else above.status if above else 1
            found[node.name] = Kind(ast.get_docstring(node) or "", status)
            left.remove(node)


def _is_for_users(module: Module, name: str) -> bool:
    if name == VALUE:
        return module.path.stem in OF_VALUES
    return name in kinds(module.source) and name not in INNER


def _hints(call: ast.Call) -> list[ast.expr]:
    behind = call.args[1:2] if name_of(call.func) == VALUE else []
    return [*behind, *(keyword.value for keyword in call.keywords if keyword.arg == "hint")]


def sites(source: Source) -> Iterator[tuple[Module, ast.Call]]:
    """Each call that makes an error."""
    for module in source.modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and node.args and _is_for_users(module, _kind(node)):
                yield module, node


def _kind(call: ast.Call) -> str:
    """The class of what a call makes: a program that fails raises what its caller has asked for, in self.error."""
    name = name_of(call.func)
    return BASE if name == "error" and name_of(getattr(call.func, "value", call)) == "self" else name


def said(module: Module, call: ast.Call) -> Iterator[tuple[str, list[str]]]:
    """What an error may say in words of its own, with its hints."""
    for scope in Scope(module.source, module, call, {}).ways():
        hints = [text for hint in _hints(call) for text in scope.texts(hint) if says_something(text)]
        for text in scope.texts(call.args[0]):
            if text.endswith(": "):
                continue  # what is nothing here is not said: who gives it looks before
            if says_something(text) or (hints and re.search("[^A-Z-]", text)):
                yield text, hints


def handing_on() -> set[str]:
    """The functions that put something before the words of another error, and say none."""
    found = {}
    for module, call in sites(ours()):
        function = module.function(call)
        place = f"{module.path.stem} {function.node.name if function else ''}"
        found[place] = found.get(place, True) and not any(said(module, call))
    return {place for place, alone in found.items() if alone}


def resolved(source: Source | None = None) -> dict[str, list[Message]]:
    """The messages of each class, in the order of rooms and modules."""
    source = source or ours()
    found: dict[str, dict[str, Message]] = defaultdict(dict)
    for module, call in sites(source):
        for text, hints in said(module, call):
            message = found[_kind(call)].setdefault(text, Message(text, module.path.parent))
            message.hints.update(dict.fromkeys(hints))
    return {kind: list(messages.values()) for kind, messages in found.items()}


def says_something(text: str) -> bool:
    """Whether there are words beside the names of values: else it is another error's, with a place before it."""
    return bool(re.search(r"(?<![\w'$./-])[a-z]{2,}", text))


# A page: its file, its title, and the classes on it.
PAGES = (
    ("usage", "The command line", ("UsageError",)),
    ("config", "Settings and files of settings", ("ConfigError",)),
    ("reference", "Names of images", ("ImageReferenceError",)),
    ("registry", "Registries", ("RefusedError", "WebPage", "Unreachable", "RegistryError")),
    ("image", "Images and the store", ("ImageError",)),
    ("policy", "Signatures and the policy of a site", ("PolicyError",)),
    ("container", "Containers", ("ContainerError", "BusyError")),
    ("value", "Values", (VALUE,)),
    ("mount", "Mounts", ("MountError",)),
    ("namespace", "What the kernel allows", ("NamespaceError",)),
    ("hook", "Hooks and devices", ("HookError",)),
    ("command", "The command in the container", ("CommandError",)),
    ("plugin", "The plugin in srun and slurmstepd", (IN_C,)),
    ("other", "Everything else", ("PenrootError",)),
)
WRITING = "../troubleshooting.md#where-something-cannot-be-written"
WORDS = ROOT / "tests/docs/words.md"


@cache
def words() -> dict[str, str]:
    """What a person has written below a message, by its text."""
    sections = re.split(r"^## `(.*)`\n", WORDS.read_text(), flags=re.M)[1:]
    return {text: body.strip() for text, body in zip(sections[::2], sections[1::2], strict=True)}


def by_page() -> dict[str, list[Message]]:
    """The messages of each page, by rooms, and in these in the order of the source."""
    found = {**resolved(), IN_C: [Message(text, plugin.DIRECTORY) for text in dict.fromkeys(plugin.texts())]}
    assert set(found) == {kind for _, _, of_page in PAGES for kind in of_page}
    together = {name: [message for kind in of_page for message in found[kind]] for name, _, of_page in PAGES}
    return {name: sorted(messages, key=lambda message: message.directory) for name, messages in together.items()}


def pages() -> dict[str, str]:
    """The pages, by file."""
    found = by_page()
    return {f"{name}.md": _page(title, found[name], of_page) for name, title, of_page in PAGES}


def _page(title: str, messages: list[Message], of_page: tuple[str, ...]) -> str:
    described = {**kinds(ours()), IN_C: OF_PLUGIN}
    (status,) = {described[kind].status for kind in of_page}
    docs = " ".join(" ".join(described[kind].doc.split("\n\n")[0].split()) for kind in of_page)
    docs += "" if str(status) in docs else f" Exit status {status}."
    out = [
        NOTE,
        "",
        f"# {title}",
        "",
        docs,
        "What stands in capitals is a value: a path, a name, what the kernel says.",
    ]
    room = None
    for message in messages:
        if message.directory != room:
            room = message.directory
            out += ["", f"## {room.name}", "", _purpose(room)]
        out += ["", f"### {_heading(message.text)}", *_body(message)]
    return "\n".join(out) + "\n"


def _purpose(room: Path) -> str:
    """What a room is for, in its own words."""
    if "hooks" in room.parts:
        return "What shapes a container at its start."
    if room == plugin.DIRECTORY:
        return "What Slurm loads into srun, slurmd and slurmstepd."
    doc = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    return " ".join(doc.split("\n\n")[0].split())


def _heading(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


@cache
def _full_disk() -> frozenset[str]:
    """The hints of everything that writes: they have a place of their own."""
    (module,) = ours().by_name["filesystems"]
    returns = [node for node in ast.walk(module.functions["way_out"].node) if isinstance(node, ast.Return)]
    texts = [text for node in returns if node.value for text in Scope(ours(), module, node, {}).texts(node.value)]
    return frozenset(filter(says_something, texts))


def _body(message: Message) -> Iterator[str]:
    everywhere = _full_disk() if _full_disk() <= set(message.hints) else frozenset()
    for hint in message.hints:
        if hint not in everywhere:
            yield from ("", f"> {escaped(hint)}")
    if everywhere:
        yield from ("", f"> [What REASON says]({WRITING}) is what to do.")
    if message.text in words():
        yield from ("", words()[message.text])
