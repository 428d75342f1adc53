"""Find and run hooks: programs that change a container after its root is mounted and before its program runs.

hooks/README.md describes their interface. Our hooks are Python and run in this process.
"""

from __future__ import annotations

import os
import sys
from _collections_abc import Callable, Mapping, Sequence
from _frozen_importlib_external import SourceFileLoader

from enroot_py import LIBRARY
from enroot_py.base import log, pack, paths
from enroot_py.base.errors import HookError, PenrootError
from enroot_py.base.fds import Fd
from enroot_py.base.features import folders, plugged
from enroot_py.base.frozen import Frozen
from enroot_py.config import files
from enroot_py.config.settings import Settings, directories
from enroot_py.runtime import fstab, mounting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pwd import struct_passwd
    from types import CodeType

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_LINKS = "a symlink of the image leads there: find it with readlink -f in the container"
# Our hooks: inside the package in an installation, beside it in a source tree.
STANDARD = next(d for d in (LIBRARY + "/enroot_py/standard_hooks", LIBRARY + "/hooks") if os.path.isdir(d))
OURS = (STANDARD, *(f"{LIBRARY}/{place}/hooks" for place in folders("hooks")))


class Caller(Frozen):
    """The caller of a start: environment, passwd(5) entry, name of the group, and two files of /proc/self."""

    host: Mapping[str, str]
    user: struct_passwd
    group: str = ""
    cgroups: str = ""
    mountinfo: str = ""


def caller(host: Mapping[str, str], uid: int, gid: int) -> Caller:
    """Return the caller with the environment ``host``. A caller without passwd(5) entry gets names such as user1000."""
    import grp
    import pwd

    try:
        entry = pwd.getpwuid(uid)
        # A directory service may return no home or shell. passwd(5): the default shell is /bin/sh.
        user = pwd.struct_passwd((*entry[:3], gid, entry[4], entry[5] or "/", entry[6] or "/bin/sh"))
    except KeyError:
        user = pwd.struct_passwd((f"user{uid}", "x", uid, gid, "", "/", "/bin/sh"))
    try:
        group = grp.getgrgid(gid).gr_name
    except KeyError:
        group = f"group{gid}"
    return Caller(host=host, user=user, group=group, cgroups=_of_proc("cgroup"), mountinfo=_of_proc("mountinfo"))


def _of_proc(name: str) -> str:
    with Fd(os.open(f"/proc/self/{name}", os.O_RDONLY | os.O_CLOEXEC)) as fd:
        return os.fsdecode(fd.content())


