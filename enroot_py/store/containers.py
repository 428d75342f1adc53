"""Containers on disk: what is under ENROOT_DATA_PATH.

A plain directory is a root file system, as enroot makes it. A directory with a record
(records.py) is a container over a stored image: ``upper`` holds its changes, the layers
stay where they are. Lookup is on the start path; the rest imports what it needs.
"""

from __future__ import annotations

import errno
import os
from _collections_abc import Callable

from enroot_py.base import pack, trusted
from enroot_py.base.errors import ContainerError, PenrootError, UsageError
from enroot_py.base.recording import Recording
from enroot_py.config.settings import Settings
from enroot_py.runtime.rootfs import Source
from enroot_py.store import layout, records

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.store.store import Image


def find(target: str, settings: Settings) -> Source:
    """The root file system that ``target`` names: a container, or a squashfs image by its path.

    Raises ContainerError with the names there are, ImageError for a damaged image.
    """
    if os.path.isfile(target):
        return find_file(target, settings)
    if "/" in target or not target or target.endswith(".sqsh") and not os.path.isdir(f"{settings.data_path}/{target}"):
        what = "not an image file" if os.path.exists(target) else "no such image"
        path = target.startswith(("/", ".", "docker:/")) or target.endswith(".sqsh")
        image = "docker://IMAGE" if path or not target else f"docker://{shown(target)}, of a registry"
        raise ContainerError(f"{what}: {shown(target)}", hint=f"give a container's name, a squashfs image or {image}")
    return open_container(target, settings, or_else=f"; an image of a registry is docker://{shown(target)}")


def shown(target: str) -> str:
    """Return what was given for an image or container, for messages: it may be a reference with a password."""
    if ":" not in target or "@" not in target:
        return target
    from enroot_py.registry.reference import without_password

    return without_password(target)


def find_file(path: str, settings: Settings) -> Source:
    """The root file system in a squashfs image. Raises ImageError where it is none, or damaged."""
    pack.load(pack.IMAGE)
    from enroot_py.store.squashfs import check

    check(path)
    real = admit_file(path, settings)
    if settings.unpack:
        from enroot_py.store import unpacked

        return of_image(path, unpacked.image(real, settings))
    return Source(path, image=real)


def admit_file(path: str, settings: Settings) -> str:
    """The real path of a squashfs file. Raises PolicyError where a policy does not let it in."""
    real = os.path.realpath(path)
    if settings.policies:
        from enroot_py.store import policies

        policies.admission(settings).check_file(real, settings)
    return real


def admit_imported(uri: str, settings: Settings) -> None:
    """Raises PolicyError where a policy rejects an image that the site's own importer is about to bring."""
    if settings.policies:
        from enroot_py.registry import reference
        from enroot_py.store import policies

        policies.admission(settings).check_name(reference.parse(uri), settings, None, by_importer=True)


def of_image(name: str, image: Image) -> Source:
    """The root file system of an image in the store."""
    return Source(name, lowerdirs=image.lowerdirs, image=image.file)


def open_container(name: str, settings: Settings, or_else: str = "") -> Source:
    """The container ``name``; ``or_else`` says what the name might be instead.

    Raises ContainerError where there is none or its image is gone.
    """
    path = f"{settings.data_path}/{check_name(name)}"
    check_place(settings.data_path, name)
    try:
        record = records.of(path)
    except OSError as e:
        raise ContainerError(f"cannot open the container {path}: {e.strerror}", hint=_way_out(e, path)) from e
    if record is None:
        if os.path.lexists(f"{path}/{records.MARK}"):
            raise _not_ours(path) if records.text(f"{path}/{records.MARK}") else _damaged(path)
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
        f"the record of the container {name} is damaged: {path}/{records.MARK}",
        hint=f"its changes are in {path}/upper; penroot remove {name} deletes it",
    )


def _not_ours(path: str) -> ContainerError:
    word = records.word_file(os.path.dirname(path))
    return ContainerError(
        f"the container {os.path.basename(path)} has a file {path}/{records.MARK} that was not made with it",
        hint="delete it if it came with the image or a program; if you made the container with an older penroot: "
        f"echo word $(cat {word}) >> {path}/{records.MARK}",
    )


def _lowerdirs(image: str, name: str) -> tuple[str, ...]:
    """Layer trees of a stored image, from top to bottom."""
    from enroot_py.store.crash import is_usable

    store = layout.root_of(image)
    try:
        trusted.place(store)
    except PermissionError as e:
        raise ContainerError(
            f"the store of {name}, {store}, {e.strerror}: it is not trusted", hint="import the image again"
        ) from e
    except OSError:
        pass  # the image is gone then
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
    """Raises ContainerError where others can change what is under the data path, or in the container ``name``."""
    path = f"{data_path}/{name}" if name else data_path
    try:
        try:
            trusted.place(path)
        except PermissionError as e:
            # The root of an image may be open to everybody. That does no harm where nobody can reach it.
            if not name or e.filename != path or trusted.place(data_path).st_mode & 0o011:
                raise
            trusted.place(path, closed_to=0)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as e:
        raise _untrusted(path, e) from e


