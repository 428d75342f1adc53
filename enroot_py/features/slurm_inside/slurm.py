"""Make the node's Slurm commands available in a container of any distribution, in SLURM_DIRECTORY.

For each of Slurm's programs, ``bin`` has a link of the same name to ``launch``, a static program. ``launch`` starts the
program of that name in ``node/bin``, with the node's loader and only the node's libraries. Of the image's files, only
/etc/passwd changes: penroot adds SlurmUser, SlurmdUser and, when a container starts, the caller. This module is
imported only if Slurm is requested.
"""

from __future__ import annotations

import errno
import os
import pwd
import sys
from collections.abc import Iterable, Iterator, Mapping

from enroot_py import LIBRARY
from enroot_py.base import linux, log, paths
from enroot_py.base.errors import ConfigError, MountError
from enroot_py.base.fds import Fd
from enroot_py.config.settings import BIN as SLURM_BIN
from enroot_py.config.settings import HERE as SLURM_DIRECTORY
from enroot_py.config.settings import sysconf_path
from enroot_py.features.slurm_inside.slurmconf import Plugin, stack_text
from enroot_py.features.slurm_inside.slurmnode import SlurmNode, in_this_version
from enroot_py.runtime import fstab, mounting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context

_LAUNCHER = "/libexec/penroot-slurm"
_FOR = "Slurm in the container"
_WITHOUT = "to start without it: --no-container-slurm, or ENROOT_SLURM=no"
_READ_ONLY = ("x-create=auto", "bind", "ro", "nosuid", "nodev", "private")


def add_slurm(context: Context, origin: str) -> None:
    """Add Slurm's programs, users and PATH entry to a container. Raises ConfigError, MountError, HookError."""
    if context.settings.remap_root:
        warn_root()
    node = fill(context.root, context.host, origin)
    add_users(context, (*users(node), context.user))
    context.environ["PATH"] = f"{SLURM_BIN}:{context.environ['PATH']}" if context.environ.get("PATH") else SLURM_BIN


def warn_root() -> None:
    log.warn(f"{_FOR}: srun and sbatch do not work for root in the container, because slurmctld refuses them")


def fill(root: int, host: Mapping[str, str], origin: str) -> SlurmNode:
    """Create and fill SLURM_DIRECTORY beneath ``root``. Return the SlurmNode. Raises ConfigError, MountError."""
    try:
        node = SlurmNode(host)
    except ConfigError as e:
        raise ConfigError(f"{_FOR}: {e}", hint=f"{e.hint}; {_WITHOUT}") from e
    _Directory(root, host, origin).fill(node)
    return node