class Context:
    """The argument of a hook. Its paths are paths in the container, resolved beneath the container's root.

    ``mount_point`` is the path of the root, for programs that a hook runs.
    """

    def __init__(
        self, root: int, mount_point: str, settings: Settings, environ: dict[str, str], caller: Caller
    ) -> None:
        self.root = root
        self.mount_point = mount_point
        self.settings = settings
        self.environ = environ
        self.host = {**settings.passed_on, **caller.host} if settings.passed_on else caller.host
        self.user = caller.user
        self.group = caller.group
        self.cgroups = caller.cgroups
        self.mountinfo = caller.mountinfo  # read before the start, which triples the number of mounts
        self.mounted: set[tuple[str, str]] = set()  # (source, target) of hooks' mounts so far, and of the caller's

    def value(self, name: str) -> str:
        """Return a variable of the caller, else of the container, else ""."""
        return self.host.get(name, self.environ.get(name, ""))

    def read(self, path: str) -> bytes:
        """Return the content of a regular file, or nothing if it is missing. Warn if it is too large or unreadable."""
        try:
            return paths.read(self.root, path)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as e:
            log.warn(f"{path} of the image is not read: {e.strerror}")
            return b""

    def exists(self, path: str) -> bool:
        return paths.exists(self.root, path)

    def is_directory(self, path: str) -> bool:
        try:
            with paths.open_in(self.root, path, _DIRECTORY):
                return True
        except OSError:
            return False

    def list(self, path: str) -> list[str]:
        """Return the sorted names in a directory, or none if it does not exist."""
        try:
            directory = paths.open_in(self.root, path, _DIRECTORY)
        except OSError:
            return []
        with directory:
            return sorted(os.listdir(directory))

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Replace a file unless its content is the same. Raises HookError for a file of the host."""
        try:
            if paths.read(self.root, path) == content:
                return
        except OSError:
            pass  # missing, or not a regular file
        try:
            paths.write(self.root, path, content, mode)
        except paths.Foreign as e:
            raise HookError(f"cannot write {path} in the container: {e.strerror}", hint=_LINKS) from e

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        """Create a directory and its parents. Raises HookError for a directory of the host."""
        try:
            os.close(paths.make_directory(self.root, path, mode))
        except paths.Foreign as e:
            raise HookError(f"cannot make {path} in the container: {e.strerror}", hint=_LINKS) from e

    def mount(self, source: str, target: str, options: str) -> None:
        """Bind-mount ``source`` on ``target``. ``options`` are options of fstab(5), separated by commas."""
        mount = mounting.Mount(source, target, "none", tuple(options.split(",")), -1, "hook")
        fstab.execute(mount, self.root)
        self.mounted.add((source.rstrip("/"), target.rstrip("/")))


class Hook:
    """One hook: a Python function, or a bash script. A hook without a path is switched off.

    ``why`` tells users why the hook runs or not. ``original`` is the file of enroot's hook that this hook replaces.
    """

    __slots__ = ("name", "path", "why", "original", "function")

    def __init__(self, name: str, path: str, why: str = "") -> None:
        self.name = name
        self.path = path
        self.why = why
        self.original = ""
        self.function: Callable[[Context], None] | None = None

    @property
    def is_script(self) -> bool:
        return self.path.endswith(".sh")

    @property
    def is_ours(self) -> bool:
        """Return whether the hook is part of penroot, or switched off."""
        return not self.path or _is_ours(self.path)

    def describe(self) -> str:
        subject = f"hook     {self.path}" if self.path else f"no hook  {self.name}"
        return f"{subject}  ({self.why})" if self.why else subject


def load(settings: Settings, host: Mapping[str, str], own_directories: Sequence[str] = OURS) -> list[Hook]:
    """Load the hooks of a start in the order of arrange(). Raises HookError."""
    hooks = arrange(settings, host, own_directories)
    compiled = preloaded or pack.hooks()
    for hook in hooks:
        if hook.path.endswith(".py"):
            hook.function = _load(hook.path, compiled.get(hook.path), settings, host)
    return hooks


preloaded: dict[str, CodeType] = {}  # our hooks by path, in a process that forks a child for each start


def preload() -> None:
    """Compile our hooks once, for the starts of this process's children."""
    compiled = pack.hooks()
    paths_of_ours = [f"{directory}/{name}" for directory in OURS for name in _names(directory) if name.endswith(".py")]
    preloaded.update({path: compiled.get(path) or _compile(path) for path in paths_of_ours})


def look_outside(settings: Settings, host: Mapping[str, str]) -> bool:
    """Return whether to load hooks before entering a user namespace: in it, root's files appear to be nobody's."""
    if not settings.is_extended and "PENROOT_ANNOTATIONS" not in host:
        return False
    return any(feature.looks_outside(settings, host) for feature in plugged("outside"))


def arrange(settings: Settings, host: Mapping[str, str], ours: Sequence[str] = OURS) -> list[Hook]:
    """Return the hooks of penroot (directories ``ours``), the site and the user, in the order in which they run.

    Hooks run in order of name, whatever their language. A hook of the site or the user replaces our hook of the same
    name. A user's bash scripts that replace none of our hooks run last, as in enroot. Raises ConfigError.
    """
    by_name = {
        name: Hook(name[:-3], f"{folder}/{name}") for folder in ours for name in _names(folder) if name[-3:] == ".py"
    }
    last: list[Hook] = []
    system, user = directories("hooks.d", settings, host)
    for site in (system, user):
        names = _names(site)
        for name in (name for name in names if name.endswith(".py")):
            path = f"{site}/{name}"
            known = by_name.get(name)
            off = known is not None and _is_empty(path)
            why = f"switched off by {path}" if off else f"in place of {known.path or 'none'}" if known else ""
            by_name[name] = Hook(name[:-3], "" if off else path, why)
        for name in (name for name in names if name.endswith(".sh")):
            hook = _script(f"{site}/{name}", by_name, ours, settings, host)
            if hook is None:
                continue
            if name in by_name or (site == user and not hook.why):
                last.append(hook)
            else:
                by_name[name] = hook
    # Sort all names as if they ended in .sh: enroot sorts whole names, and all its hooks end in .sh.
    return [*(by_name[name] for name in sorted(by_name, key=lambda name: name[:-3] + ".sh")), *last]


