"""Keep the modules of an installation in one file: Python needs a dozen system calls to find each module.

`make install` and packages keep the sources of our modules in MODULES, a zip archive, and packing.py compiles them to
PACK. The first HEAD_BYTES of PACK are lines. The first line is the size and the time of the archive; a PACK of
another archive or another Python is ignored. Every further line is

    NAME LENGTH,LENGTH... OFFSET

and locates a list. The list is stored from OFFSET on, in pieces of these lengths, written by marshal. Each module has a
line of its own, whose list has one item: (module, file, code). Other lines locate groups of such items. START has all
modules that a start imports. IMAGE has the additional modules for a start of a squashfs file. EXEC and LIST have
the modules of ``penroot exec`` and ``penroot list``. CHECK and STEP have the modules that pyxis_py/helper.py imports
for its verbs check and ahead. The items of HOOKS are our hooks: (file, size, time, code). HELP has one item, the text
of ``penroot --help``. Without a PACK, Python imports modules from the archive, or in a source tree from files.

A start takes 19.0 ms of CPU time with PACK, 23.4 ms with files, and 25.2 ms with a zip archive of compiled modules
(24.2 ms if the archive has only the modules of a start). Every command imports this module first, so it imports only
built-in modules.
"""

import posix
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import ExtensionFileLoader
from marshal import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any

    Kept = tuple[str, str, CodeType | None]  # a module, its file beneath LIBRARY, and its code (None if it is in C)

LIBRARY = __file__.rpartition("/enroot_py/")[0]  # the directory on sys.path
MODULES = f"{LIBRARY}/modules.zip"
PACK = f"{LIBRARY}/modules.{sys.implementation.cache_tag}"
HEAD_BYTES = 1 << 14
HELP = "--help"
START = "start"
EXEC = "exec"
LIST = "list"
IMAGE = "image"
CHECK = "check"
STEP = "ahead"
HOOKS = "hooks"
_OURS = "enroot_py.", "pyxis_py.", "_cffi_backend"


class Pack:
    """Import the modules in PACK: a finder and a loader, see importlib.abc."""

    def __init__(self) -> None:
        """Open PACK. Raises OSError if there is no PACK, or only a PACK of another archive."""
        self._head = _read(HEAD_BYTES, 0)
        if not self._head.startswith(stamp()):
            raise FileNotFoundError(PACK)
        self._found: dict[str, Kept] = {}  # modules in C that load() found

    def load(self, line: str) -> None:
        """Import the modules of a line. In the line, a module comes after the modules that it imports."""
        for module in self.kept(line):
            if module[2] is None:
                self._found[module[0]] = module
            elif module[0] not in sys.modules:
                self._import(module)

    def _import(self, kept: "Kept") -> None:
        name = kept[0]
        above, _, last = name.rpartition(".")
        module = sys.modules[name] = type(sys)(name)
        spec = module.__spec__ = self._spec(kept)
        module.__loader__ = self  # type: ignore[assignment]
        module.__package__ = above
        if spec.submodule_search_locations is not None:
            module.__package__, module.__path__ = name, spec.submodule_search_locations
        try:
            self.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        setattr(sys.modules[above], last, module)

    def kept(self, name: str) -> "list[Any]":
        """Return the list that the line ``name`` locates, or [] if there is no such line or PACK is damaged."""
        begin = self._head.find(b"\n%s " % name.encode()) + 1
        if not begin:
            return []
        kept = []
        try:
            _, lengths, start = self._head[begin : self._head.find(b"\n", begin)].split(b" ")
            offset = int(start)
            for length in map(int, lengths.split(b",")):
                kept += loads(_read(length, offset))
                offset += length
        except (OSError, ValueError, EOFError, TypeError):
            return []
        return kept

    def find(self, name: str) -> "Kept | None":
        """Return a module, or None if PACK does not have it."""
        return self._found.get(name) or next(iter(self.kept(name)), None)

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        kept = self.find(name) if name.startswith(_OURS) else None
        return self._spec(kept) if kept else None

    def _spec(self, kept: "Kept") -> ModuleSpec:
        name, file, code = kept
        path = f"{MODULES}/{file}"
        if code is None:
            path = f"{LIBRARY}/{file}"
            return ModuleSpec(name, ExtensionFileLoader(name, path), origin=path)
        spec = ModuleSpec(name, self, origin=path, loader_state=code)  # type: ignore[arg-type]
        directory, _, last = path.rpartition("/")
        if last == "__init__.py":
            spec.submodule_search_locations = [directory]
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: "ModuleType") -> None:
        spec = module.__spec__
        assert spec is not None
        module.__file__ = spec.origin
        exec(spec.loader_state, module.__dict__)


def _read(length: int, offset: int) -> bytes:
    fd = posix.open(PACK, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return posix.pread(fd, length, offset)
    finally:
        posix.close(fd)


def stamp() -> bytes:
    state = posix.stat(MODULES)
    return b"%d %d\n" % (state.st_size, state.st_mtime_ns)


def _open() -> "Pack | None":
    """Make Python import from PACK, or else from the archive. Without PACK, add the libraries of `make dev`."""
    sys.modules["enroot_py"].__path__.append(f"{MODULES}/enroot_py")
    sys.modules["enroot_py.base"].__path__.append(f"{MODULES}/enroot_py/base")
    try:
        pack = Pack()
    except OSError:
        sys.path.append(f"{LIBRARY}/.venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages")
        return None
    sys.meta_path.insert(0, pack)
    return pack


def load(line: str) -> None:
    """Import the modules of a line at once, if PACK has the line."""
    if current:
        current.load(line)


def help_text() -> str:
    """Return the text of ``penroot --help`` for 80 columns or more, or "" without a PACK."""
    return "".join(current.kept(HELP)) if current else ""


def hooks() -> "dict[str, CodeType]":
    """Return the code of our hooks, by path, except hooks whose files have changed."""
    code_of = {}
    for file, size, changed, code in current.kept(HOOKS) if current else ():
        state = posix.stat(path := f"{LIBRARY}/{file}")
        if (state.st_size, state.st_mtime_ns) == (size, changed):
            code_of[path] = code
    return code_of


current = _open()
