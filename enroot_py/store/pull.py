"""What can be done with images: pull them into the store, import them to a file."""

from __future__ import annotations

import gc
import os
import stat
import time

from enroot_py.base import log
from enroot_py.base.errors import ImageError, PenrootError, RegistryError, Unreachable
from enroot_py.registry.platforms import architecture
from enroot_py.registry.reference import ENGINES, LocalImage, Reference, parse
from enroot_py.store import layout
from enroot_py.store.store import Image, Name, Store, cannot_write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeVar

    from enroot_py.config.settings import Settings
    from enroot_py.registry.manifests import Descriptor, Manifest
    from enroot_py.registry.sources import Blob, ImageSource
    from enroot_py.store.index import Index
    from enroot_py.store.store import Build

    AnyImage = Reference | LocalImage
    _T = TypeVar("_T")

__all__ = ["Image", "import_", "pull"]

_DEFAULT_COMMAND = ("/bin/sh",)
_MAX_CONFIG = 8 << 20  # bytes
_CONFIG_TYPES = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json", "")


def pull(reference: AnyImage | str, settings: Settings, *, arch: str | None = None, agreed: str = "") -> Image:
    """The image of a reference, in the store when this returns.

    A digest that is stored costs no request, a tag whose image is stored one. Where
    the registry does not answer and an image is stored for the name, it is used,
    with a warning. ``agreed`` is the digest that a tag has for all nodes of a step, whatever
    it means by now. The image is held: see Image.hold. Raises RegistryError, ImageError.
    """
    if isinstance(reference, str):
        reference = parse(reference)
    store = Store(settings.cache_path, create=True)
    while True:
        image = _find_or_fetch(store, reference, settings, arch, agreed)
        if image.hold():  # else it was pruned this very moment
            return image


def _find_or_fetch(store: Store, reference: AnyImage, settings: Settings, arch: str | None, agreed: str) -> Image:
    wanted = _pinned(reference, agreed)
    known = was = store.known(reference, arch)
    if known is not None and wanted != reference and known.given != wanted.digest:
        known = None  # it meant another image then
    digest = known.digest if known else wanted.digest  # that of a manifest, perhaps pulled by its tag
    stored = store.image(digest) if digest else None
    if stored is not None and wanted.digest:
        return stored
    try:
        if stored is not None and known is not None and _is_current(reference, known, settings):
            return stored

        from enroot_py.registry.sources import open_source

        source = open_source(wanted, settings if stored is None else _hurried(settings))
        manifest = source.manifest(arch)
    except RegistryError as e:
        if wanted != reference:
            raise _disagreement(e, reference, wanted.digest, was, settings) from e
        if stored is None or not isinstance(e, Unreachable):
            raise
        log.warn(f"{e}; using the stored image {stored.digest} of {reference}")
        if e.hint:
            log.hint(e.hint)
        return stored
    base = source.base
    if stored is not None and not isinstance(reference, LocalImage):
        source = open_source(wanted, settings)  # to fetch it takes its time
    image = store.image(manifest.digest) or _fetch(store, source, reference, manifest, settings)
    if manifest.named == manifest.digest:  # no index said what it is for
        _check_platform(image, reference, arch)
    store.name(reference, arch, Name(manifest.digest, manifest.named, base or source.base))
    return image


def _check_platform(image: Image, reference: AnyImage, arch: str | None) -> None:
    """Whether an image is for the architecture asked for, or for this machine.

    Raises ImageError in the first case, or for another system; warns in the second: an emulator may be at hand.
    """
    with open(f"{image.path}/{layout.CONFIG}", "rb") as f:
        config = _config(f.read(), f"{reference} in the store")
    system, said = config.get("os"), config.get("architecture")
    if system and system != "linux":
        raise ImageError(f"{reference} is for {system}, this is Linux")
    wanted = architecture((arch or "").partition("/")[0] or None)
    if not said or said == wanted:
        return
    if arch:
        raise ImageError(
            f"{reference} is for {said}, and for nothing else", hint="leave out --arch, or name another image"
        )
    log.warn(f"{reference} is for {said}, this machine is {wanted}")


