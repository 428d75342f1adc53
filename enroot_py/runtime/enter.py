"""Turn this process into a process of a container. enter() calls the other functions in order.

Every start imports this module. It does not use the image store (enroot_py.store): the caller passes the paths.
"""

from __future__ import annotations

import gc
import os
from _collections_abc import Iterable, Mapping

from enroot_py.base import linux, log, operations, paths
from enroot_py.base.errors import ContainerError
from enroot_py.base.fds import Fd
from enroot_py.base.frozen import Frozen
from enroot_py.config import files
from enroot_py.config.settings import Settings, directories
from enroot_py.runtime import environ, etc, fstab, hooks, hostfiles, mounting, named, namespaces, rootfs
from enroot_py.runtime.execute import Container, withhold

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from enroot_py.runtime.environ import Variables, Wanted
    from enroot_py.runtime.mounting import Mount
    from enroot_py.runtime.sharing import Entry
    from enroot_py.runtime.shellhooks import Scripts
    from enroot_py.runtime.squashfuse import Server


class Start(Frozen):
    """The parameters of one start, for enter().

    ``host`` is the environment of the caller. Precedence of the container's variables, lowest first: the image, the
    site, ``conf`` (path of a configuration script), hooks, ``file``, ``env``. ``file`` is a function: its argument is
    the variables set so far, its result the variables of an environment file. The caller's ``mounts`` are mounted last.
    A ``superuser`` stays in the caller's user namespace. ``script`` is a text that replaces the image's /etc/rc.
    ``program`` is the first program that runs, if known. With ``in_step``, the helper process of a Slurm step watches
    FUSE servers and host files. After the fork that makes process 1 of a private PID namespace, both processes call
    ``forked``: process 1 with 0, the parent with the PID of process 1. In the parent, ``forked`` must not return.
    """

    source: rootfs.Source
    settings: Settings
    host: Mapping[str, str]
    superuser: bool
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = {}
    file: Callable[[Mapping[str, str]], Wanted] | None = None
    conf: str = ""
    script: str | None = None
    command: tuple[str, ...] = ()
    program: str = ""
    in_step: bool = False
    forked: Callable[[int], object] | None = None

    @property
    def is_overlaid(self) -> bool:
        """Return whether fuse-overlayfs mounts the overlay, instead of the kernel's overlayfs."""
        settings = self.settings
        return not settings.native_overlayfs and not (self.source.directory and settings.rootfs_writable)

    @property
    def is_served(self) -> bool:
        """Return whether this start needs a FUSE server for the root file system."""
        return self.source.shared < 0 and (bool(self.source.image) or self.is_overlaid)


class Site:
    """Configuration of the node, the site and the user for all containers, read outside of the container."""

    def __init__(self, start: Start, uid: int, gid: int, mount_point: str) -> None:
        self.caller = hooks.caller(start.host, uid, gid)
        self.mount_point = mount_point
        self.read(start.settings, start.host)
        self.hooks = hooks.load(start.settings, start.host)

    def read(self, settings: Settings, host: Mapping[str, str]) -> None:
        """Read mounts.d and environ.d of the system and of the user. Raises ConfigError."""
        self.variables = {**host, "ENROOT_ROOTFS": self.mount_point}  # for ${VAR} in an fstab
        self.mounts: list[Mount] = []
        for origin, text in files.fragments(directories("mounts.d", settings, host), ".fstab", fstab.SYSTEM):
            self.mounts += fstab.parse_file(text, self.variables, origin)
        self.environ = environ.of_site(settings, host)


def prepare(start: Start) -> Site | None:
    """Read the configuration in the launcher, which then forks a child that starts the container (api/children.py).

    Returns None unless the start is simple: only the PID namespace is private, no root, no hooks except penroot's, no
    --conf script, no FUSE server except the image's, no optional feature, no caller_sysfs(). Raises PenrootError.
    """
    settings, uid = start.settings, os.geteuid()
    if start.is_overlaid or settings.is_extended or uid == 0 or settings.remap_root or start.conf:
        return None
    if namespaces.own(settings) != linux.CLONE_NEWPID or hooks.look_outside(settings, start.host):
        return None
    if not all(hook.is_ours for hook in hooks.arrange(settings, start.host)):
        return None
    scratch = rootfs.make_scratch(settings)
    site = Site(start, uid, os.getegid(), start.source.mount_point(scratch))
    simple = all(mount.fstype != mounting.SQUASHFS for mount in (*site.mounts, *start.mounts))
    return site if simple and caller_sysfs(linux.CLONE_NEWPID) is None else None


