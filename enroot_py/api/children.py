"""Children of the launcher, one for each request: create containers, run programs in them, copy files."""

from __future__ import annotations

import _signal
import _socket
import gc
import os
import resource
import select
import sys

from enroot_py.api.messages import Conversation, send_status, send_with_fds
from enroot_py.base import filesystems, linux, log, mountinfo, paths, trees  # noqa: F401  # imported for all children
from enroot_py.base.errors import ContainerError, ImageError, PenrootError
from enroot_py.base.fds import Fd
from enroot_py.base.operations import Operation
from enroot_py.cli import start as command_line
from enroot_py.config.settings import load
from enroot_py.runtime import enter, environ, execute, fstab, hooks, namespaces, processes, supervise
from enroot_py.runtime import isolated as isolated
from enroot_py.store import containers, policies, store, throwaway

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

    from enroot_py.base.making import Directory
    from enroot_py.runtime.enter import Site
    from enroot_py.runtime.execute import Container
    from enroot_py.runtime.rootfs import Source
    from enroot_py.runtime.sharing import Entry
    from enroot_py.store.store import Image

    Request = Mapping[str, Any]

NAMESPACES = linux.CLONE_NEWUSER | linux.CLONE_NEWPID  # the flags for a cloned child


class Tools:
    """Descriptors of the launcher for its children, and the limits to restore for programs."""

    __slots__ = ("reports", "life", "init", "limits")

    def __init__(self, reports: _socket.socket, life: int, init: int, limits: tuple[int, int]) -> None:
        self.reports = reports
        self.life = life  # a pipe that closes when the launcher ends
        self.init = init  # the program penroot-init
        self.limits = limits  # RLIMIT_NOFILE

    def fds(self) -> list[int]:
        return [self.reports.fileno(), self.life, self.init]

    def report(self, verb: str, number: int, value: object, fds: tuple[int, ...] = ()) -> None:
        send_with_fds(self.reports, os.fsencode(f"{verb} {number} {value}"), fds)


def preload() -> None:
    """Load our hooks and the libraries of nsswitch.conf(5) once, for the starts of all children."""
    hooks.preload()
    hooks.caller({}, os.geteuid(), os.getegid())


def _load_servers() -> None:
    """Load the modules for squashfs files once, for the starts of all children."""
    from enroot_py.runtime import sharing, squashfuse  # noqa: F401
    from enroot_py.store import squashfs  # noqa: F401


def can_clone() -> bool:
    """Return whether this process can clone a child into new namespaces: a seccomp filter may refuse clone3(2)."""
    try:
        child = linux.clone3(NAMESPACES)
    except OSError:
        return False
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return True


def answer(fds: list[int], conversation: Conversation, act: Callable[[], NoReturn]) -> NoReturn:
    """Answer a request in a child. Only ``fds``, stdin, stdout and stderr stay open."""
    try:
        linux.close_others((0, 1, 2, *fds))
        log.sink = conversation.log
        act()
    except BaseException as e:
        if not isinstance(e, (PenrootError, OSError)):
            sys.excepthook(*sys.exc_info())
        conversation.fail(e)
    finally:
        os._exit(1)


def take_environment(request: Request) -> Request:
    """Replace this process's environment by the environment of the API process. Return the request."""
    if request["environ"] != os.environ:
        os.environ.clear()
        os.environ.update(request["environ"])
    return request


def _enter_directory(request: Request) -> None:
    """Enter the working directory of the API process, for relative paths."""
    try:
        os.chdir(request["cwd"])
    except OSError:  # the directory was removed
        os.chdir("/")


def _never(_: int) -> None:
    raise AssertionError("a prepared start does not fork")