def _script(
    path: str, by_name: dict[str, Hook], directories_of_ours: Sequence[str], settings: Settings, host: Mapping[str, str]
) -> Hook | None:
    """Return the hook for the bash script ``path`` of a site, or None if the script does not run. Update ``by_name``.

    A script with the name of our hook acts as in enroot: if the script cannot run, our hook is switched off; if the
    script is edited, it replaces our hook. In place of enroot's original script, our hook runs. Raises ConfigError.
    """
    from enroot_py.runtime import originals

    name = path.rpartition("/")[2][:-3]
    current = originals.RENAMED.get(name, name)
    ours = by_name.get(current + ".py")
    if ours is not None and ours.path.rpartition("/")[0] not in directories_of_ours:
        ours = None  # a Python hook of the site or the user has replaced it
    if reason := originals.idle(path):
        if ours is not None and current == name:
            by_name[name + ".py"] = Hook(name, "", f"switched off: {path} {reason}")
        return None
    if originals.is_original(path, name, STANDARD + "/originals.b2sum"):
        instead = ours
        if instead is None and (other := originals.substitute(name, directories_of_ours, settings, host)) is not None:
            instead = Hook(name, other)
        if instead is not None:
            instead.why, instead.original = f"in place of {path}, an original of enroot", path
            by_name.setdefault(instead.name + ".py", instead)
            return None
    if ours is not None and current == name:
        del by_name[name + ".py"]
        return Hook(name, path, "in place of penroot's hook")
    return Hook(name, path)


def run(hooks: list[Hook], context: Context, script: Callable[[str], None] | None = None) -> None:
    """Run the hooks of load(); ``script`` runs bash hooks. Raises HookError."""
    for hook in hooks:
        if log.explain:
            log.explain(hook.describe())
        if hook.is_script:
            assert script is not None
            script(hook.path)
        elif hook.function is not None:
            try:
                _call(hook.path, hook.function, context)
            except (PenrootError, KeyboardInterrupt):
                raise
            except BaseException as e:  # including sys.exit(0), which would end the start without an error
                raise _failure(hook.path, e) from e


def _is_ours(path: str) -> bool:
    return path.startswith(tuple(f"{directory}/" for directory in OURS))


def _call(path: str, function: Callable[..., object], *arguments: object) -> object:
    """Call a function of the hook ``path``, through sitehooks.call() if the hook is not ours."""
    if _is_ours(path):
        return function(*arguments)
    from enroot_py.runtime import sitehooks

    return sitehooks.call(function, *arguments)


def _failure(path: str, error: BaseException) -> HookError:
    """Return the error of a hook as one line with file and line number."""
    if os.environ.get("PENROOT_DEBUG"):
        sys.excepthook(type(error), error, error.__traceback__)
    line = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    location = f"{path}:{line}" if line else path
    if _is_ours(path):
        location = path.rpartition("/")[2].removesuffix(".py")
    hint = paths.foreign_group(error) or "PENROOT_DEBUG=1 shows more"
    return HookError(f"hook {location} failed: {_reason(error)}", hint=hint)


def _reason(error: BaseException) -> str:
    """Describe a system error in words, or another exception by type and text."""
    if isinstance(error, OSError) and error.strerror:
        path = error.filename if error.filename2 is None else error.filename2
        return error.strerror if path is None else f"{path}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _is_empty(path: str) -> bool:
    """Return whether the file exists and is empty or a device such as /dev/null. A dangling link is not empty."""
    return os.path.exists(path) and not os.path.getsize(path)


def _names(directory: str) -> list[str]:
    """Return the sorted names in a directory that do not begin with a dot or an underscore."""
    return sorted(name for name in files.names(directory) if name[0] not in "._")


def _compile(path: str) -> CodeType:
    """Compile a file and cache the code beside it, as ``import`` does. ``import`` itself cannot load 10-home.py."""
    files.check_regular(os.stat(path), path)
    code = SourceFileLoader(path, path).get_code(path)
    assert code is not None
    return code


def _load(
    path: str, code: CodeType | None, settings: Settings, host: Mapping[str, str]
) -> Callable[[Context], None] | None:
    module: dict[str, object] = {"__name__": path, "__file__": path}
    try:
        _call(path, exec, code or _compile(path), module)
        outside = module.get("outside")
        if callable(outside):
            return _call(path, outside, settings, {**settings.passed_on, **host})  # type: ignore[return-value]
    except (PenrootError, KeyboardInterrupt):
        raise
    except BaseException as e:
        raise _failure(path, e) from e
    function = module.get("run")
    if not callable(function):
        raise HookError(f"hook {path} defines no function run(context)", hint="see hooks/README.md")
    return function