class _Directory:
    """SLURM_DIRECTORY in the container: a tmpfs that becomes read-only when it has been filled."""

    def __init__(self, root: int, host: Mapping[str, str], origin: str) -> None:
        self._root = root
        self._host = host
        self._origin = origin
        self._plugins: dict[str, str] = {}  # plugins of plugstack.conf: path on the node -> path in SLURM_DIRECTORY

    def fill(self, node: SlurmNode) -> None:
        with self._mount_tmpfs() as tmpfs:
            for source, target in self._binds(node):
                self._bind(source, target)
            for name in node.programs:
                self._link("../launch", f"bin/{name}")
            if node.library:
                self._link("launch", "python3")
            self._write("arguments", "".join(f"{word}\n" for word in self._arguments(node)))
            mode = 0o444 if node.conf.is_open else 0o400
            self._write("etc/slurm.conf", node.conf.changed(self._conf(node)), mode)
            self._write("etc/plugstack.conf", stack_text(self._stack(node)), mode)
            linux.mount_setattr(tmpfs, "", linux.AT_EMPTY_PATH, linux.MOUNT_ATTR_RDONLY, 0, 0)

    def _mount_tmpfs(self) -> Fd:
        """Mount the tmpfs.

        Refuse symbolic links in the image's path to SLURM_DIRECTORY: through a link, the tmpfs could cover another
        directory.
        """
        attributes = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
        options = ["mode=755", "size=64M"]
        if log.explain:
            log.explain(
                f"mount    tmpfs {SLURM_DIRECTORY} tmpfs {','.join(options)},ro,nosuid,nodev 0 0  ({self._origin})"
            )
        try:
            with mounting.mount_filesystem("tmpfs", "tmpfs", options, attributes) as mount, self._target() as target:
                mounting.attach(mount, target)
                return mount.keep()
        except OSError as e:
            reason = "the path has a symbolic link in the image" if e.errno == errno.ELOOP else e.strerror
            raise MountError(f"{_FOR}: cannot mount {SLURM_DIRECTORY}: {reason}", hint=_WITHOUT) from e

    def _target(self) -> Fd:
        try:
            return paths.open_in(self._root, SLURM_DIRECTORY, os.O_PATH, linux.RESOLVE_NO_SYMLINKS)
        except FileNotFoundError:
            os.close(paths.make_directory(self._root, SLURM_DIRECTORY, 0))
            return paths.open_in(self._root, SLURM_DIRECTORY, os.O_PATH, linux.RESOLVE_NO_SYMLINKS)

    def _bind(self, source: str, target: str) -> None:
        mount = mounting.Mount(source, f"{SLURM_DIRECTORY}/{target}", "none", _READ_ONLY, 0, self._origin)
        fstab.execute(mount, self._root)

    def _link(self, content: str, target: str) -> None:
        above, _, name = f"{SLURM_DIRECTORY}/{target}".rpartition("/")
        with paths.make_directory(self._root, above) as directory:
            os.symlink(content, name, dir_fd=directory)

    def _write(self, target: str, text: str, mode: int = 0o444) -> None:
        if log.explain:
            log.explain(f"file     {SLURM_DIRECTORY}/{target}  ({self._origin})")
        paths.write(self._root, f"{SLURM_DIRECTORY}/{target}", text.encode("utf-8", "surrogateescape"), mode)

    def _binds(self, node: SlurmNode) -> Iterator[tuple[str, str]]:
        """Yield the node's files and directories to bind, each with the target path in SLURM_DIRECTORY."""
        launcher = LIBRARY + _LAUNCHER
        if not os.path.exists(launcher):
            raise ConfigError(f"{_FOR}: {launcher} does not exist", hint="reinstall penroot: make install")
        yield os.path.realpath(launcher), "launch"
        yield os.path.realpath(node.loader), "loader"
        for name, path in node.programs.items():
            yield os.path.realpath(path), f"node/bin/{name}"
        yield from ((target, f"lib/{number}") for number, target in enumerate(node.libraries))
        yield from ((target, f"plugins/{number}") for number, target in enumerate(node.plugins))
        if node.socket and node.socket.endswith("/munge/munge.socket.2"):
            yield (
                os.path.dirname(node.socket),
                "auth",
            )  # bind the directory, because a restarted munged creates a new socket
        elif node.socket:
            yield node.socket, f"auth/{os.path.basename(node.socket)}"
        if node.library:
            executable, directories = node.python
            yield executable, "node/bin/python3"
            yield from ((f"{sys.base_prefix}/{directory}", f"node/{directory}") for directory in directories)
            yield node.library, "penroot"
            if node.authorities:
                yield os.path.realpath(node.authorities), "etc/authorities.pem"
            if os.path.isdir(site := sysconf_path(self._host)):
                yield site, "etc/enroot"
        for number, plugin in enumerate(node.conf.plugstack):
            if plugin.path.startswith("/") and os.path.exists(plugin.path):
                self._plugins[plugin.path] = f"spank/{number}/{os.path.basename(plugin.path)}"
        yield from ((in_this_version(path), target) for path, target in self._plugins.items())
        for name in ("cli_filter.lua", "ca_cert.pem"):  # Slurm looks for these only beside slurm.conf
            if os.path.exists(f"{node.conf.directory}/{name}"):
                yield f"{node.conf.directory}/{name}", f"etc/{name}"

    def _arguments(self, node: SlurmNode) -> Iterator[str]:
        """Yield the words that ``launch`` puts before the program's path: the loader and its options.

        The value ":" of --inhibit-rpath means the program itself.
        """
        yield from (f"{SLURM_DIRECTORY}/loader", "--inhibit-rpath", ":", "--inhibit-cache", "--library-path")
        plugins = [f"{SLURM_DIRECTORY}/plugins/{number}" for number in range(len(node.plugins))]
        yield ":".join((*(f"{SLURM_DIRECTORY}/lib/{number}" for number in range(len(node.libraries))), *plugins))

    def _conf(self, node: SlurmNode) -> dict[str, str]:
        """Return the keys of slurm.conf whose values differ in the container, with the container's values."""
        conf = node.conf
        values = {
            "PluginDir": ":".join(f"{SLURM_DIRECTORY}/plugins/{number}" for number in range(len(node.plugins))),
            "PlugStackConfig": f"{SLURM_DIRECTORY}/etc/plugstack.conf",
        }
        for key in ("SlurmUser", "SlurmdUser"):
            if user := slurm_user(conf.value(key)):
                values[key] = str(user.pw_uid)  # in the image, another user may have this name
        if node.uses_munge:
            info = [word for word in conf.value("AuthInfo").split(",") if word and not word.startswith("socket=")]
            values["AuthInfo"] = ",".join((f"socket={SLURM_DIRECTORY}/auth/{os.path.basename(node.socket)}", *info))
        return values

    def _stack(self, node: SlurmNode) -> dict[Plugin, str]:
        return {
            plugin: f"{SLURM_DIRECTORY}/{self._plugins[plugin.path]}" if plugin.path in self._plugins else plugin.path
            for plugin in node.conf.plugstack
        }


def slurm_user(name: str) -> pwd.struct_passwd | None:
    """Look up a user name or UID on the node; return None if it is unknown."""
    try:
        return (pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)) if name else None
    except KeyError:
        return None


def users(node: SlurmNode) -> tuple[pwd.struct_passwd | None, ...]:
    """Return SlurmUser and SlurmdUser of the node. An unknown user is None."""
    return slurm_user(node.conf.value("SlurmUser")), slurm_user(node.conf.value("SlurmdUser"))


def add_users(context: Context, wanted: Iterable[pwd.struct_passwd | None]) -> None:
    """Add the ``wanted`` users to the container's /etc/passwd, because Slurm's programs fail without them."""
    entries = context.read("/etc/passwd").rstrip(b"\n").split(b"\n")
    fields = [entry.split(b":") for entry in entries]
    uids, names = {entry[2] for entry in fields if len(entry) > 2}, {entry[0] for entry in fields}
    added = []
    for user in wanted:
        if user and b"%d" % user.pw_uid not in uids:
            name = os.fsencode(user.pw_name)
            name = b"%s-%d" % (name, user.pw_uid) if name in names else name
            added.append(b"%s:x:%d:%d::/:/usr/sbin/nologin" % (name, user.pw_uid, user.pw_gid))
            uids.add(b"%d" % user.pw_uid)
    if added:
        context.write("/etc/passwd", b"\n".join([*filter(None, entries), *added, b""]))
