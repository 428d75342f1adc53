"""Add devices of the host to a container. Hooks decide on the changes; this module describes and executes them.

A device needs nodes in /dev, files of its driver, links, variables and entries in the loader's cache. This module knows
no vendor.

A container has the host's /dev or a private one. A node of the host's /dev cannot be removed. To hide a node,
bind-mount it on itself with ``nodev``: then open(2) fails with EACCES, where a device cgroup would cause EPERM.
"""

from __future__ import annotations

import os
import stat

from enroot_py.base import ldcache, linux, log, paths
from enroot_py.base.errors import HookError
from enroot_py.base.fds import Fd
from enroot_py.config.words import DEFAULT_PATH
from enroot_py.runtime import mounting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from enroot_py.runtime.hooks import Context

_RDONLY = linux.MOUNT_ATTR_RDONLY
_FILE = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
_NODE = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NOEXEC
_CACHE = "/etc/ld.so.cache"
_FLAGS = os.O_PATH | os.O_CLOEXEC


class Host:
    """A directory tree with the files of a host: the host itself, a directory with a driver, or the tree of a test.

    Raises HookError if the tree does not exist.
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix.rstrip("/")
        self._root = -1
        if self.prefix:
            try:
                self._root = os.open(self.prefix, _FLAGS | os.O_DIRECTORY)
            except OSError as e:
                raise HookError(f"cannot look for devices beneath {prefix}: {e.strerror}") from e
            # real() removes this path from the results of readlink(2) on /proc/self/fd.
            self.prefix = os.readlink(f"/proc/self/fd/{self._root}").rstrip("/")

    def __del__(self) -> None:
        if self._root >= 0:
            os.close(self._root)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Host:
        """Return the tree at PENROOT_HOST_ROOT, or the host if it is unset. Hooks open its files as the caller."""
        return cls(environ.get("PENROOT_HOST_ROOT", ""))

    def beneath(self, path: str) -> Host:
        return Host(self.prefix + path) if path.strip("/") else self

    def path(self, path: str) -> str:
        return self.prefix + path

    def real(self, path: str) -> str:
        """Return a path of the tree with symlinks resolved, or "" if it does not exist."""
        try:
            with Fd(os.open(path, _FLAGS)) if self._root < 0 else paths.open_in(self._root, path) as fd:
                return os.readlink(f"/proc/self/fd/{fd}").removeprefix(self.prefix)
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        # In the tree of a test, device nodes are not symlinks: a path below /dev cannot lead out of the tree.
        if not self.prefix or path.startswith("/dev/"):
            return os.path.exists(self.prefix + path)
        return bool(self.real(path))

    def read(self, path: str) -> bytes:
        """Return the content of a file, or nothing if it is missing or unreadable."""
        try:
            if self._root >= 0:
                return paths.read(self._root, path)
            with open(path, "rb") as f:
                return f.read()
        except OSError:
            return b""

    def list(self, path: str) -> list[str]:
        """Return the sorted names in a directory, or none if it does not exist."""
        try:
            if self._root < 0:
                return sorted(os.listdir(path))
            with paths.open_in(self._root, path, os.O_RDONLY | os.O_DIRECTORY) as fd:
                return sorted(os.listdir(fd))
        except OSError:
            return []


class Edits:
    """The changes that a hook makes to a container."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.programs: list[list[str]] = []  # run first, with the container's root as last argument
        self.nodes: dict[str, str] = {}  # device nodes: path in the container -> path on the host
        self.hidden: list[str] = []
        self.emptied: list[str] = []  # directories of /dev in which only ``nodes`` may remain
        self.files: dict[str, tuple[str, int]] = {}  # path in the container -> path on the host, mount attributes
        self.tmpfs: list[str] = []
        self.links: dict[str, str] = {}
        self.environ: dict[str, str] = {}
        self.directories: dict[int, str] = {}  # bits of a library (32, 64) -> directory for it
        self.libraries: list[ldcache.Library] = []  # for the loader's cache, with paths in the container

    def node(self, host: Host, path: str, target: str = "") -> bool:
        """Add a device node of the host. Return False if it does not exist."""
        if not host.exists(path):
            return False
        self.nodes[target or path] = host.path(path)
        return True

    def file(self, host: Host, path: str, target: str = "", *, writable: bool = False) -> bool:
        """Add a file, directory or socket of the host. Return False if it does not exist."""
        real = host.real(path)
        if real:
            self.files[target or path] = (host.path(real), _FILE if writable else _FILE | _RDONLY)
        return bool(real)

    def describe(self) -> list[str]:
        """Return a line for each change. Kinds of changes come in the order of execution."""
        lines = [f"program  {' '.join(command)}" for command in self.programs]
        lines += [f"hide     {path}" for path in self.hidden]
        lines += [f"empty    {path}" for path in self.emptied]
        lines += [f"device   {target} from {source}" for target, source in sorted(self.nodes.items())]
        lines += [f"cover    {path}" for path in self.tmpfs]
        lines += [f"file     {target} from {source}" for target, (source, _) in sorted(self.files.items())]
        lines += [f"link     {path} to {target}" for path, target in sorted(self.links.items())]
        lines += [f"library  {name} at {path}" for _, name, path in self.libraries]
        return lines + [f"variable {name}={value}" for name, value in sorted(self.environ.items())]

    def execute(self, context: Context) -> None:
        """Execute the changes. Warn if a file cannot be added.

        Raises HookError if a device cannot be added, OSError if a device cannot be hidden.
        """
        is_shared = shared_dev(context)
        if not is_shared:
            self.hidden = self.emptied = []  # a private /dev has no device to hide
        if log.explain or os.environ.get("PENROOT_DEBUG"):
            for line in self.describe():
                (log.explain or log.debug)(line)
        for command in self.programs:
            _run(command, context)
        with _Targets(context.root) as targets:
            self._add_nodes(context, targets, is_shared)
            steps: list[tuple[str, Callable[..., None], tuple[object, ...]]] = []
            steps += [(path, targets.tmpfs, ()) for path in self.tmpfs]
            steps += [(path, targets.bind, source) for path, source in self.files.items()]
            steps += [(path, targets.link, (target,)) for path, target in self.links.items()]
            for path, do, arguments in steps:
                try:
                    do(path, *arguments)
                except OSError as e:
                    report = log.warn if do == targets.bind else log.debug
                    report(f"{self.origin}: cannot give the container {path}: {e.strerror}")
        self._extend_cache(context)
        context.environ.update(self.environ)

    def _add_nodes(self, context: Context, targets: _Targets, is_shared: bool) -> None:
        """Hide, empty and add device nodes. With ``is_shared``, the container has the host's /dev.

        Raises HookError, OSError.
        """
        for path in self.hidden:
            targets.hide(path)
        for path in self.emptied:
            if context.exists(path):
                targets.tmpfs(path)
        host = context.host.get("PENROOT_HOST_ROOT", "").rstrip("/")
        for target, source in self.nodes.items():
            emptied = target.startswith(tuple(f"{path}/" for path in self.emptied))
            if is_shared and not emptied and (source == host + target or context.exists(target)):
                continue  # present in the shared /dev
            try:
                targets.bind(target, source)
            except OSError as e:
                message = f"cannot give the container the device {target}: {e.strerror}"
                raise HookError(message, hint=f"check {source} on {os.uname().nodename}") from e

    def _extend_cache(self, context: Context) -> None:
        """Add the libraries to the loader's cache in the container."""
        if not self.libraries:
            return
        old = context.read(_CACHE)
        try:
            new = ldcache.extend(old, self.libraries)
        except ldcache.DAMAGE:
            # The cache is damaged. The loader finds the libraries all the same: it also searches their directory.
            log.debug(f"{self.origin}: {_CACHE} of the image cannot be read")
            return
        if new != old:
            try:
                context.write(_CACHE, new)
            except OSError as e:
                log.warn(f"{self.origin}: cannot write {_CACHE}: {e.strerror}")