class Plan:
    """A container to start.

    The launcher prepares a simple start (see enter.prepare()), once for equal requests. A child prepares any other
    start. The launcher clones the child of a prepared start into the namespaces ``flags``. For other starts, ``flags``
    is 0. For a squashfs image, ``flags`` is 0 in the launcher too, because a zygote may clone the children.
    """

    def __init__(self, request: Request, *, may_prepare: bool) -> None:
        """Prepare a simple start in the launcher, if ``may_prepare``. Raises PenrootError."""
        self.flags = 0
        self._request = request
        self._ids = self._outside = os.geteuid(), os.getegid()  # _outside: IDs in the namespace above the container's
        self._image: Image | None = None
        self._site: Site | None = None
        self._version: tuple[int, ...] = ()  # paths.version() of a squashfs file
        image, host = request["image"], request["environ"]
        is_file = isinstance(image, str) and os.path.isfile(os.path.join(request["cwd"], image))
        is_name = not isinstance(image, str) or "/" not in image and ":" not in image
        if is_file:
            _load_servers()
            is_name = image.startswith("/") and not self.is_writable
        if not may_prepare or not is_name:
            return
        self._settings(host)
        if not self.settings.policies and not self.settings.is_extended:
            self._version = paths.version(os.stat(image)) if is_file else ()  # before _find(): the link may change
            source = self._find()
            self._describe(throwaway.over(source, "later") if self.is_writable else source)
            self._site = enter.prepare(self.start)
        if self._site is not None and not self.start.is_served:
            self.flags = NAMESPACES

    @property
    def is_writable(self) -> bool:
        return bool(self._request["writable"])

    @property
    def is_served(self) -> bool:
        """Return whether a FUSE server serves the image of a prepared start."""
        return self._site is not None and self.start.is_served

    def is_current(self) -> bool:
        """Return whether the image's file is still the same."""
        try:
            return not self._version or self._version == paths.version(os.stat(self._request["image"]))
        except OSError:
            return False

    def make_changes(self) -> Directory | None:
        """In the launcher: create the directory for the changes of a prepared start. Raises ContainerError."""
        return throwaway.make(self.settings, sweep=False) if self.flags and self.is_writable else None

    def use(self, changes: Directory | None) -> None:
        """In a child: use the directory that make_changes() created."""
        if changes:
            self.start.source.changes = changes.path

    def find_server(self) -> Entry | None:
        """In a zygote: return the image's entry in the table of shared FUSE servers, see enter.share()."""
        return enter.share(self.start, enter.make_scratch(self.start))

    def join_server(self, mount: int) -> None:
        """In a child that a zygote cloned into a container's namespaces: use a mount of the image's FUSE server."""
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # needed to map the user: see namespaces.enter_user()
        self.start.source.served = mount
        self.flags, self._outside = NAMESPACES, (0, 0)

    def release(self) -> None:
        """Release the lock that protects the image from pruning while children start."""
        if self._image is not None:
            self._image.release()

    def enter(self, forked: Callable[[int], None], keep: Callable[[Directory], None]) -> Container:
        """In a child: enter the container. Call ``keep`` with the directory for its changes. Raises PenrootError."""
        _enter_directory(self._request)
        if self.flags:
            namespaces.map_user(*self._ids, self._outside)
            container = enter.enter(self.start, self._site, entered=True)
        elif self._site is not None:
            self._describe(self.start.source, forked)
            container = enter.enter(self.start, self._site)
        else:
            self._settings(self._request["environ"])
            with Operation("start", self.settings):
                source = self._find()
                if self.is_writable:
                    directory = throwaway.make(self.settings)
                    keep(directory)
                    source = throwaway.over(source, directory.path)
                self._describe(source, forked)
                container = enter.enter(self.start)
        environ.warn_of_missing_paths(container.environ)
        return container

    def _settings(self, host: Mapping[str, str]) -> None:
        request = self._request
        changes = {"remap_root": request["remap_root"]} if request["remap_root"] is not None else {}
        settings = load(host).replace("enroot_py", rootfs_writable=request["writable"], unshare_pid=True, **changes)
        for name, value in request["flags"]:
            settings = command_line.changed(settings, name, value)
        superuser = namespaces.privileged(settings)  # check now: in a user namespace, everybody may look like root
        self.settings = settings
        self.confinement = {"root": settings.remap_root, "superuser": superuser, "keyring": settings.unshare_keyring}

    def _describe(self, source: Source, forked: Callable[[int], None] = _never) -> None:
        host = self._request["environ"]
        texts = self._request["mounts"]
        self.start = enter.Start(
            source=source,
            settings=self.settings,
            host=host,
            superuser=self.confinement["superuser"],
            mounts=tuple(fstab.parse_option(text, host, f"mount {text}") for text in texts),
            env=self._request["env"],
            forked=forked,
        )

    def _find(self) -> Source:
        """Return the root file system of a stored image or of a ``penroot start`` argument. Raises PenrootError."""
        image, settings = self._request["image"], self.settings
        if isinstance(image, str):
            return command_line.find(image, settings)
        digest, reference = image["digest"], image["reference"]
        stored = store.Store(settings.cache_path).image(digest)
        if stored is None or not stored.hold():
            hint = "pull it again, with the same ENROOT_CACHE_PATH"
            raise ImageError(f"the image {digest} of {reference} is not in the store {settings.cache_path}", hint=hint)
        if settings.policies:
            from enroot_py.registry.reference import of_command_line

            admission = policies.admission(settings).Admission(of_command_line(reference), settings)
            admission.check_stored(stored, digest)
        self._image = stored
        return containers.of_image(reference, stored)


