"""Unprivileged containers from Docker images: namespaces, overlays, squashfs.

Python looks for each module by itself, in a dozen system calls: a tenth of a start. So an installation has the code
of all modules in one file, PACK, which base/pack.py writes. It begins with HEAD bytes of lines, an empty one first

    NAME LENGTH,LENGTH... OFFSET

for a module, and where its code is, in pieces as marshal writes them, behind its name and the source as that was: file,
size, time. The line of START has all that a start imports: most modules take less time than Python takes to import
them. IMAGE has what that of a squashfs file imports besides, and HOOKS our hooks, which are loaded while the server of
that starts. HELP is what ``penroot --help`` says, for which click takes longer than a start. What is of other sources
now is imported, or said, as usual. Of two modules in C it is their places that are kept. Nothing is imported here
but what is built in.
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

__version__ = "1.0.0rc1"
ENROOT_VERSION = "4.1.2"  # of enroot, whose commands, hooks and files these are: scripts compare it
LIBRARY = __file__.rpartition("/enroot_py/")[0]  # what an installation has on sys.path
PACK = f"{LIBRARY}/enroot_py/__pycache__/pack.{sys.implementation.cache_tag}"
_OURS = "enroot_py.", "pyxis_py", "_cffi_backend"  # what the pack may have
HEAD = 1 << 14  # bytes: room for a few hundred modules
HELP = "--help"
START = "start"
IMAGE = "image"
HOOKS = "hooks"


def version() -> str:
    """The version to tell: ours, or that of enroot where its name was used."""
    return ENROOT_VERSION if called_as() == "enroot" else __version__


def called_as() -> str:
    """The name that this process was called by: ``enroot`` has enroot's manners where ours are others."""
    return "enroot" if sys.argv[0].rpartition("/")[2] == "enroot" else "penroot"


class Pack:
    """The modules in PACK, for import: a finder and a loader, see importlib.abc."""

    def __init__(self) -> None:
        """Raises OSError where there is none, as in a source tree."""
        self._head = _read(HEAD, 0)
        self._found: dict[str, tuple[str, CodeType | None]] = {}  # by load(), and still to be imported

    def find(self, name: str) -> "tuple[str, CodeType | None] | None":
        """The source file and the code of a module, if it is not in C; None where it has to be looked for as usual."""
        if name in self._found:
            return self._found[name]
        kept = self._kept(name)
        return kept[0][1:] if kept else None

    def help(self) -> str:
        """What ``penroot --help`` says in 80 columns or more; "" where that is not known."""
        return "".join(text for _, _, text in self._kept(HELP))

    def load(self, line: str) -> None:
        """Import the modules of a line, each behind those that it imports; find() has what is in C, or a hook.

        Where one of them has another source now none is: who imports them will have them imported as usual.
        """
        for name, file, code in self._kept(line):
            if code is None or "-" in name:
                self._found[name] = file, code
            elif name not in sys.modules:
                self._import(name, file, code)

    def _import(self, name: str, file: str, code: "CodeType") -> None:
        above, _, last = name.rpartition(".")
        module = sys.modules[name] = type(sys)(name)
        spec = module.__spec__ = self._spec(name, file, code)
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

    def _kept(self, name: str) -> "list[tuple[str, str, Any]]":
        """Names and sources that a line is for, with the code or the text of each; none where one is another now."""
        begin = self._head.find(b"\n%s " % name.encode()) + 1
        if not begin:
            return []
        kept = []
        try:
            _, lengths, start = self._head[begin : self._head.find(b"\n", begin)].split(b" ")
            offset = int(start)
            for length in map(int, lengths.split(b",")):
                for module, file, size, changed, value in loads(_read(length, offset)):
                    state = posix.stat(path := f"{LIBRARY}/{file}")
                    if (state.st_size, state.st_mtime_ns) != (size, changed):
                        return []
                    kept.append((module, path, value))
                offset += length
        except (OSError, ValueError, EOFError, TypeError):
            return []  # it is cut, or replaced this moment
        return kept

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        module = self.find(name) if name.startswith(_OURS) else None
        if not module:
            return None
        file, code = module
        if code is None:
            return ModuleSpec(name, ExtensionFileLoader(name, file), origin=file)
        return self._spec(name, file, code)

    def _spec(self, name: str, file: str, code: "CodeType") -> ModuleSpec:
        spec = ModuleSpec(name, self, origin=file, loader_state=code)  # type: ignore[arg-type]
        directory, _, last = file.rpartition("/")
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


def compiled(path: str) -> "CodeType | None":
    """The code of a file of ours that import does not take, as 10-home.py; None where it has to be compiled."""
    name = path[len(LIBRARY) + 1 : -len(".py")].replace("/", ".")
    module = pack.find(name) if pack and path.startswith(LIBRARY + "/") else None
    return module[1] if module else None


pack: Pack | None = None
try:
    pack = Pack()
    sys.meta_path.insert(0, pack)
except OSError:
    pass
