"""From a root file system to a process inside of it, without a shell."""

from __future__ import annotations

import errno
import gc
import os
from _collections_abc import Mapping

from enroot_py.base import linux, log, paths, trusted
from enroot_py.base.errors import ContainerError
from enroot_py.config import files
from enroot_py.config.settings import Settings, sysconf_path
from enroot_py.runtime import environ, etc, execute, hooks, mounts, namespaces, rootfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pwd import struct_passwd

    from enroot_py.runtime.squashfuse import Server


def enter(
    source: rootfs.Source,
    settings: Settings,
    host: Mapping[str, str],
    user_mounts: list[mounts.Mount],
    env: Mapping[str, str],
    *,
    conf: str = "",
    script: str | None = None,
    command: tuple[str, ...] = (),
    program: str = "",
    superuser: bool = False,
) -> execute.Container:
    """Move this process into a new container and return what it found there.

    ``conf`` is a configuration script, ``script`` stands for the image's
    /etc/rc, ``command`` is what the container will run, ``program`` what runs
    instead of the image's own script. A ``superuser`` stays in the user namespace
    in which he is root.

    The process keeps its capabilities in the container's user namespace; the
    caller drops them. Raises PenrootError, after which the process is fit only
    to exit: nothing that it mounted outlives it.
    """
    # Nothing here lives long enough to be garbage; with the hooks for devices a
    # collection would cost a tenth of a start.
    gc.disable()
    remap, writable = settings.remap_root, settings.rootfs_writable
    ids = os.geteuid(), os.getegid()
    scratch = make_scratch(settings)
    umask = os.umask(0o022)
    server, made = serve(source, settings, scratch, superuser=superuser)
    # What is of the host comes now: the server of an image starts meanwhile.
    user = account(*ids)
    with open("/proc/self/cgroup", errors="surrogateescape") as f:
        cgroups = f.read()
    mount_point = source.mount_point(scratch)
    variables = {**host, "ENROOT_ROOTFS": mount_point}
    system = site_mounts(settings, host, variables)
    of_site = environ.of_site(settings, host)
    loaded = hooks.load(hooks.STANDARD, settings, host)
    more = unshared(settings)
    if superuser:
        enter_as_superuser(more)
    else:
        enter_namespaces((0, 0) if remap else ids, more)
    rootfs.mount_scratch(scratch)
    root = rootfs.mount(source, scratch, server, writable=writable, made=made)
    context = hooks.Context(root, settings, {}, host, user, cgroups, mount_point)
    scripts = None
    if conf or any(hook.is_script for hook in loaded):
        from enroot_py.runtime.shellhooks import Scripts

        scripts = Scripts(context, scratch)
        if conf:
            scripts.source(conf, command)
            variables = {**context.host, "ENROOT_ROOTFS": mount_point}
            system, of_site = site_mounts(settings, host, variables), environ.of_site(settings, context.host)
    fstab = [*image_mounts(root, settings, variables), *system, *namespace_mounts(settings), *user_mounts]
    for mount in fstab:
        if mount.passno < 0:
            mount.execute(root)
    if more:
        from enroot_py.runtime import isolated

        isolated.complete(root, more)
    if ids[0] == 0:
        from enroot_py.runtime import masks

        masks.cover(root)
    origins: dict[str, str] = {}
    _update(context.environ, origins, environ.of_image(root, context.host), "/etc/environment of the image")
    _update(context.environ, origins, of_site, "environ.d")
    if scripts is not None and conf:
        before = dict(context.environ)
        scripts.environ()
        origins.update(_changed(before, context.environ, f"environ() of {conf}"))
    below = {name: context.environ[name] for name in env if name in context.environ}
    _update(context.environ, origins, env, "--env")  # hooks see these, but cannot override them
    before = dict(context.environ)
    if server is not None and (program or command):
        if not program:
            image = etc.of_image(root)
            program = image.argv(command)[0] if image else "/bin/sh"
        server.read_ahead(root, program, context.environ.get("PATH", ""))
    context.mounted.update((mount.source.rstrip("/"), mount.target.rstrip("/")) for mount in user_mounts)
    hooks.run(loaded, context, scripts.hook if scripts is not None else None)
    if scripts is not None:
        later, of_conf = scripts.finish()
        fstab[-len(user_mounts) or len(fstab) :] = [*later, *user_mounts]
        script = of_conf if script is None else script
    origins.update(_changed(before, context.environ, "hooks"))
    _update(context.environ, origins, env, "--env")
    if script is not None:
        replace_script(root, scratch, script)
    rootfs.hide(scratch)
    for mount in fstab:
        if mount.passno >= 0:
            mount.execute(root)
    image = etc.of_image(root)
    if image is not None and not paths.exists(root, image.workdir):
        make_workdir(root, image.workdir, user_mounts)
    shell = user.pw_shell if paths.exists(root, user.pw_shell) else "/bin/sh"
    if settings.login_shell:
        from enroot_py.runtime import login

        mask = login.prepare(root, context.environ, user=user, as_root=remap, given=bool(command))
        umask = umask if mask is None else mask
    if remap:
        environ.complete(context.environ, "root", "/root", shell)
    else:
        environ.complete(context.environ, user.pw_name, user.pw_dir, shell)
    if not writable:
        rootfs.seal(mount_point)
    os.close(root)
    if ids[0] == 0 and not (superuser or more):
        # What masks.py covers would not stay covered for who is root in the namespace that owns the mounts. Who
        # joins the container enters this one, which so has to own all namespaces that are not the host's.
        myself = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        rootfs.switch(mount_point)
        namespaces.enter_user(0, 0, myself=myself)
        unshare(linux.CLONE_NEWNS | linux.CLONE_NEWCGROUP)
        os.close(myself)
        namespaces.hide()
    else:
        namespaces.unshare(linux.CLONE_NEWCGROUP)  # not before: hooks look for the limits of the caller
        namespaces.hide()
        rootfs.switch(mount_point)
    os.umask(umask)
    return execute.Container(context.environ, origins, image, settings.login_shell, below)