def _untrusted(path: str, error: OSError) -> ContainerError:
    if error.errno != errno.EPERM:
        return ContainerError(f"cannot open {path}: {error.strerror}", hint=_way_out(error, path + "/"))
    own = "set ENROOT_DATA_PATH to a directory of your own"
    if (error.strerror or "").startswith("can be written"):
        own = f"if nobody has: chmod go-w {path}; else {own}"
    return ContainerError(f"{path} {error.strerror}: its content is not trusted", hint=own)


def check_name(name: str) -> str:
    if not name or "/" in name or name in (".", "..") or len(os.fsencode(name)) > 255 or "\0" in name:
        raise UsageError(f"not a container name: {shown(name)!r}", hint="a name is a file name without '/'")
    if name.startswith("."):  # of what is being made: names() shows none
        raise UsageError(f"not a container name: {shown(name)!r}", hint="a name does not begin with a dot")
    return name


def create(name: str, image: str, settings: Settings, uri: str = "", *, force: bool = False) -> Source:
    """Make the container ``name`` over the stored image in directory ``image``: at once, nothing is copied.

    With ``force`` it takes the place of the one that has the name, when it is complete.
    Raises ContainerError where it exists, or where the data path cannot hold it.
    """
    from enroot_py.store.store import Store

    store = Store(layout.root_of(image))
    with Recording("create", settings, container=name, image=uri, digest=layout.digest_of(image)):
        return _make(name, f"image {image}\nuri {uri}\n", settings, store.note_container, force=force)


def temporary(name: str, source: Source, settings: Settings) -> Source:
    """Make the container ``name`` over the squashfs image of ``source``, or its shared copy. Raises ContainerError."""
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
    """Make a container that keeps its changes apart from what ``origin`` names; ``announce`` gets its path first.

    Over a stored image it gets copies of the image's scripts.
    """
    path = f"{settings.data_path}/{check_name(name)}"
    with _New(name, settings, force=force) as made:
        if announce:
            announce(f"{path}/{records.MARK}")
        os.mkdir(made + "/upper", 0o755)
        os.mkdir(made + "/work")
        kind, _, image = origin.partition("\n")[0].partition(" ")
        if kind == "image":
            from enroot_py.store import scripts

            scripts.copy(image, made)
        records.write(made, settings.data_path, origin)
    return open_container(name, settings)


def unpack(name: str, image: str, settings: Settings, *, force: bool = False) -> Source:
    """Make the container ``name`` as a plain directory from a squashfs image. Raises ContainerError, ImageError."""
    from enroot_py.store import squashfs, unsquashfs

    squashfs.check(image)
    real = admit_file(image, settings)
    recorded = Recording("create", settings, container=name, image=image)
    with recorded, _New(name, settings, force=force) as temporary:
        unsquashfs.unpack(real, temporary, settings)
        if os.path.lexists(f"{temporary}/{records.MARK}"):
            message = f"the image {image} holds a file /{records.MARK}, by which penroot knows its containers"
            raise ContainerError(message, hint=f"penroot start {image} needs no container")
    return open_container(name, settings)


def refuse_taken(name: str, settings: Settings, *, force: bool) -> None:
    """Raises ContainerError if the name is taken: with ``force`` only by a container that is running."""
    if not os.path.lexists(f"{settings.data_path}/{check_name(name)}"):
        return
    if force:
        refuse_running(name, settings)
    else:
        hint = f"use --force, another --name, or: penroot remove {name}"
        raise ContainerError(f"container already exists: {name}", hint=hint)


class _New:
    """A container in the making, in a ``with``: it gets its name when it is complete, else nothing is left of it."""

    def __init__(self, name: str, settings: Settings, *, force: bool) -> None:
        self._name, self._settings, self._force = name, settings, force
        self._path = f"{settings.data_path}/{check_name(name)}"

    def __enter__(self) -> str:
        refuse_taken(self._name, self._settings, force=self._force)
        from enroot_py.base import making

        place = self._settings.data_path
        try:
            trusted.place(place, make=True)
            making.sweep(place)
            self._directory = making.Directory(self._path, 0o755)
            return self._directory.__enter__().path
        except OSError as e:
            if e.errno == errno.EPERM and e.filename == place:
                raise _untrusted(place, e) from e
            hint = _way_out(e, self._path)
            raise ContainerError(f"cannot create a container in {place}: {e.strerror}", hint=hint) from e

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                self._publish()
        except OSError as e:
            error = e
        finally:
            self._end()
        if isinstance(error, OSError):
            taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            hint = "another process has just created it" if taken else _way_out(error, self._path)
            raise ContainerError(f"cannot create {self._path}: {error.strerror}", hint=hint) from error

    def _end(self) -> None:
        try:
            self._directory.__exit__()
        except OSError as e:
            raise _cannot_delete(self._directory.path, e) from e

    def _publish(self) -> None:
        """Give the directory its name. What had the name is deleted afterwards."""
        if self._force:
            refuse_taken(self._name, self._settings, force=True)
        old = set_aside(self._name, self._settings.data_path, self._directory.replace) if self._force else None
        if old:
            old.delete()
        else:
            self._directory.publish()