def _is_current(reference: AnyImage, known: Name, settings: Settings) -> bool:
    """Whether the registry or engine of a stored image says that its name still means the same. Raises PenrootError."""
    if not known.given:
        return False
    if isinstance(reference, LocalImage):
        from enroot_py.registry.sources import open_source

        return reference.scheme in ENGINES and open_source(reference, settings).digest() == known.given
    from enroot_py.registry import tags

    return tags.now(reference, known.base, settings) == known.given


def _hurried(settings: Settings) -> Settings:
    """For a registry that need not be waited for, as there is an image to go on with."""
    return settings.replace("a stored image", connect_timeout=2, stall_timeout=5, transfer_retries=0)


def _pinned(reference: AnyImage, agreed: str) -> AnyImage:
    """The image that a tag was when somebody resolved it to the digest ``agreed``."""
    if not agreed or reference.digest or isinstance(reference, LocalImage):
        return reference
    return Reference(reference.registry, reference.repository, digest=agreed, user=reference.user)


def _disagreement(
    error: RegistryError, reference: AnyImage, agreed: str, known: Name | None, settings: Settings
) -> PenrootError:
    """Why the image that others of a step have agreed on cannot be had here, where the tag is another one now."""
    from enroot_py.registry.sources import open_source

    here = known.given if known else ""
    if not isinstance(error, Unreachable):
        try:
            here = open_source(reference, settings).digest()
        except (RegistryError, ImageError) as e:
            log.debug(str(e))
    if not here or here == agreed:
        return error
    node = os.uname().nodename
    return ImageError(
        f"{reference} is {here} on {node}, but the step resolved it to {agreed}: {error}",
        hint="the tag has moved, and what it was is gone: start the step again",
    )


def _fetch(store: Store, source: ImageSource, reference: AnyImage, manifest: Manifest, settings: Settings) -> Image:
    """Bring an image and the layers that it lacks into the store; it is held when this returns."""
    from enroot_py.store import onefile, prune

    gc.enable()  # a start that pulls has none
    store.sweep()
    with store.lock():  # so that no layer goes before the image that it is for is there
        with store.build(layout.IMAGES, manifest.digest) as build:
            image = store.image(manifest.digest)
            if image is not None and image.hold():  # another import made it while we waited
                return image
            if onefile.of_store(settings) == "squashfs" and not build.done:

                def pull_trees(inner: Settings) -> Image:
                    return _fetch(Store(inner.cache_path, create=True), source, reference, manifest, inner)

                onefile.squash(build.path, str(reference), pull_trees, settings)
                build.publish()
                settle = True  # other nodes would take our mark for one of a crash
            else:
                _assemble(store, build, source, reference, manifest, settings)
                settle = os.geteuid() == 0  # see crash.py
        if settle:
            store.settle(manifest.digest)
        image = store.image(manifest.digest)
        if image is None or not image.hold():
            raise ImageError(
                f"{reference}: a layer vanished from the store {store.root}, or the image is damaged there",
                hint="try again; penroot cache verify --repair finds what is damaged",
            )
    prune.shrink(store, settings)
    return image


def _assemble(
    store: Store,
    build: Build,
    source: ImageSource,
    reference: AnyImage,
    manifest: Manifest,
    settings: Settings,
) -> None:
    """Fetch the layers that are missing, and make ``images/DIGEST`` of them."""
    began = time.monotonic()
    config = _config_data(source, reference, manifest, settings)
    document = _config(config, reference)
    diff_ids = _diff_ids(document, manifest, reference)
    fetched = _layers(store, source, reference, manifest, diff_ids, settings)
    names, indexes = _stack(store, reference, diff_ids)
    if not build.done:  # else only a layer of it had gone
        _compose(store, build.path, reference, manifest, config, document, names, indexes)
        build.publish()
    seconds = time.monotonic() - began
    log.info(f"{reference}: {log.many(len(diff_ids), 'layer')}, {log.size(fetched)} fetched, in {seconds:.1f} s")


