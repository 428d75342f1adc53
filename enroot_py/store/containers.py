"""Containers on disk, under ENROOT_DATA_PATH.

A plain directory is a root file system, as in enroot. A directory with a record (container_record.py) is a container
over a stored image or a squashfs file: ``upper`` holds its changes. Container starts import this module. Therefore
modules that starts do not need are imported inside functions.
"""

from __future__ import annotations

import errno
import os
from _collections_abc import Callable

from enroot_py.base import pack, trusted
from enroot_py.base.errors import ContainerError, PenrootError, UsageError
from enroot_py.base.operations import Operation
from enroot_py.config.settings import Settings
from enroot_py.runtime.rootfs import Source
from enroot_py.store import container_record, layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.store.store import Image


def find(target: str, settings: Settings) -> Source:
    """Return the root file system of ``target``, a container's name or the path of a squashfs image.

    Raises ContainerError for an unknown target, ImageError for a damaged image.
    """
    if os.path.isfile(target):
        return find_file(target, settings)
    if "/" in target or not target or target.endswith(".sqsh") and not os.path.isdir(f"{settings.data_path}/{target}"):
        problem = "not an image file" if os.path.exists(target) else "no such image"
        is_path = target.startswith(("/", ".", "docker:/")) or target.endswith(".sqsh")
        image = "docker://IMAGE" if is_path or not target else f"docker://{shown(target)}"
        hint = f"name a container, the path of a squashfs image, or a registry image: {image}"
        raise ContainerError(f"{problem}: {shown(target)}", hint=hint)
    return open_container(target, settings, or_else=f"; for a registry image: docker://{shown(target)}")


def is_reference(target: str, settings: Settings) -> bool:
    """Return whether ``target`` is a URI, or is NAME:TAG and no file or container has this name."""
    if ":" not in target:  # neither a URI nor NAME:TAG: do not import the parser
        return False
    from enroot_py.registry import reference

    if reference.is_uri(target):
        return True
    is_taken = os.path.lexists(target) or "/" not in target and os.path.lexists(f"{settings.data_path}/{target}")
    return not is_taken and reference.is_tagged(target)


def shown(target: str) -> str:
    """Return ``target`` for a message, without the password that a reference may contain."""
    if ":" not in target or "@" not in target:
        return target
    from enroot_py.registry.reference import without_password

    return without_password(target)


def find_file(path: str, settings: Settings) -> Source:
    """Return the root file system in a squashfs image. Raises ImageError if ``path`` is damaged or no squashfs."""
    pack.load(pack.IMAGE)
    from enroot_py.store.squashfs import check

    check(path)
    real = admit_file(path, settings)
    if settings.unpack:
        from enroot_py.store import filecopy

        return of_image(path, filecopy.image(real, settings))
    return Source(path, image=real)


def admit_file(path: str, settings: Settings) -> str:
    """Return the real path of a squashfs file. Raises PolicyError if a policy rejects the file."""
    real = os.path.realpath(path)
    if settings.policies:
        from enroot_py.store import policies

        policies.admission(settings).check_file(real, settings)
    return real


def admit_imported(uri: str, settings: Settings) -> None:
    """Raise PolicyError if a policy rejects an image that the program of ``importer=`` (plugstack.conf) is to fetch."""
    if settings.policies:
        from enroot_py.registry import reference
        from enroot_py.store import policies

        policies.admission(settings).check_name(reference.parse(uri), settings, None, by_importer=True)


def of_image(name: str, image: Image) -> Source:
    """Return the root file system of a stored image."""
    return Source(name, lowerdirs=image.lowerdirs, image=image.file)


def open_container(name: str, settings: Settings, or_else: str = "") -> Source:
    """Open the container ``name``. If there is none, ``or_else`` is added to the hint.

    Raises ContainerError if the container or its image is missing.
    """
    path = f"{settings.data_path}/{check_name(name)}"
    check_place(settings.data_path, name)
    try:
        record = container_record.of(path)
    except OSError as e:
        raise ContainerError(f"cannot open the container {path}: {e.strerror}", hint=_hint(e, path)) from e
    if record is None:
        if os.path.lexists(f"{path}/{container_record.MARK}"):
            raise _not_ours(path) if container_record.text(f"{path}/{container_record.MARK}") else _damaged(path)
        if os.path.isdir(path):
            if settings.policies:
                from enroot_py.store import policies

                policies.admission(settings).check_directory(path, settings)
            return Source(name, directory=path)
        raise ContainerError(
            f"no such container: {shown(name)} in {settings.data_path}",
            hint="penroot list shows your containers" + or_else,
        )
    if settings.native_overlayfs and os.path.exists(path + "/fuse-overlayfs"):
        from enroot_py.runtime import fuseoverlay

        fuseoverlay.settle(path)
    if settings.policies:
        from enroot_py.store import policies

        record = dict(policies.admission(settings).admitted(record, settings))
    if "squashfs" in record:
        return Source(name, image=record["squashfs"], changes=path)
    if "image" not in record:
        raise _damaged(path)
    file = f"{record['image']}/{layout.SQUASHFS}"
    if os.path.exists(file):
        return Source(name, image=file, changes=path)
    return Source(name, lowerdirs=_lowerdirs(record["image"], name), changes=path)