def enter(start: Start, prepared: Site | None = None, *, entered: bool = False) -> Container:
    """Move this process into a new container and return the container.

    ``prepared`` is the result of prepare(). With ``entered``, this process is process 1 of new user and PID namespaces.
    The process keeps its capabilities in the container's user namespace. After a PenrootError, no mount remains.
    """
    gc.disable()  # a start leaves no garbage; a collection would take 10 % of the time of a start with device hooks
    settings, own = start.settings, namespaces.own(start.settings)
    uid, gid, umask = os.geteuid(), os.getegid(), os.umask(0o022)
    if own & linux.CLONE_NEWPID:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)  # adopt the FUSE servers: report_killed() waits for them
    scratch = make_scratch(start)
    first = not prepared and (hooks.look_outside(settings, start.host) or not start.is_served)
    site = Site(start, uid, gid, start.source.mount_point(scratch)) if first else prepared
    sysfs, entry = None if prepared else caller_sysfs(own), share(start, scratch)
    follower = start_follower(start, [*(site.mounts if site else ()), *start.mounts], own, entry)
    server, mount = serve(start, scratch, entry)
    site = site or Site(start, uid, gid, start.source.mount_point(scratch))  # meanwhile, the image's server starts
    serve_data(start, [*site.mounts, *start.mounts], scratch)
    await_servers(own)
    inside = (0, 0) if settings.remap_root else (uid, gid)
    if follower:
        os.waitpid(follower, 0)  # the program must not inherit an unknown child
    nested = not start.superuser and (uid == 0 or settings.remap_root)
    inner = enter_namespaces(inside, 0 if entered else own, start, nested=nested, entered=entered)
    rootfs.mount_scratch(scratch)
    root = rootfs.mount(start.source, scratch, server, writable=settings.rootfs_writable, made=mount)
    operations.phase("rootfs")
    variables, image_scripts = environ.Variables(), etc.ImageScripts(root)
    context = hooks.Context(root, site.mount_point, settings, variables.values, site.caller)
    scripts = run_conf(start, context, site, scratch)
    system = own_mounts(site.mounts, own, sysfs)
    system = copy_host_files(start, system, scratch, all_files=keeps_copies(start, follower, nested=nested))
    mounts = [*image_mounts(root, settings, site.variables), *system]
    mount_all([*mounts, *start.mounts], root, before_hooks=True)
    furnish(root, own, from_root=uid == 0)
    wanted = collect_environ(variables, start, context, site, scripts)
    read_ahead(start, context, image_scripts, server)
    operations.phase("mounts")
    later, script = run_hooks(start, context, site, scripts)
    variables.note("hooks")
    operations.phase("hooks")
    variables.assign(wanted)
    replace_script(root, scratch, script)
    rootfs.hide(scratch)
    mount_all([*mounts, *later, *start.mounts], root, before_hooks=False)
    image = image_scripts.exec()
    make_workdir(root, image, start.mounts)
    umask = log_in(start, context, umask)
    finish_features(context, variables)
    if start.source.lends:
        start.source.shared = rootfs.lend(site.mount_point)
    if not settings.rootfs_writable:
        rootfs.seal(site.mount_point)
    os.close(root)
    withhold(new_keyring=settings.unshare_keyring)
    switch_root(site.mount_point, inner, nested=nested)
    os.umask(umask)
    operations.phase("mounts")
    return Container(variables, image, login_shell=settings.login_shell)


def make_scratch(start: Start) -> str:
    """Return the directory for this start's mounts. Outside of Slurm steps, write a named container's PID there."""
    scratch = rootfs.make_scratch(start.settings)
    is_named = bool(start.source.directory or start.source.upper) and not start.source.is_volatile
    if is_named and not start.in_step:
        named.note(start.source.name, scratch)
    return scratch


