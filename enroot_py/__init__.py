"""Unprivileged containers from Docker images: namespaces, overlays, squashfs.

Python looks for each module by itself, in a dozen system calls: a tenth of a start. So an installation has the code
of all modules in one file, PACK, which base/pack.py writes. It begins with HEAD bytes of lines

    NAME FILE SIZE MTIME LENGTH OFFSET

for a module, its source as that was, and where its code is, as marshal writes it. A module whose source is another
one now is imported as usual. Nothing is imported here but what is built in.
"""

import posix
import sys
from _frozen_importlib import ModuleSpec
from marshal import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType

__version__ = "1.0.0rc1"
ENROOT_VERSION = "4.1.2"  # of enroot, whose commands, hooks and files these are: scripts compare it
LIBRARY = __file__.rpartition("/enroot_py/")[0]  # what an installation has on sys.path
PACK = f"{LIBRARY}/enroot_py/__pycache__/pack.{sys.implementation.cache_tag}"
HEAD = 1 << 15  # bytes: room for a few hundred modules


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
        lines = _read(HEAD, 0).decode().split("\n")
        self._lines = {line.partition(" ")[0]: line for line in lines}

    def find(self, name: str) -> "tuple[str, CodeType] | None":
        """The source file and the code of a module; None where it has to be looked for as usual."""
        line = self._lines.get(name)
        if not line:
            return None
        _, file, size, changed, length, offset = line.split(" ")
        file = f"{LIBRARY}/{file}"
        try:
            state = posix.stat(file)
            if state.st_size == int(size) and state.st_mtime_ns == int(changed):
                return file, loads(_read(int(length), int(offset)))
        except (OSError, ValueError, EOFError, TypeError):
            pass  # it is cut, or replaced this moment
        return None

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        module = self.find(name)
        if not module:
            return None
        file, code = module
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
    module = _pack.find(name) if _pack and path.startswith(LIBRARY + "/") else None
    return module[1] if module else None


_pack: Pack | None = None
try:
    _pack = Pack()
    sys.meta_path.insert(0, _pack)
except OSError:
    pass