def _damaged(path: str) -> ContainerError:
    name = os.path.basename(path)
    return ContainerError(
        f"the record of the container {name} is damaged: {path}/{container_record.MARK}",
        hint=f"the container's changes are in {path}/upper; to delete the container: penroot remove {name}",
    )


def _not_ours(path: str) -> ContainerError:
    word = container_record.word_file(os.path.dirname(path))
    return ContainerError(
        f"the container {os.path.basename(path)} has a file {path}/{container_record.MARK} that was not made with it",
        hint="if the image or a program created it, delete it; if you made the container with an older penroot: "
        f"echo word $(cat {word}) >> {path}/{container_record.MARK}",
    )


def _lowerdirs(image: str, name: str) -> tuple[str, ...]:
    """Return the layer trees of a stored image, top first."""
    from enroot_py.store.crash import is_usable

    store = layout.root_of(image)
    try:
        trusted.place(store)
    except PermissionError as e:
        raise ContainerError(
            f"the store of {name}, {store}, {e.strerror}: it is not trusted", hint="import the image again"
        ) from e
    except OSError:
        pass  # layout.lowerdirs() below fails, too, and its error names the image
    if not layout.is_readable(store):
        from enroot_py.store import format

        format.check(store, mark=False)
    if os.path.isdir(image) and not is_usable(image):
        raise ContainerError(
            f"the image of {name} was damaged when this node went down: {image}",
            hint="import it again; the container keeps its changes",
        )
    try:
        directories = layout.lowerdirs(image)
    except OSError as e:
        raise ContainerError(
            f"the image of {name} is gone: {image}", hint="import it again, or remove the container"
        ) from e
    if not directories:
        hint = "penroot cache verify --repair"
        raise ContainerError(f"the image of {name} is damaged: {image}/{layout.STACK}", hint=hint)
    return directories


def check_place(data_path: str, name: str = "") -> None:
    """Raise ContainerError if other users can write to the data path or to the container ``name``."""
    path = f"{data_path}/{name}" if name else data_path
    try:
        try:
            trusted.place(path)
        except PermissionError as e:
            # An image's root may be world-writable. This is harmless if other users cannot enter the data path.
            if not name or e.filename != path or trusted.place(data_path).st_mode & 0o011:
                raise
            trusted.place(path, closed_to=0)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as e:
        raise _untrusted(path, e) from e


def _untrusted(path: str, error: OSError) -> ContainerError:
    if error.errno != errno.EPERM:
        return ContainerError(f"cannot open {path}: {error.strerror}", hint=_hint(error, path + "/"))
    hint = "set ENROOT_DATA_PATH to a directory of your own"
    if (error.strerror or "").startswith("can be written"):
        hint = f"if no other user has changed it: chmod go-w {path}; else {hint}"
    return ContainerError(f"{path} {error.strerror}: its content is not trusted", hint=hint)


def check_name(name: str) -> str:
    if not name or "/" in name or name in (".", "..") or len(os.fsencode(name)) > 255 or "\0" in name:
        raise UsageError(f"not a container name: {shown(name)!r}", hint="a name is a file name without '/'")
    if name.startswith("."):  # reserved for containers in the making, which names() does not list
        raise UsageError(f"not a container name: {shown(name)!r}", hint="a name does not begin with a dot")
    return name


def create(name: str, image: str, settings: Settings, uri: str = "", *, force: bool = False) -> Source:
    """Make the container ``name`` over the stored image in directory ``image``, without copying the image.

    With ``force``, the complete new container replaces an existing one.
    Raises ContainerError if the container exists or cannot be written.
    """
    from enroot_py.store.store import Store

    store = Store(layout.root_of(image))
    with Operation("create", settings, container=name, image=uri, digest=layout.digest_of(image)):
        return _make(name, f"image {image}\nuri {uri}\n", settings, store.note_container, force=force)