def share(start: Start, scratch: str) -> Entry | None:
    """Return the image's entry in the table of shared FUSE servers (sharing.py), or None if the server is not shared.

    A step does not share a server: its tasks have one container, and the step's helper watches the server. A superuser
    has no user namespace to share.
    """
    source = start.source
    if not start.is_served or not source.image or source.served >= 0:
        return None
    if start.in_step or start.superuser or start.is_overlaid:
        return None
    from enroot_py.runtime import sharing

    return sharing.find(source.image, source.offset, scratch)


def start_follower(start: Start, mounts: Iterable[Mount], own: int, entry: Entry | None) -> int:
    """Start penroot-follow. It reports killed FUSE servers, and shows later changes of host files in the container.

    Returns the child to wait for, or 0 if penroot-follow is not needed or cannot be started. In a step, the step's
    helper does this work. A writable container has copies of host files, and sees no changes. With a private PID
    namespace, the process that waits for the container reports servers, except a server of another start.
    """
    waits, servers = bool(own & linux.CLONE_NEWPID), {}
    shared = entry.pidfd if entry is not None else -1
    if start.in_step or start.forked:
        return 0
    if waits and shared >= 0:
        servers[start.source.image] = "squashfuse"
    if not waits:
        if start.is_served:
            servers.update(dict.fromkeys([hostfiles.ROOT] * start.is_overlaid, "fuse-overlayfs"))
            servers.update(dict.fromkeys([start.source.image] * bool(start.source.image), "squashfuse"))
        servers.update((mount.source, "squashfuse") for mount in mounts if mount.fstype == mounting.SQUASHFS)
    if start.settings.rootfs_writable and not servers:
        return 0
    return hostfiles.follow(child=waits, changes=not start.settings.rootfs_writable, servers=servers, shared=shared)


def keeps_copies(start: Start, follower: int, *, nested: bool) -> bool:
    """Return whether to copy all host files: with ``forked``, nothing follows changes; ``nested`` locks the mounts."""
    return bool(start.forked) or nested and (bool(follower) or start.in_step)


def copy_host_files(start: Start, system: list[Mount], scratch: str, *, all_files: bool) -> list[Mount]:
    """Return the ``system`` mounts. In a writable container, or with ``all_files``, copies replace all host files.

    Else copies replace host files that mounts of the caller cover. When the host replaces a file, the kernel detaches a
    mount of the old file. It keeps a locked mount, over which penroot-follow cannot mount. A copy has neither problem.
    """
    writable = start.settings.rootfs_writable
    targets = [mount.target for mount in start.mounts if mount.target.startswith("/etc/")]
    if not (writable or all_files or targets):
        return system
    return hostfiles.copied(system, hostfiles.FILES if writable or all_files else targets, scratch, writable=writable)


def serve(start: Start, scratch: str, entry: Entry | None) -> tuple[Server | None, int]:
    """Start squashfuse for an image, unless ``entry`` has a server, and fuse-overlayfs if the kernel makes no overlay.

    Returns the server of the image or None, and the detached root mount or -1.
    """
    source, settings = start.source, start.settings
    if not start.is_served:
        return None, source.shared
    from enroot_py.runtime.squashfuse import Server

    if source.served >= 0:
        return Server.mounted(source.image, source.served), -1
    enter_servers(start, entry)
    server = None
    if source.image:
        server = Server(source.image, superuser=start.superuser, offset=source.offset, entry=entry)
    if not start.is_overlaid:
        return server, -1
    from enroot_py.runtime import fuseoverlay

    try:
        return server, fuseoverlay.mount(source, server, scratch, writable=settings.rootfs_writable)
    except OSError as e:
        raise ContainerError(f"cannot mount the root filesystem of {source.name}: {e.strerror}") from e


def enter_servers(start: Start, entry: Entry | None = None) -> None:
    """Enter the user namespace of ``entry``'s FUSE server, or a new user namespace. The caller is root in it.

    Files of the image are owned by root, so the caller has access to them in this namespace. A server sees the node's
    files. Root of the container cannot reach them through the server: the container has an inner user namespace.
    """
    if not start.superuser:
        if entry is None or not entry.enter():
            namespaces.enter_user(0, 0)
        namespaces.unshare(linux.CLONE_NEWNS)


def serve_data(start: Start, mounts: Iterable[Mount], scratch: str) -> None:
    """Start servers for squashfs files among the mounts."""
    files = [mount for mount in mounts if mount.fstype == mounting.SQUASHFS]
    if not files:
        return
    if not start.is_served:
        enter_servers(start)
    from enroot_py.runtime import data

    data.serve(files, scratch, superuser=start.superuser)