def _layers(
    store: Store,
    source: ImageSource,
    reference: AnyImage,
    manifest: Manifest,
    diff_ids: Sequence[str],
    settings: Settings,
) -> int:
    """Fetch and unpack what is not stored, one process a layer, the largest first. Returns bytes fetched."""
    from enroot_py.base import workers
    from enroot_py.base.progress import Progress
    from enroot_py.store.squashfs import processors

    missing = {d: blob for d, blob in zip(diff_ids, manifest.layers, strict=True) if store.layer_path(d) is None}
    if not missing:
        return 0
    total = sum(blob.size for blob in missing.values())
    log.info(f"{reference}: fetching {len(missing)} of {log.many(len(diff_ids), 'layer')}, {log.size(total)}")
    order = sorted(missing.items(), key=lambda item: item[1].size, reverse=True)
    progress = Progress(str(reference), len(order), total)
    tasks = [
        _task(store, source, reference, diff_id, blob, settings, progress.part(number))
        for number, (diff_id, blob) in enumerate(order)
    ]

    def tick(ended: int) -> None:
        progress.done = ended
        progress.tick()

    try:
        workers.run(tasks, min(processors(settings), settings.max_connections or len(tasks)), tick)
    except BaseException:
        store.sweep()  # after workers that had to be killed
        raise
    finally:
        progress.end()
    return total


def _read(
    source: ImageSource, reference: AnyImage, blob: Descriptor, settings: Settings, use: Callable[[Blob], _T]
) -> _T:
    """What ``use`` makes of a blob, from its source or from what nodes share: see SharedBlobs.read."""
    if not settings.shared_blobs or isinstance(reference, LocalImage):
        with source.blob(blob) as stream:
            return use(stream)
    from enroot_py.registry.shared import SharedBlobs

    return SharedBlobs(settings.shared_blobs, settings.shared_blobs_for).read(source, blob, use)


def _config_data(source: ImageSource, reference: AnyImage, manifest: Manifest, settings: Settings) -> bytes:
    """The image config, from its source or from what nodes share."""
    from enroot_py.base import digests

    if not settings.shared_blobs or isinstance(reference, LocalImage):
        return source.config(manifest)
    if manifest.config.size > _MAX_CONFIG:
        raise ImageError(f"{reference}: a config of {manifest.config.size} bytes")

    def read(stream: Blob) -> bytes:
        data = b"".join(iter(lambda: stream.read(_MAX_CONFIG), b""))
        if digests.of(data) != manifest.config.digest:
            raise ImageError(f"{reference}: the config {manifest.config.digest} has the digest {digests.of(data)}")
        return data

    return _read(source, reference, manifest.config, settings, read)


def _task(
    store: Store,
    source: ImageSource,
    reference: AnyImage,
    diff_id: str,
    blob: Descriptor,
    settings: Settings,
    count: Callable[[int], None],
) -> Callable[[], None]:
    from enroot_py.store import unpack

    def take(stream: Blob, path: str) -> None:
        try:
            layer = unpack.layer(stream, path, progress=count)
        except ImageError as e:
            raise ImageError(f"{reference}: layer {blob.digest}: {e}", hint=e.hint) from e
        # Both, or one image could plant another's layer. An archive of docker names layers by
        # their diff-id, compressed or not.
        if blob.digest not in (layer.blob_digest, diff_id):
            raise ImageError(
                f"{reference}: the layer {blob.digest} came with the digest {layer.blob_digest}",
                hint="damaged on its way, or in the registry: nothing of it was kept, try again",
            )
        if layer.diff_id != diff_id:
            raise ImageError(
                f"{reference}: the layer {blob.digest} unpacks to {layer.diff_id}, the image config says {diff_id}",
                hint="the image is wrong or hostile: nothing of it was kept",
            )

    def fetch() -> None:
        with store.build(layout.LAYERS, diff_id) as build:
            if build.done:  # by another import, while we waited for it
                return

            def use(stream: Blob) -> None:
                build.clear()  # of a blob that was damaged
                take(stream, build.path)

            _read(source, reference, blob, settings, use)
            build.publish()

    return fetch


# -- image config


def _config(data: bytes, reference: AnyImage | str) -> dict[str, Any]:
    import json

    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ImageError(f"{reference}: the image config is not JSON: {e}") from e
    if not isinstance(document, dict) or not isinstance(document.get("config") or {}, dict):
        raise ImageError(f"{reference}: the image config is not one")
    return document