def temporary(name: str, source: Source, settings: Settings) -> Source:
    """Make the container ``name`` over the squashfs image of ``source`` or its unpacked copy. Raises ContainerError."""
    if source.lowerdirs:
        return create(name, layout.image_over(source.lowerdirs), settings, source.name)
    return _make(name, f"squashfs {source.image}\n", settings)


def _make(
    name: str,
    origin: str,
    settings: Settings,
    announce: Callable[[str], None] | None = None,
    *,
    force: bool = False,
) -> Source:
    """Create a container. ``origin`` has the lines of the record that name the image.

    ``announce`` is called with the path of the record before the container exists. For a stored image, scripts.copy()
    copies files of the image's /etc into the container.
    """
    path = f"{settings.data_path}/{check_name(name)}"
    with _New(name, settings, force=force) as made:
        if announce:
            announce(f"{path}/{container_record.MARK}")
        os.mkdir(made + "/upper", 0o755)
        os.mkdir(made + "/work")
        kind, _, image = origin.partition("\n")[0].partition(" ")
        if kind == "image":
            from enroot_py.store import scripts

            scripts.copy(image, made)
        container_record.write(made, settings.data_path, origin)
    return open_container(name, settings)


def unpack(name: str, image: str, settings: Settings, *, force: bool = False) -> Source:
    """Make the container ``name`` as a plain directory from a squashfs image. Raises ContainerError, ImageError."""
    from enroot_py.store import squashfs, unsquashfs

    squashfs.check(image)
    real = admit_file(image, settings)
    recorded = Operation("create", settings, container=name, image=image)
    with recorded, _New(name, settings, force=force) as temporary:
        unsquashfs.unpack(real, temporary, settings)
        if os.path.lexists(f"{temporary}/{container_record.MARK}"):
            message = f"the image {image} has a file /{container_record.MARK}, a name that penroot reserves"
            raise ContainerError(message, hint=f"start the image without a container: penroot start {image}")
    return open_container(name, settings)


def refuse_taken(name: str, settings: Settings, *, force: bool) -> None:
    """Raise ContainerError if the name is taken; with ``force`` only if that container is running."""
    if not os.path.lexists(f"{settings.data_path}/{check_name(name)}"):
        return
    if force:
        refuse_running(name, settings)
    else:
        hint = f"use --force, another --name, or: penroot remove {name}"
        raise ContainerError(f"container already exists: {name}", hint=hint)


class _New:
    """A new container, for a ``with``: it gets its name on success, and is deleted on failure."""

    def __init__(self, name: str, settings: Settings, *, force: bool) -> None:
        self._name, self._settings, self._force = name, settings, force
        self._path = f"{settings.data_path}/{check_name(name)}"

    def __enter__(self) -> str:
        refuse_taken(self._name, self._settings, force=self._force)
        from enroot_py.base import making

        data_path = self._settings.data_path
        try:
            trusted.place(data_path, make=True)
            making.sweep(data_path)
            self._directory = making.Directory(self._path, 0o755)
            return self._directory.__enter__().path
        except OSError as e:
            if e.errno == errno.EPERM and e.filename == data_path:
                raise _untrusted(data_path, e) from e
            hint = _hint(e, self._path)
            raise ContainerError(f"cannot create a container in {data_path}: {e.strerror}", hint=hint) from e

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                self._publish()
        except OSError as e:
            error = e
        finally:
            self._end()
        if isinstance(error, OSError):
            is_taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            hint = "another process has just created it" if is_taken else _hint(error, self._path)
            raise ContainerError(f"cannot create {self._path}: {error.strerror}", hint=hint) from error

    def _end(self) -> None:
        try:
            self._directory.__exit__()
        except OSError as e:
            raise _cannot_delete(self._directory.path, e) from e

    def _publish(self) -> None:
        """Give the directory its name. Then delete the container that had the name."""
        if self._force:
            refuse_taken(self._name, self._settings, force=True)
        old = set_aside(self._name, self._settings.data_path, self._directory.replace) if self._force else None
        if old:
            old.delete()
        else:
            self._directory.publish()


def _hint(error: OSError, path: str) -> str:
    from enroot_py.base import filesystems

    return filesystems.hint_for(error, os.path.dirname(path), "ENROOT_DATA_PATH")