def _update(target: dict[str, str], origins: dict[str, str], new: Mapping[str, str], origin: str) -> None:
    target.update(new)
    origins.update(dict.fromkeys(new, origin))


def _changed(before: Mapping[str, str], now: Mapping[str, str], origin: str) -> dict[str, str]:
    return {key: origin for key, value in now.items() if before.get(key) != value}


def make_workdir(root: int, path: str, user_mounts: list[mounts.Mount]) -> None:
    """Make the image's working directory; in a tree of the host only where the user has mounted that above it."""
    named = any(path.startswith(mount.target.rstrip("/") + "/") for mount in user_mounts)
    try:
        os.close(paths.create(root, path, directory=True, named=named))
    except OSError as e:
        message = f"cannot make the image's working directory {path}: {e.strerror}"
        raise ContainerError(message, hint="make it yourself where it belongs to the host; or: --rc SCRIPT") from e


def replace_script(root: int, scratch: str, script: str) -> None:
    """Let /etc/rc be ``script``, for this start only: a writable container keeps its own."""
    path = scratch + "/rc"
    with open(path, "wb") as f:
        f.write(os.fsencode(script))
    mounts.Mount(path, "/etc/rc", "none", "x-create=file,bind,nosuid,nodev", 0, "--rc").execute(root)


def replaced(mount: mounts.Mount, settings: Settings) -> bool:
    """Whether a namespace of the container's own stands for a system mount."""
    own = {"/proc": settings.unshare_pid, "/sys": settings.unshare_net}
    return mount.source == mount.target and own.get(mount.target, False)


def namespace_mounts(settings: Settings) -> list[mounts.Mount]:
    """The file systems that show a namespace, where the container has its own."""
    found = []
    if settings.unshare_pid:
        options = "x-create=dir,rw,nosuid,nodev,noexec,private"
        found.append(mounts.Mount("proc", "/proc", "proc", options, -1, "--pid"))
    if settings.unshare_net:
        options = "x-create=dir,ro,nosuid,nodev,noexec,private"
        found.append(mounts.Mount("sysfs", "/sys", "sysfs", options, -1, "--net"))
    return found


def unshared(settings: Settings) -> int:
    """The namespaces that a container has of its own by setting, as flags of unshare(2)."""
    flags = linux.CLONE_NEWNET if settings.unshare_net else 0
    flags |= linux.CLONE_NEWIPC if settings.unshare_ipc else 0
    flags |= linux.CLONE_NEWPID if settings.unshare_pid else 0
    return flags | (linux.CLONE_NEWUTS if settings.unshare_uts else 0)