def _diff_ids(document: dict[str, Any], manifest: Manifest, reference: AnyImage) -> list[str]:
    rootfs = document.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    diff_ids = diff_ids if isinstance(diff_ids, list) else []
    if len(diff_ids) != len(manifest.layers):
        kind = manifest.config.media_type
        raise ImageError(
            f"{reference}: the manifest has {log.many(len(manifest.layers), 'layer')}, "
            f"the image config {log.many(len(diff_ids), 'diff_id')}",
            hint="" if kind in _CONFIG_TYPES else f"its config is of type {kind!r}: this may be no container image",
        )
    if not all(isinstance(diff_id, str) for diff_id in diff_ids):
        raise ImageError(f"{reference}: the diff_ids of the image config are no digests")
    return diff_ids


def _words(value: object, what: str) -> tuple[str, ...]:
    """A list of strings of an image config; None is an empty one, a string one word. Raises ImageError, ValueError."""
    words = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ImageError(f"{what} in the image config is not a list of strings")
    for word in words:
        _refuse_nul(word)
    return tuple(words)


def _refuse_nul(text: str) -> None:
    if "\0" in text:
        raise ValueError(f"{text!r} holds a NUL")


def _stack(store: Store, reference: AnyImage, diff_ids: Sequence[str]) -> tuple[Sequence[str], Sequence[Index]]:
    """The layers that show an image, top first, and what their indexes say."""
    from enroot_py.store import index, merge

    names: list[str] = []  # top first
    indexes: list[Index] = []
    for diff_id in reversed(diff_ids):
        directory = store.layer_path(diff_id)
        if directory is None:
            raise ImageError(f"{reference}: the layer {diff_id} vanished from the store", hint="try again")
        if diff_id not in names:  # a layer that is listed twice: what it says again below, it says above
            names.append(diff_id)
            indexes.append(index.read(directory))
        if indexes[-1].opaque:
            break
    if len(names) > merge.MAX_LAYERS:
        lowest = slice(merge.MAX_LAYERS - 1, None)
        log.info(f"{reference}: {len(names)} layers: making one of the lowest {len(names[lowest])}")
        names[lowest] = [_merged(store, names[lowest], indexes[lowest])]
        indexes[lowest] = [index.Index()]
    return names, indexes


def _compose(
    store: Store,
    path: str,
    reference: AnyImage,
    manifest: Manifest,
    config: bytes,
    document: dict[str, Any],
    names: Sequence[str],
    indexes: Sequence[Index],
) -> None:
    """Write everything of ``images/DIGEST`` into ``path``."""
    from enroot_py.runtime import etc, mounts
    from enroot_py.store import unpack

    lowerdirs = [f"{layout.layer(store.root, name)}/{layout.TREE}" for name in names]
    said = document.get("config") or {}
    labels = said.get("Labels") or {}
    volumes = said.get("Volumes") or {}
    if not isinstance(labels, dict) or not isinstance(volumes, dict):
        raise ImageError(f"{reference}: the Labels or Volumes of the image config are not objects")
    try:
        entrypoint, command = _words(said.get("Entrypoint"), "Entrypoint"), _words(said.get("Cmd"), "Cmd")
        workdir = "/" + str(said.get("WorkingDir") or "").strip("/")
        _refuse_nul(workdir)
        if ".." in workdir.split("/"):
            workdir = os.path.normpath(workdir)
        if workdir.count("/") > unpack.MAX_DEPTH:
            raise ImageError(f"{reference}: a WorkingDir of more than {unpack.MAX_DEPTH} directories")
        run = etc.Exec(workdir, entrypoint, command or (() if entrypoint else _DEFAULT_COMMAND))
        variables = etc.variables(_words(said.get("Env"), "Env"))
        rc = etc.write_rc(reference.uri(), {str(k): str(v) for k, v in labels.items()}, run).encode()
        files = {
            "rc": rc,
            "rc.local": etc.RC_LOCAL.encode(),
            "fstab": mounts.write_image(volumes).encode(),
            "environment": etc.write_environment(variables).encode("utf-8", "surrogateescape"),
        }
    except (ValueError, UnicodeEncodeError) as e:
        raise ImageError(f"{reference}: the image config holds what is no text: {e}") from e

    try:
        _head(f"{path}/{layout.HEAD}", lowerdirs, indexes, workdir, files, _created(document))
        stack = layout.stack(manifest.digest, names)
        records = {layout.MANIFEST: manifest.data, layout.CONFIG: config, layout.STACK: stack}
        for name, data in records.items():
            with open(f"{path}/{name}", "wb") as f:
                f.write(data)
    except OSError as e:
        raise cannot_write(f"store {reference}", store.root, e) from e