def names(settings: Settings) -> list[str]:
    """Return the names of all containers, sorted."""
    check_place(settings.data_path)
    try:
        entries = os.listdir(settings.data_path)
    except FileNotFoundError:
        return []
    except OSError as e:
        path = settings.data_path
        raise ContainerError(f"cannot read {path}: {e.strerror}", hint=_hint(e, path + "/")) from e
    return sorted(
        name for name in entries if not name.startswith(".") and os.path.isdir(f"{settings.data_path}/{name}")
    )


def refuse_running(name: str, settings: Settings) -> None:
    """Raise ContainerError if a process on this node, or a step on another node, uses the container."""
    from enroot_py.runtime import processes
    from enroot_py.store import claims

    node = os.uname().nodename
    for process in processes.running(settings):
        if process.name == name:
            problem = f"process {process.pid} ({process.comm}) runs in the container {name}"
            # Process 1 of a PID namespace ignores SIGTERM.
            hint = f"end it first: kill {process.pid}, or kill -KILL {process.pid}, or scancel its job"
            raise ContainerError(problem, hint=hint)
    if (holder := claims.holder(name, settings.data_path)) not in ("", node):
        raise ContainerError(f"a step on node {holder} uses {name}", hint=f"wait for it: squeue --nodelist={holder}")


def remove(name: str, settings: Settings) -> None:
    """Delete a container: hide it from the list, then delete its files. Raises ContainerError."""
    refuse_running(name, settings)
    sweep(settings)
    if not remove_if_there(name, settings):
        raise ContainerError(f"no such container: {shown(name)}", hint="penroot list shows your containers")


def sweep(settings: Settings) -> None:
    """Delete leftovers of processes that were killed while creating or deleting a container."""
    from enroot_py.base import making

    making.sweep(settings.data_path)


def remove_if_there(name: str, settings: Settings) -> bool:
    """Delete a container. Return False if there is none. Raises ContainerError."""
    from enroot_py.runtime import named
    from enroot_py.store import claims

    trash = set_aside(name, settings.data_path)
    named.forget(name, settings.runtime_path)
    claims.forget(name, settings.data_path, made=trash is not None)
    if trash is None:
        return False
    trash.delete()
    return True


class Trash:
    """A container that has lost its name and will be deleted. A lock protects it from sweeps by other processes."""

    def __init__(self, path: str, replace: Callable[[], str] | None) -> None:
        """Take the name from the container at ``path``. Raises OSError.

        ``replace`` gives the name to another container, and returns the new path of the container that had it.
        """
        from enroot_py.base import making

        self._lock = making.hold(path)
        try:
            if replace:
                self.path = replace()
            else:
                self.path = making.hidden(path, making.TRASH)
                os.rename(path, self.path)
        except OSError:
            self._unlock()
            raise

    def delete(self) -> None:
        try:
            delete(self.path)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)


def set_aside(name: str, data_path: str, replace: Callable[[], str] | None = None) -> Trash | None:
    """Take the name from a container, for its deletion. Return None if it does not exist. ``replace``: see Trash."""
    path = f"{data_path}/{check_name(name)}"
    check_place(data_path)
    if not os.path.lexists(path):
        return None  # on a read-only file system, rename(2) would fail with EROFS, not with ENOENT
    mount_point = _mounted_beneath(path)
    if mount_point:
        raise ContainerError(f"cannot remove {name}: {mount_point} is mounted in it", hint=f"umount {mount_point}")
    try:
        return Trash(path, replace)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise ContainerError(f"cannot remove {name}: {e.strerror}", hint=_hint(e, path)) from e


def _mounted_beneath(directory: str) -> str:
    """Return a mount point beneath a directory, or "". Files of a mount must not be deleted."""
    from enroot_py.base import mountinfo

    path = os.path.realpath(directory)
    targets = (mount.target for mount in mountinfo.read())
    return next((target for target in targets if target == path or target.startswith(path + "/")), "")


def delete(path: str) -> None:
    """Delete a tree regardless of its modes, without leaving its file system. Raises PenrootError."""
    from enroot_py.base import trees

    try:
        trees.remove(path)
    except OSError as e:
        raise _cannot_delete(path, e) from e


def _cannot_delete(path: str, error: OSError) -> PenrootError:
    return PenrootError(f"cannot delete {path}: {error.filename or path}: {error.strerror}")


def export(name: str, output: str, settings: Settings) -> None:
    """Write a container to a squashfs image. Raises ContainerError, ImageError."""
    from enroot_py.store import mksquashfs

    source = open_container(name, settings)
    sweep(settings)
    directories = (source.directory,) if source.directory else (source.upper, *source.lowerdirs)
    mksquashfs.write(directories, output, settings, image=source.image, used=directories[0])
