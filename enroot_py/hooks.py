"""Hooks: programs that shape a container after its root is mounted and before it is entered.

The contract is in hooks/README.md. Ours are Python and run in this process.
"""

import os
import sys
from _collections_abc import Callable, Mapping
from _frozen_importlib_external import SourceFileLoader

from enroot_py import configs, log, mounts, paths
from enroot_py.errors import HookError, PenrootError
from enroot_py.settings import Settings, sysconf_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pwd import struct_passwd

_HERE = os.path.dirname(os.path.abspath(__file__))
# In an installation they are inside the package, in a source tree beside it.
STANDARD = next(d for d in (_HERE + "/standard_hooks", os.path.dirname(_HERE) + "/hooks") if os.path.isdir(d))


class Context:
    """What a hook sees and changes. Paths are of the container and resolved beneath its root.

    ``cgroups`` is /proc/self/cgroup as it was outside, ``mount_point`` where the root is, for programs.
    """

    def __init__(
        self,
        root: int,
        settings: Settings,
        environ: "dict[str, str]",
        host: "Mapping[str, str]",
        user: "struct_passwd",
        cgroups: str = "",
        mount_point: str = "",
    ) -> None:
        self.root = root
        self.settings = settings
        self.environ = environ
        self.host = {**settings.passed_on, **host} if settings.passed_on else host
        self.user = user
        self.cgroups = cgroups
        self.mount_point = mount_point

    def read(self, path: str) -> bytes:
        """Content of a file, empty if there is none."""
        try:
            return paths.read(self.root, path)
        except OSError:
            return b""

    def exists(self, path: str) -> bool:
        return paths.exists(self.root, path)

    def is_directory(self, path: str) -> bool:
        try:
            os.close(paths.open_in(self.root, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError:
            return False
        return True

    def list(self, path: str) -> "list[str]":
        """Names in a directory, sorted; none if there is no such directory."""
        try:
            fd = paths.open_in(self.root, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def write(self, path: str, content: bytes) -> None:
        """Replace a file, unless it says the same already."""
        if self.read(path) != content or (not content and not self.exists(path)):
            paths.write(self.root, path, content)

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        """Make a directory and its parents."""
        os.close(paths.create(self.root, path, directory=True, mode=mode))

    def mount(self, source: str, target: str, options: str) -> None:
        """Bind-mount now; ``options`` as in fstab."""
        mounts.Mount(source, target, "none", options, -1, "hook").execute(self.root)


Hook = Callable[[Context], None]


def load(directory: str, settings: Settings, host: "Mapping[str, str]") -> "list[tuple[str, Hook]]":
    """The hooks of a directory, with those of the site and the user, in the order of their names.

    Raises HookError.
    """
    site = (sysconf_path(host) + "/hooks.d", settings.config_path + "/hooks.d")
    return [(path, _load(path)) for path in _sorted(directory, *site)]


def run(hooks: "list[tuple[str, Hook]]", context: Context) -> None:
    """Run what load() gave. Raises HookError."""
    for path, hook in hooks:
        if log.explain:
            log.explain(f"hook     {path}")
        try:
            hook(context)
        except (PenrootError, KeyboardInterrupt):
            raise
        except BaseException as e:  # sys.exit(0) too: the container would never start, and nobody would know
            raise _failure(path, e) from e


def _failure(path: str, error: BaseException) -> HookError:
    """What a site's hook does wrong is no bug of ours: one line, with the place in the hook."""
    if os.environ.get("PENROOT_DEBUG"):
        sys.excepthook(type(error), error, error.__traceback__)
    line = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f"{path}:{line}" if line else path
    hint = paths.foreign_group(error) or "PENROOT_DEBUG=1 shows more"
    return HookError(f"hook {where} failed: {type(error).__name__}: {error}", hint=hint)


def _sorted(*directories: str) -> "list[str]":
    """The hooks of directories by name; of two of one name the later directory's."""
    found: dict[str, str] = {}
    for directory in directories:
        names = configs.names(directory)
        found.update((name, f"{directory}/{name}") for name in names if name.endswith(".py") and name[0] not in "._")
    return [path for _, path in sorted(found.items())]


def _load(path: str) -> "Hook":
    # The loader keeps byte code beside the file, as import does; import itself
    # does not take names such as 10-home.
    module: dict[str, object] = {"__name__": path, "__file__": path}
    try:
        code = SourceFileLoader(path, path).get_code(path)
        assert code is not None
        exec(code, module)
    except (PenrootError, KeyboardInterrupt):
        raise
    except BaseException as e:
        raise _failure(path, e) from e
    function = module.get("run")
    if not callable(function):
        raise HookError(f"hook {path} defines no function run(context)", hint="see hooks/README.md")
    return function