def await_servers(own: int) -> None:
    """Wait for the servers before entering a PID namespace, where they are no longer children of this process."""
    servers = namespaces.servers()
    if own & linux.CLONE_NEWPID and servers:
        for server in servers.starting:
            server.await_start()


def enter_namespaces(inside: tuple[int, int], own: int, start: Start, *, nested: bool, entered: bool) -> int:
    """Enter a user namespace, a mount namespace and the private namespaces ``own`` of the container.

    With ``entered``, only the mount namespace is missing. Returns a descriptor of the inner user namespace, or -1.
    """
    if entered:
        namespaces.unshare_mounts(superuser=False)
        return -1
    if not own:
        namespaces.enter(*inside, superuser=start.superuser)
        return -1
    from enroot_py.runtime import isolated

    return isolated.enter(
        *inside,
        own,
        superuser=start.superuser,
        nested=nested,
        forked=start.forked,
        beside=lambda: begin_features(start.settings),
    )


def run_conf(start: Start, context: hooks.Context, site: Site, scratch: str) -> Scripts | None:
    """Source the configuration script and apply its exports. Returns None if no bash is needed."""
    if not (start.conf or any(hook.is_script for hook in site.hooks)):
        return None
    from enroot_py.runtime.shellhooks import Scripts

    scripts = Scripts(context, scratch)
    if start.conf:
        scripts.source(start.conf, start.command)
        site.read(start.settings, context.host)
    return scripts


def image_mounts(root: int, settings: Settings, variables: Mapping[str, str]) -> Iterable[Mount]:
    """Return the mounts of the image's /etc/fstab: usually the image's volumes."""
    text, origin = paths.text(root, "/etc/fstab"), "/etc/fstab of the image"
    if settings.image_fstab == "host":
        return fstab.parse_file(text, variables, origin)
    return fstab.parse_image(text, variables["ENROOT_ROOTFS"], origin)


def caller_sysfs(own: int) -> Mount | None:
    """Return a mount of /sys if the caller, as root of a user namespace, has entered a network namespace, else None."""
    if own & linux.CLONE_NEWNET or not linux.capget_permitted() >> linux.CAP_SYS_ADMIN & 1:
        return None
    from enroot_py.runtime import sysfs

    return sysfs.of_caller()


def own_mounts(system: list[Mount], own: int, sysfs: Mount | None) -> list[Mount]:
    """Return the ``system`` mounts, adapted to the private namespaces ``own``. ``sysfs`` replaces the host's /sys."""
    if sysfs:
        system = [sysfs if mount.source == mount.target == "/sys" else mount for mount in system]
    if not own:
        return system
    from enroot_py.runtime import isolated

    return isolated.mounts_of(own, system)


def mount_all(mounts: Iterable[Mount], root: int, *, before_hooks: bool) -> None:
    """Execute the mounts that come before the hooks, or with ``before_hooks=False`` the others. Raises MountError."""
    for mount in mounts:
        if (mount.passno < 0) == before_hooks:
            fstab.execute(mount, root)


def furnish(root: int, own: int, *, from_root: bool) -> None:
    """After the system mounts: set up the private namespaces ``own``, and hide files of /proc if root is the caller."""
    if own:
        from enroot_py.runtime import isolated

        isolated.complete(root, own)
    if from_root:
        from enroot_py.runtime import masks

        masks.cover(root)


def collect_environ(
    variables: Variables, start: Start, context: hooks.Context, site: Site, scripts: Scripts | None
) -> Wanted:
    """Set ``variables`` for the hooks, from the image, the site, the configuration script and the caller.

    Returns the variables of the caller. enter() sets them again after the hooks, so hooks cannot override them.
    """
    variables.set(environ.of_image(context.root, context.host), "/etc/environment of the image")
    variables.set(site.environ, "environ.d")
    if scripts is not None and start.conf:
        scripts.environ()
        variables.note(f"environ() of {start.conf}")
    of_file = start.file(variables.values) if start.file else {}
    wanted: Wanted = {**of_file, **{name: (value, "--env") for name, value in start.env.items()}}
    variables.cover(wanted)
    for name, (value, origin) in wanted.items():
        if value is None and log.explain:
            log.explain(f"unset    {name}  ({origin})")
    return wanted