def _run(command: list[str], context: Context) -> None:
    """Run a vendor's program with the capabilities of this process. Raises HookError."""
    from enroot_py.base import run
    from enroot_py.runtime import supervise

    path = f"{context.host.get('PATH', DEFAULT_PATH)}:/usr/sbin:/sbin"
    root = os.readlink(f"/proc/self/fd/{context.root}")
    environ = {**context.host, "PATH": path}
    command = [run.find(command[0], package="libnvidia-container-tools", path=path), *command[1:], root]
    run.Program(command, error=HookError, environ=environ, before=supervise.keep_capabilities).run()


def shared_dev(context: Context) -> bool:
    """Return whether the container has the host's /dev."""
    host = context.host.get("PENROOT_HOST_ROOT", "").rstrip("/") + "/dev"
    try:
        on_host = os.stat(host)
        with paths.open_in(context.root, "/dev") as fd:
            in_container = os.fstat(fd)
    except OSError:
        return False
    return (on_host.st_dev, on_host.st_ino) == (in_container.st_dev, in_container.st_ino)


class _Targets:
    """Executes changes at paths of a container. Opens each directory only once."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.directories: dict[str, int] = {}

    def __enter__(self) -> _Targets:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.directories.values():
            os.close(fd)

    def directory(self, path: str) -> int:
        if path not in self.directories:
            self.directories[path] = paths.make_directory(self.root, path)
        return self.directories[path]

    def own_directory(self, path: str) -> int:
        """Open a directory in which to create an entry. Raises OSError, for example for a directory of the host."""
        directory = self.directory(path)
        paths.check_own(self.root, path)
        return directory

    def bind(self, path: str, source: str, attributes: int = 0) -> None:
        """Bind ``source`` of the host on ``path``: a device, file or directory. Raises OSError."""
        above, _, name = path.rpartition("/")
        parent = self.directory(above or "/")
        # Clone a directory with its submounts: if submounts are locked, the kernel refuses a clone without them.
        directory = bool(attributes) and stat.S_ISDIR(os.stat(source).st_mode)
        recursive = linux.AT_RECURSIVE if directory else 0
        flags = linux.OPEN_TREE_CLONE | linux.OPEN_TREE_CLOEXEC | recursive
        with linux.open_tree(linux.AT_FDCWD, source, flags) as tree:
            if attributes:
                linux.mount_setattr(tree, "", linux.AT_EMPTY_PATH | recursive, attributes, 0, 0)
            self._make(above or "/", name, directory)
            linux.move_mount(tree, "", parent, name, linux.MOVE_MOUNT_F_EMPTY_PATH)

    def _make(self, above: str, name: str, directory: bool) -> None:
        """Create a mount point. Replace a symlink, because a mount would cover the symlink's target."""
        parent = self.directory(above)
        try:
            if not stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                return
            paths.check_own(self.root, above)
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            paths.check_own(self.root, above)
        if directory:
            os.mkdir(name, 0o755, dir_fd=parent)
        else:
            os.mknod(name, 0o644, dir_fd=parent)

    def link(self, path: str, target: str) -> None:
        """Create a symbolic link, in place of any entry except a directory. Raises OSError."""
        above, _, name = path.rpartition("/")
        parent = self.own_directory(above or "/")
        try:
            os.symlink(target, name, dir_fd=parent)
        except FileExistsError:
            try:
                if os.readlink(name, dir_fd=parent) == target:
                    return
            except OSError:
                pass
            os.unlink(name, dir_fd=parent)
            os.symlink(target, name, dir_fd=parent)

    def hide(self, path: str) -> None:
        """Block a device of the shared /dev. Raises OSError."""
        try:
            hidden = paths.open_in(self.root, path)
        except OSError:
            return  # there is no such device
        flags = linux.OPEN_TREE_CLONE | linux.OPEN_TREE_CLOEXEC | linux.AT_EMPTY_PATH
        with hidden, linux.open_tree(hidden, "", flags) as tree:
            attributes = _NODE | linux.MOUNT_ATTR_NODEV | _RDONLY
            linux.mount_setattr(tree, "", linux.AT_EMPTY_PATH, attributes, 0, 0)
            mounting.attach(tree, hidden)

    def tmpfs(self, path: str) -> None:
        """Cover a directory with an empty file system. Raises OSError."""
        attributes = _FILE | linux.MOUNT_ATTR_NOEXEC
        with (
            paths.make_directory(self.root, path) as target,
            mounting.mount_filesystem("tmpfs", "tmpfs", ["mode=755"], attributes) as made,
        ):
            mounting.attach(made, target)