def _way_out(error: OSError, path: str) -> str:
    from enroot_py.base import filesystems

    return filesystems.way_out(error, os.path.dirname(path), "ENROOT_DATA_PATH")


def names(settings: Settings) -> list[str]:
    """Names of the containers there are, sorted."""
    check_place(settings.data_path)
    try:
        entries = os.listdir(settings.data_path)
    except FileNotFoundError:
        return []
    except OSError as e:
        path = settings.data_path
        raise ContainerError(f"cannot read {path}: {e.strerror}", hint=_way_out(e, path + "/")) from e
    return sorted(
        name for name in entries if not name.startswith(".") and os.path.isdir(f"{settings.data_path}/{name}")
    )


def refuse_running(name: str, settings: Settings) -> None:
    """Raises ContainerError for a container in which processes run: they would lose its files."""
    from enroot_py.runtime import processes
    from enroot_py.store import claims

    node = os.uname().nodename
    for process in processes.running(settings):
        if process.name == name:
            what = f"process {process.pid} ({process.comm}) runs in the container {name}"
            # Process 1 of a PID namespace ignores SIGTERM.
            hint = f"end it first: kill {process.pid}, or kill -KILL {process.pid}, or scancel its job"
            raise ContainerError(what, hint=hint)
    if (holder := claims.holder(name, settings.data_path)) not in ("", node):
        raise ContainerError(f"a step on node {holder} uses the container {name}", hint=f"squeue --nodelist={holder}")


def remove(name: str, settings: Settings) -> None:
    """Delete a container; it is gone from the list before its files are. Raises ContainerError."""
    refuse_running(name, settings)
    sweep(settings)
    if not remove_if_there(name, settings):
        raise ContainerError(f"no such container: {shown(name)}", hint="penroot list shows your containers")


def sweep(settings: Settings) -> None:
    """Delete what was killed while it made or deleted a container."""
    from enroot_py.base import making

    making.sweep(settings.data_path)


def remove_if_there(name: str, settings: Settings) -> bool:
    """Delete a container; False where there is none of that name. Raises ContainerError."""
    from enroot_py.store import claims

    trash = set_aside(name, settings.data_path)
    claims.forget(name, settings.data_path, made=trash is not None)
    if trash is None:
        return False
    trash.delete()
    return True


class Trash:
    """A container that has lost its name. The lock keeps sweeps of other processes from it."""

    def __init__(self, path: str, replace: Callable[[], str] | None) -> None:
        """``replace`` gives the name to another one, and says which one this has then. Raises OSError."""
        from enroot_py.base import making

        self._lock = making.hold(path)
        try:
            if replace:
                self.path = replace()
            else:
                self.path = making.hidden(path, making.TRASH)
                os.rename(path, self.path)
        except OSError:
            self._let_go()
            raise

    def delete(self) -> None:
        try:
            delete(self.path)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)


def set_aside(name: str, data_path: str, replace: Callable[[], str] | None = None) -> Trash | None:
    """Rename a container to be deleted; None where there is none. ``replace``: see Trash. Raises ContainerError."""
    path = f"{data_path}/{check_name(name)}"
    check_place(data_path)
    if not os.path.lexists(path):
        return None  # rename(2) would report a read-only file system first
    place = _mounted_beneath(path)
    if place:
        raise ContainerError(f"cannot remove {name}: {place} is mounted in it", hint=f"umount {place}")
    try:
        return Trash(path, replace)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise ContainerError(f"cannot remove {name}: {e.strerror}", hint=_way_out(e, path)) from e


def _mounted_beneath(directory: str) -> str:
    """A mount point in a directory, in this mount namespace: what is there is none of the directory's."""
    from enroot_py.base import mountinfo

    path = os.path.realpath(directory)
    places = (mount.target for mount in mountinfo.read())
    return next((place for place in places if place == path or place.startswith(path + "/")), "")


def delete(path: str) -> None:
    """Delete a tree, whatever its modes, without leaving its file system. Raises PenrootError."""
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