def _merged(store: Store, diff_ids: Sequence[str], indexes: Sequence[Index]) -> str:
    """One layer in the store that shows what several do, top first; returns its name."""
    from enroot_py.store import index, merge

    name = merge.chain_id(diff_ids[::-1])
    with store.build(layout.LAYERS, name) as build:
        if not build.done:
            directories = [layout.layer(store.root, diff_id) for diff_id in diff_ids]
            size = sum(map(index.size, directories))
            lowerdirs = [f"{path}/{layout.TREE}" for path in directories]
            try:
                merge.merge(lowerdirs, indexes, build.path, name, size)
            except OSError as e:
                raise cannot_write("merge layers", store.root, e) from e
            build.publish()
    return name


def _created(document: dict[str, Any]) -> float:
    """When the image was made, in seconds: the time of what we add to it, so that it is the same every time."""
    import datetime

    text = str(document.get("created") or "")
    date, _, rest = text.partition("T")
    try:
        made = datetime.datetime.fromisoformat(f"{date}T{rest[:8]}+00:00")
    except ValueError:
        return 0.0
    return max(0.0, made.timestamp())


def _head(
    path: str,
    lowerdirs: Sequence[str],
    indexes: Sequence[Index],
    workdir: str,
    files: dict[str, bytes],
    created: float,
) -> None:
    """Make the topmost tree: enroot's files in /etc, and the working directory if the image lacks it.

    A directory of the head hides mode and time of the layers', so it gets theirs. That
    also repairs directories that a layer implies but does not have, as /tmp in a layer
    of nothing but tmp/x: the layers below know what they are like.
    """
    from enroot_py.store import index, merge
    from enroot_py.store.overlayfs import look, real_path

    root = f"{path}/{layout.TREE}"
    os.makedirs(root, 0o755)
    made = {root: (0o755, created)}
    modes: dict[str, int] = {}

    def directories(inside: str) -> str:
        parts = [part for part in inside.split("/") if part]
        for depth in range(1, len(parts) + 1):
            name = "/".join(parts[:depth])
            here = f"{root}/{name}"
            if here in made:
                continue
            os.mkdir(here)
            made[here] = 0o755, created
            shown = look(lowerdirs, name)
            for number, holder in shown.layers if shown is not None and stat.S_ISDIR(shown.status.st_mode) else ():
                found = os.stat(holder)
                made[here] = stat.S_IMODE(found.st_mode), found.st_mtime
                merge.copy_attributes(holder, here)
                if name not in indexes[number].implicit:
                    if name in indexes[number].modes:
                        modes[name] = indexes[number].modes[name]
                    break
        return "/".join((root, *parts))

    real = real_path(lowerdirs, workdir)
    if real is not None and look(lowerdirs, real) is None:
        directories(real)
    etc = directories(real_path(lowerdirs, "/etc") or "/etc")
    for its, lower in zip(indexes, lowerdirs, strict=True):
        for name in its.implicit:
            shown = look(lowerdirs, name)
            if shown is not None and len(shown.layers) > 1 and shown.layers[0][1] == f"{lower}/{name}":
                directories(name)
    for lower in lowerdirs:
        # Only a directory that it merges with another is shown by overlayfs without the whiteouts in it.
        for name in filter(None, index.whiteouts(os.path.dirname(lower))):
            shown = look(lowerdirs, name)
            if shown is not None and [holder for _, holder in shown.layers] == [f"{lower}/{name}"]:
                directories(name)
    for name, data in files.items():
        with open(f"{etc}/{name}", "xb") as f:
            f.write(data)
        os.chmod(f"{etc}/{name}", 0o644)
        os.utime(f"{etc}/{name}", (created, created))
    for here, (mode, mtime) in sorted(made.items(), reverse=True):
        os.chmod(here, mode)
        os.utime(here, (mtime, mtime))
    index.write(path, index.mode_lines(modes))


# -- the verbs