def start(
    tools: Tools, conversation: Conversation, _: list[int], plan: Plan, changes: Directory | None, number: int
) -> NoReturn:
    """Create a container, and become its process 1."""
    plan.use(changes)

    def keep(directory: Directory) -> None:
        tools.report("changes", number, directory.path, (directory.fd,))

    def forked(child: int) -> None:
        if child:
            tools.report("first", number, child)
            os._exit(0)

    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    container = plan.enter(forked, keep)
    container.enter_workdir()
    for target, fd in enumerate((tools.life, null, null)):
        os.dup2(fd, target)
    source = plan.start.source
    directories = (source.directory,) if source.directory else (source.upper, *source.lowerdirs)
    facts = {"directories": [path for path in directories if path], "image": source.image}
    conversation.send({"ok": {**facts, "confinement": plan.confinement}})
    _confine_init(**plan.confinement)
    resource.setrlimit(resource.RLIMIT_NOFILE, tools.limits)
    os.execve(tools.init, ["penroot-init"], container.environ)


def run_once(
    tools: Tools,
    conversation: Conversation,
    fds: list[int],
    plan: Plan,
    changes: Directory | None,
    request: Request,
) -> NoReturn:
    """Run a program as process 1 of a new container.

    A process that the launcher or a zygote cloned is process 1 itself. Another process forks process 1 and watches it.
    """
    plan.use(changes)
    _, status, *standard = fds
    directories: list[Directory] = []

    def forked(child: int) -> None:
        if child:
            conversation.send({"ok": {"pid": child, "is_watched": True}})
            conversation.socket.close()
            for fd in standard:
                os.close(fd)
            _watch(child, _socket.socket(fileno=status), tools.life, directories)

    container = plan.enter(forked, directories.append)
    if request["workdir"]:
        container.workdir, container.origins["PWD"] = request["workdir"], "cwd"
    container.enter_workdir()
    _execute(tools, standard, request["argv"], container.environ, is_first=True, **plan.confinement)


def _watch(child: int, status: _socket.socket, life: int, directories: list[Directory]) -> NoReturn:
    """Wait for process 1 of a container. Kill it if the API process or the launcher ends; forward signals."""
    namespaces.hide()
    poll = select.poll()
    with Fd(os.pidfd_open(child)) as process:
        for fd in (process, status.fileno(), life):
            poll.register(fd, select.POLLIN)
        while process not in (ready := [fd for fd, _ in poll.poll()]):
            signal = b"" if life in ready else status.recv(1)
            os.kill(child, signal[0] if signal else _signal.SIGKILL)
            if not signal:
                break
    _, ended = os.waitpid(child, 0)
    if module := namespaces.servers():
        module.report_killed()
    for directory in directories:
        directory.__exit__()
    send_status(status, ended)
    os._exit(0)