def serve(source: rootfs.Source, settings: Settings, scratch: str, *, superuser: bool) -> tuple[Server | None, int]:
    """Start what serves the root file system: the server of an image, or that, and the detached mount, of an overlay.

    In a user namespace where the caller is root: files of an image belong to root, so they are his, and stay
    his in the one inside it where he is himself. And what runs as root in that one cannot look at the server,
    whose root directory is the node's.
    """
    overlaid = not settings.native_overlayfs and not (source.directory and settings.rootfs_writable)
    if source.shared >= 0 or not (source.image or overlaid):
        return None, source.shared
    if not superuser:
        namespaces.enter_user(0, 0)
        unshare(linux.CLONE_NEWNS)
    server = None
    if source.image:
        from enroot_py.runtime.squashfuse import Server

        server = Server(source.image)
    if not overlaid:
        return server, -1
    from enroot_py.runtime import fuseoverlay

    try:
        return server, fuseoverlay.mount(source, server, scratch, writable=settings.rootfs_writable)
    except OSError as e:
        raise ContainerError(f"cannot mount the root filesystem of {source.name}: {e.strerror}") from e


def enter_namespaces(ids: tuple[int, int], more: int) -> None:
    """Enter new user and mount namespaces as ``ids``, and ``more``.

    Mounts of a namespace with another owner arrive as slaves and locked,
    mount_namespaces(7): nothing done here reaches the host.
    """
    namespaces.enter_user(*ids)
    unshare(linux.CLONE_NEWNS | more)


def enter_as_superuser(more: int) -> None:
    """The same without a user namespace: whoever is root already keeps all that he may do."""
    unshare(linux.CLONE_NEWNS | more)
    # Without another owner, mounts arrive as peers of the host's.
    linux.mount_setattr(linux.AT_FDCWD, "/", linux.AT_RECURSIVE, 0, 0, linux.MS_SLAVE)


def unshare(flags: int) -> None:
    """Unshare namespaces of the container; with a PID namespace, continue as its process 1.

    The process that waits for that one stays behind, outside of the container, and never returns.
    """
    if flags & linux.CLONE_NEWPID:
        namespaces.unshare(linux.CLONE_NEWPID)
        child = os.fork()
        if child:
            namespaces.hide()
            os._exit(execute.wait(child))
        linux.prctl(linux.PR_SET_PDEATHSIG, 9)
    namespaces.unshare(flags & ~linux.CLONE_NEWPID)


def account(uid: int, gid: int) -> struct_passwd:
    """The passwd(5) entry of a user in this group; one with these numbers where the database has none."""
    import pwd

    try:
        found = pwd.getpwuid(uid)
        return pwd.struct_passwd((*found[:3], gid, *found[4:]))
    except KeyError:
        return pwd.struct_passwd((f"user{uid}", "x", uid, gid, "", "/", "/bin/sh"))


def make_scratch(settings: Settings) -> str:
    """The directory under which a start mounts, in its own namespace. Raises ContainerError.

    It is the caller's own, and nobody can swap it: where the one of the settings is not, a private one.
    """
    path = settings.runtime_path
    try:
        trusted.place(path, make=True, strict=True)
        return path
    except OSError as e:
        error = e
    if error.errno == errno.EPERM:
        try:
            private = trusted.temporary(settings.temp_path)
        except OSError as e:
            error = e
        else:
            log.warn(f"not using ENROOT_RUNTIME_PATH={path}, which {error.strerror}: using {private}")
            return private
    from enroot_py.base import filesystems

    raise ContainerError(
        f"cannot create {path}: {error.strerror}", hint=filesystems.way_out(error, path, "ENROOT_RUNTIME_PATH")
    ) from error


def image_mounts(root: int, settings: Settings, variables: Mapping[str, str]) -> list[mounts.Mount]:
    """Mounts that the image's /etc/fstab asks for: its volumes."""
    text, origin = paths.text(root, "/etc/fstab"), "/etc/fstab of the image"
    if settings.image_fstab == "host":
        return list(mounts.parse_file(text, variables, origin))
    return list(mounts.parse_image(text, variables["ENROOT_ROOTFS"], origin))


def site_mounts(settings: Settings, host: Mapping[str, str], variables: Mapping[str, str]) -> list[mounts.Mount]:
    """System mounts and those of mounts.d, the system's and the user's."""
    directories = (sysconf_path(host) + "/mounts.d", settings.config_path + "/mounts.d")
    found: list[mounts.Mount] = []
    for origin, text in files.fragments(directories, ".fstab", mounts.SYSTEM):
        found += mounts.parse_file(text, variables, origin)
    return [mount for mount in found if not replaced(mount, settings)]