def import_(uri: str, output: str | None, settings: Settings, arch: str | None = None) -> None:
    """Pull an image and write it to a squashfs file. Raises PenrootError."""
    from enroot_py.store import squashfs

    reference = parse(uri, os.getcwd())
    path = output or reference.filename()
    squashfs.check_writing(path, settings)  # before minutes of work, not after
    image = pull(reference, settings, arch=arch)
    size = squashfs.write(image.lowerdirs, path, settings, image=image.file)
    shown = "stdout" if path == squashfs.STDOUT else os.path.abspath(path)
    log.info(f"{shown}: {log.size(size)}, {image.digest}")


def digest(uri: str, settings: Settings, arch: str | None = None) -> str:
    """The digest of an image's manifest for an architecture, as its registry has it now. Raises PenrootError."""
    from enroot_py.registry.reference import is_uri
    from enroot_py.registry.sources import open_source

    if uri.endswith((".sqsh", ".squashfs")) and not is_uri(uri):
        raise ImageError(f"{uri} is a file, and no registry has its digest", hint=f"penroot inspect {uri}")
    return open_source(parse(uri), settings).manifest(arch).digest


def inspect(image: str, settings: Settings, arch: str | None = None) -> dict[str, Any]:
    """What is known of an image that a URI, a container or a squashfs file names. Raises PenrootError.

    Of a URI without unpacking it; of the others what their files in /etc say.
    """
    from enroot_py.registry import reference
    from enroot_py.registry.sources import open_source
    from enroot_py.runtime import etc
    from enroot_py.store import containers, squashfs

    if reference.is_uri(image):
        parsed = parse(image)
        source = open_source(parsed, settings)
        manifest = source.manifest(arch)
        config = source.config(manifest)
        _diff_ids(_config(config, parsed), manifest, parsed)
        return _described(str(parsed), manifest.data, config, manifest.named)
    found = containers.find(image, settings)
    if found.lowerdirs:
        stored = layout.image_over(found.lowerdirs)
        try:
            with open(f"{stored}/{layout.MANIFEST}", "rb") as f, open(f"{stored}/{layout.CONFIG}", "rb") as g:
                return _described(image, f.read(), g.read())
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
            raise ImageError(
                f"the stored image of {image} is damaged: {stored}", hint="penroot cache verify --repair"
            ) from e
    if found.image:
        texts = {name: squashfs.read(found.image, "etc/" + name) for name in ("rc", "rc.local", "environment")}
    else:
        texts = {name: _text(found.directory, f"/etc/{name}") for name in ("rc", "rc.local", "environment")}
    run = etc.read_rc(texts["rc"], texts["rc.local"])
    return {
        "name": image,
        "provenance": etc.provenance(texts["rc"]),
        "config": {
            "Env": [f"{key}={value}" for key, value in _environment(texts["environment"]).items()],
            "Entrypoint": list(run.entrypoint) if run else None,
            "Cmd": list(run.command) if run else None,
            "WorkingDir": run.workdir if run else None,
        },
    }


def _environment(text: str) -> dict[str, str]:
    from enroot_py.runtime.etc import read_environment

    return read_environment(text)


def _text(directory: str, path: str) -> str:
    """A file in a container's directory, whose links lead nowhere else; "" where it has none. Raises ImageError."""
    from enroot_py.base import paths

    root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return os.fsdecode(paths.read(root, path))
    except FileNotFoundError:
        return ""
    except OSError as e:
        raise ImageError(f"cannot read {path} of the container in {directory}: {e.strerror}") from e
    finally:
        os.close(root)


def _described(name: str, manifest: bytes, config: bytes, named: str = "") -> dict[str, Any]:
    import json

    from enroot_py.base import digests

    document, said = json.loads(manifest), json.loads(config)
    digest = digests.of(manifest)
    layers = [
        {"digest": layer["digest"], "size": layer["size"], "diff_id": diff_id, "mediaType": layer.get("mediaType")}
        for layer, diff_id in zip(document["layers"], said["rootfs"]["diff_ids"], strict=True)
    ]
    return {
        "name": name,
        "digest": digest,
        **({"index": named} if named not in ("", digest) else {}),
        "platform": "/".join(str(said[key]) for key in ("os", "architecture", "variant") if said.get(key)),
        "created": said.get("created"),
        "size": sum(layer["size"] for layer in document["layers"]),
        "layers": layers,
        "config": said.get("config") or {},
    }