def _confine(*, root: bool, superuser: bool, keyring: bool) -> None:
    if not superuser:
        namespaces.confine(remap_root=root)


def _confine_init(*, root: bool, superuser: bool, keyring: bool) -> None:
    """Keep capabilities in penroot-init that programs lack, so that no program can trace it with ptrace(2).

    The bounding set is empty, so joining processes get no capabilities. In a container with root, programs have the
    same capabilities as penroot-init.
    """
    if not (root or superuser):
        supervise.keep_capabilities()
        for capability in range(linux.capget_permitted().bit_length()):
            linux.prctl(linux.PR_CAPBSET_DROP, capability)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)


def join(
    tools: Tools, conversation: Conversation, first: int, program: int, standard: list[int], request: Request
) -> NoReturn:
    """Run a program in a container. Report its PID and exit, so that the program becomes a child of the launcher."""
    confinement = request["confinement"]
    variables = {**_join(first, new_keyring=confinement["keyring"]), **request["env"]}
    child = os.fork()
    if child:
        tools.report("program", program, child)
        conversation.send({"ok": child})
        os._exit(0)
    if request["workdir"]:
        _change_directory(request["workdir"], variables)
    _execute(tools, standard, request["argv"], variables, **confinement)


def _join(first: int, *, new_keyring: bool) -> dict[str, str]:
    """Enter the namespaces and the working directory of process 1. Return its environment. Raises ContainerError."""
    try:
        variables = processes.of_process(first)
        workdir = os.readlink(f"/proc/{first}/cwd")
        spaces = processes.namespaces(first)
    except OSError as e:
        raise ContainerError(f"cannot join the container: {e.strerror}", hint="the container has just ended") from e
    processes.enter(spaces, first, new_keyring=new_keyring)
    os.chdir(workdir if os.path.isdir(workdir) else "/")
    return variables


def _change_directory(path: str, variables: dict[str, str]) -> None:
    try:
        os.chdir(path)
    except OSError as e:
        message = f"cannot enter the working directory {path} of the container: {e.strerror}"
        raise ContainerError(message, hint="create it first, or give another cwd") from e
    variables["PWD"] = os.path.normpath(path)


def _execute(
    tools: Tools,
    standard: list[int],
    argv: list[str],
    variables: dict[str, str],
    *,
    is_first: bool = False,
    **confinement: bool,
) -> NoReturn:
    """Execute a program in its own session. Raises CommandError, NamespaceError."""
    os.setsid()
    for target, fd in enumerate(standard):
        os.dup2(fd, target)
    _confine(**confinement)
    if is_first:  # process 1 ends with its parent, and all other programs end with process 1
        linux.prctl(linux.PR_SET_PDEATHSIG, _signal.SIGKILL)
        if select.select([tools.life], [], [], 0)[0]:
            os._exit(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, tools.limits)
    execute.execute(tuple(argv), variables)


def act(conversation: Conversation, request: Request) -> NoReturn:
    """Handle a request that needs no container: pull or write an image."""
    gc.enable()
    _enter_directory(request)
    from enroot_py.api import images

    conversation.send({"ok": getattr(images, request["act"])(load(request["environ"]), **request["arguments"])})
    os._exit(0)


def copy(conversation: Conversation, first: int, request: Request) -> NoReturn:
    """Copy a file or a directory into a container, or out of it, as the user of its programs."""
    from enroot_py.api import copying

    copying.copy(request["source"], request["target"], lambda: _join(first, new_keyring=False), into=request["into"])
    conversation.send({"ok": {}})
    os._exit(0)


def remove(directory: str, then: Callable[[], None]) -> NoReturn:
    """Remove the changes of a container that has ended, and call ``then``. The next sweep removes what remains."""
    try:
        trees.remove(directory)
    except OSError as e:
        sys.stderr.write(f"[WARN] cannot remove {directory}: {e.filename}: {e.strerror}\n")
        sys.stderr.flush()
    then()
    os._exit(0)