def add_library(edits: Edits, tree: Host, context: Context, library: ldcache.Library, real: str = "") -> str:
    """Add to ``edits`` a library of ``tree``, with its link and its entry in the loader's cache.

    ``real`` is the resolved path of the library, if known. Returns the directory in the container, in which the loader
    finds the library.
    """
    flags, name, path = library
    real = real or tree.real(path)
    width = bits(flags)
    if width not in edits.directories:
        edits.directories[width] = library_directory(context, width)
    directory = edits.directories[width]
    file = real.rpartition("/")[2]
    edits.files[f"{directory}/{file}"] = (tree.path(real), _FILE | _RDONLY)
    if name != file:
        edits.links[f"{directory}/{name}"] = file
    edits.libraries.append((flags, name, f"{directory}/{name}"))
    return directory


def shown(value: str) -> str:
    """Shorten and escape a value for a message: a value from an image may have any length and any characters."""
    short = value if len(value) <= 200 else value[:200] + "..."
    return short if short.isprintable() else ascii(short)[1:-1]


def bits(flags: int) -> int:
    """Return the width of a library in bits, by its flags in the loader's cache. i386 has no architecture flag."""
    return 64 if flags & 0xFF00 else 32


def library_directory(context: Context, width: int) -> str:
    """Return a directory that the container's loader searches even without its cache: Debian's, if it exists."""
    if width == 32:
        return "/usr/lib/i386-linux-gnu" if context.exists("/usr/lib/i386-linux-gnu") else "/usr/lib"
    machine = os.uname().machine
    debian = f"/usr/lib/{machine}-linux-gnu"
    if context.exists(debian):
        return debian
    return "/usr/lib64" if machine == "x86_64" or context.exists("/usr/lib64") else "/usr/lib"
