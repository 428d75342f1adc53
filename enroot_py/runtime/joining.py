"""Run a command in a running container, and end all processes of the command with the caller.

Sources: setns(2), namespaces(7), user_namespaces(7).
"""

from __future__ import annotations

import os
from _signal import SIGKILL

from enroot_py.base import linux
from enroot_py.base.errors import ContainerError, NamespaceError, UsageError
from enroot_py.base.fds import Fd
from enroot_py.config.settings import Settings
from enroot_py.runtime import environ, execute, namespaces, processes, supervise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_LIST = "penroot list --fancy shows running containers"


class Joined:
    """A container that this process has joined, with the environment and confinement of a process in it."""

    def __init__(self, pid: int, settings: Settings) -> None:
        """Enter the namespaces and the working directory of ``pid``. Raises ContainerError.

        This process stays outside the container's PID namespace. Its later children are inside.
        """
        try:
            self.environ = processes.of_process(pid)
            cwd = os.readlink(f"/proc/{pid}/cwd")
            spaces = processes.namespaces(pid)
            self.is_confined = _is_bounded(pid)
        except FileNotFoundError as e:
            raise ContainerError(f"no process {pid}", hint=_LIST) from e
        except OSError as e:
            hint = "check that it is your container"
            raise ContainerError(f"cannot join process {pid}: {e.strerror}", hint=hint) from e
        _check_owner(spaces, pid)
        self.has_user_namespace = "user" in spaces
        self.has_pid_namespace = "pid" in spaces
        processes.enter(spaces, pid, new_keyring=settings.unshare_keyring)
        os.chdir(cwd if os.path.isdir(cwd) else "/")

    def become_root(self, init: int) -> None:
        """Become root in a user namespace below the container's. ``init`` is from supervise.open_init().

        The user's processes in the container have all capabilities in this namespace, so they can trace the process
        that creates it, user_namespaces(7). Therefore penroot-init creates it, which has nothing of the node. This
        process stays hidden. Raises NamespaceError.
        """
        (ready, created), (lifetime, held) = os.pipe(), os.pipe()
        with Fd(ready), Fd(held):
            with Fd(created), Fd(lifetime):
                child = os.fork()
                if not child:
                    _create_namespace(init, lifetime, created)
            try:
                if os.read(ready, 1):
                    with Fd(os.pidfd_open(child)) as process:
                        linux.setns(process, linux.CLONE_NEWUSER)
                    os.kill(child, SIGKILL)  # a process of the container may have stopped it
            except OSError as e:
                raise NamespaceError(f"cannot enter a user namespace: {e.strerror}") from e
        number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if os.geteuid():
            error = OSError(number, os.strerror(number) if number > 0 else "penroot-init was killed")
            raise NamespaceError(f"cannot create a user namespace: {error.strerror}", hint=namespaces.advice(error))

    def change_directory(self, path: str) -> None:
        """Enter a directory of the container. Raises ContainerError."""
        try:
            os.chdir(path)
        except OSError as e:
            message = f"cannot enter the working directory {path} of the container: {e.strerror}"
            raise ContainerError(message, hint="give a directory of the container: --workdir DIR") from e
        self.environ["PWD"] = os.path.normpath(path)


def _create_namespace(init: int, lifetime: int, created: int) -> NoReturn:
    """In a child: execute penroot-init like a program of the container, without environment and descriptors."""
    try:
        os.dup2(lifetime, 0)
        os.dup2(created, 1)
        linux.close_others((0, 1, init))
        namespaces.confine(remap_root=False)
        os.execve(init, ["penroot-init", "root"], {})
    except OSError as e:
        os._exit(e.errno or 1)
    finally:
        os._exit(1)


def _check_owner(spaces: dict[str, int], pid: int) -> None:
    """Refuse to enter another user's container, even for root of the node. Raises ContainerError.

    Otherwise files of that user would decide what root of the node executes, and root of the container could trace the
    program.
    """
    if "user" in spaces and (owner := processes.owner_of(spaces["user"])) != os.geteuid():
        raise ContainerError(
            f"process {pid} is in a container of user {owner}", hint="run penroot exec as that user: setpriv(1), su(1)"
        )


def _is_bounded(pid: int) -> bool:
    """Return whether the capability bounding set of ``pid`` is empty. Raises OSError."""
    with open(f"/proc/{pid}/status", errors="surrogateescape") as f:
        return any(line.startswith("CapBnd:") and not int(line.split()[1], 16) for line in f)


def execute_in(
    target: str,
    command: tuple[str, ...],
    env: tuple[str, ...],
    settings: Settings,
    *,
    workdir: str = "",
    user: str = "",
    timeout_s: float | None = None,
) -> int:
    """Run ``command`` in a running container and return its exit status. Raises PenrootError.

    If this process is killed, or after ``timeout_s`` seconds, the command and all its processes are killed.
    """
    options = environ.of_options(env, os.environ)
    ids = _requested_user(user)
    pid = processes.find(target, settings)
    guard = supervise.guard(timeout_s)
    if guard:
        return supervise.wait(guard)
    init = supervise.open_init() if ids == "root" else -1
    joined = Joined(pid, settings)
    is_root = os.geteuid() == 0
    if ids and ids != ("root" if is_root else "you"):
        _refuse(user, is_root=is_root)
        joined.become_root(init)
        is_root, joined.is_confined = True, False
    if workdir:
        joined.change_directory(workdir)
    joined.environ.update(options)
    if settings.close_descriptors:
        execute.close_descriptors(joined.environ)
    child = supervise.fork() if joined.has_pid_namespace else 0
    if child:
        return supervise.wait(child)
    _execute(joined, command, is_root=is_root)


def _execute(joined: Joined, command: tuple[str, ...], *, is_root: bool) -> NoReturn:
    if not is_root or joined.has_user_namespace:  # with ENROOT_ALLOW_SUPERUSER there is no user namespace
        namespaces.confine(remap_root=is_root and not joined.is_confined)
    execute.execute(command, joined.environ)


def _requested_user(user: str) -> str:
    """Return "root" for root, "you" for the caller, and "" for "". Raises UsageError for other users."""
    name, _, _ = user.partition(":")
    if name in ("", "root", "0"):
        return name and "root"
    import pwd

    me = os.geteuid()
    if name != str(me):
        try:
            own_name = pwd.getpwuid(me).pw_name
        except KeyError:
            own_name = ""
        if name != own_name:
            hint = f"a container has two users: --user root, or --user {own_name or me}"
            raise UsageError(f"--user {user}: the container does not have this user", hint=hint)
    return "you"


def _refuse(user: str, *, is_root: bool) -> None:
    """Raise ContainerError if the joined container cannot have ``user``."""
    if is_root:
        hint = "start the container without --root, and use --user root where you need root"
        raise ContainerError(f"--user {user}: the container was started with --root", hint=hint)