def read_ahead(start: Start, context: hooks.Context, image_scripts: etc.ImageScripts, server: Server | None) -> None:
    """Make the image's FUSE server decompress the program while the hooks run."""
    if server is None or not (start.program or start.command):
        return
    name = start.program
    if not name:
        image = image_scripts.exec()
        of_shell = start.settings.login_shell or context.exists("/etc/rc")
        name = image.argv(start.command)[0] if image else "/bin/sh" if of_shell else start.command[0]
    server.read_ahead(context.root, name, context.environ.get("PATH", ""))


def run_hooks(
    start: Start, context: hooks.Context, site: Site, scripts: Scripts | None
) -> tuple[list[Mount], str | None]:
    """Run the hooks, then hooks() and mounts() of a configuration script.

    Returns the script's mounts, and the text that replaces /etc/rc, or None.
    """
    context.mounted.update((mount.source.rstrip("/"), mount.target.rstrip("/")) for mount in start.mounts)
    hooks.run(site.hooks, context, scripts.hook if scripts is not None else None)
    later, script = scripts.finish() if scripts is not None else ([], None)
    return later, script if start.script is None else start.script


def replace_script(root: int, scratch: str, script: str | None) -> None:
    """Mount a file with the text ``script`` over /etc/rc, unless ``script`` is None."""
    if script is None:
        return
    path = scratch + "/rc"
    with open(path, "wb") as f:
        f.write(os.fsencode(script))
    rc = mounting.Mount(path, "/etc/rc", "none", ("x-create=file", "bind", "nosuid", "nodev"), 0, "--rc")
    fstab.execute(rc, root)


def make_workdir(root: int, image: etc.Exec | None, caller_mounts: Iterable[Mount]) -> None:
    """Create a missing working directory of the image. In a host directory, create it only below a caller's mount."""
    if image is None or paths.exists(root, image.workdir):
        return
    named = any(image.workdir.startswith(mount.target.rstrip("/") + "/") for mount in caller_mounts)
    try:
        os.close(paths.make_directory(root, image.workdir, named=named))
    except OSError as e:
        message = f"cannot make the image's working directory {image.workdir}: {e.strerror}"
        raise ContainerError(message, hint="create it on the host, or use --rc SCRIPT") from e


def log_in(start: Start, context: hooks.Context, umask: int) -> int:
    """Add the variables of a login to the environment, and return the umask."""
    settings, user = start.settings, context.user
    shell = user.pw_shell if context.exists(user.pw_shell) else "/bin/sh"
    if settings.login_shell:
        from enroot_py.runtime import login

        mask = login.prepare(
            context.root, context.environ, user=user, as_root=settings.remap_root, has_command=bool(start.command)
        )
        umask = umask if mask is None else mask
    name, home = ("root", "/root") if settings.remap_root else (user.pw_name, user.pw_dir)
    environ.complete(context.environ, name, home, shell)
    return umask


def begin_features(settings: Settings) -> int:
    """Let optional features start processes in the container's PID namespace and the caller's network namespace.

    Returns the namespaces in which root of the container must not be privileged, as flags of unshare(2).
    """
    if not settings.is_extended:
        return 0
    from enroot_py.base.features import plugged

    flags = 0
    for feature in plugged("beside"):
        flags |= feature.begin(settings)
    return flags


def finish_features(context: hooks.Context, variables: Variables) -> None:
    """Let optional features add mounts that no mount of the caller may cover."""
    if not context.settings.is_extended:
        return
    from enroot_py.base.features import plugged

    for feature in plugged("start"):
        if origin := feature.finish(context):
            variables.note(origin)


def switch_root(mount_point: str, inner: int, *, nested: bool) -> None:
    """Make ``mount_point`` the root directory. If ``nested``, enter inner namespaces, because the program will be root.

    Processes that join the container later enter the same namespaces. ``inner``: see enter_namespaces().
    """
    if not nested:
        namespaces.unshare(linux.CLONE_NEWCGROUP)  # not earlier: hooks read the caller's cgroups
        namespaces.hide()
        rootfs.switch(mount_point)
        return
    with Fd(os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as myself:
        rootfs.switch(mount_point)
        namespaces.nest(inner, myself)
    namespaces.hide()
