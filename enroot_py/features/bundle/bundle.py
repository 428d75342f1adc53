"""``penroot bundle``: pack an image and everything needed to run it into one executable file.

The file consists of a shell script, a tar.gz with Python and its modules (carry.py), and the unchanged squashfs image.
The script, header.sh, unpacks the tar.gz and runs bundled.py. The host needs sh, mkdir, tar and gzip, and sha256sum if
the bundle has a checksum. If the bundle or the host has squashfuse, and the host has /dev/fuse, the image is mounted
from the file. Otherwise the image is unpacked.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import marshal
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from enroot_py import LIBRARY, __version__
from enroot_py.base import carried, filesystems, log, making, run
from enroot_py.base.errors import ImageError
from enroot_py.config import files
from enroot_py.config.settings import Settings, sysconf_path
from enroot_py.config.table import Setting, all_settings
from enroot_py.features.bundle import carry
from enroot_py.store import containers, mksquashfs, squashfs, unsquashfs

COMPRESSIONS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}  # squashfs_fs.h
_PORTABLE = ("gzip", "lz4", "zstd")  # common builds of squashfuse and unsquashfs support these
_CONVERTED = "zstd"
_ALIGNMENT_BYTES = 4096  # alignment of the image, so that a loop device can serve the image too
_BLOCK_BYTES = 1 << 20
_DIRECTORIES = ("environ.d", "mounts.d", "hooks.d")
_LISTED = re.compile(r"-\S+ \d+/\d+ +(\d+) ")  # a regular file's line in `unsquashfs -lln`: mode, owner, size


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle to write. With SOURCE_DATE_EPOCH set, equal input gives equal bytes."""

    image: str
    settings: Settings
    output: str | None = None  # default: the image's name with .run
    everything: bool = False  # include the user's configuration, and changed settings except paths
    checksum: bool = False
    description: str = ""
    target: str | None = None  # directory for --keep; the bundle expands ${VAR} in it; default: the bundle's name

    @property
    def path(self) -> str:
        return os.path.abspath(
            self.output or os.path.basename(os.path.realpath(self.image)).removesuffix(".sqsh") + ".run"
        )

    def write(self) -> None:
        """Write the bundle. On failure, leave no partial file. Raises ImageError, PenrootError."""
        squashfs.check(self.image)
        containers.admit_file(self.image, self.settings)
        if self.output == mksquashfs.STDOUT:
            raise ImageError("cannot write a bundle to stdout", hint="use --output FILE")
        mksquashfs.check_output(self.path, self.settings)
        making.sweep(os.path.dirname(self.path))
        if not carried.installed("squashfuse_ll", "squashfuse"):
            log.warn("squashfuse is not installed here: hosts without squashfuse will unpack the image at every run")
        with _readable(self.image, self.settings) as source:
            runtime = self._runtime(source)
            try:
                self._publish(source, runtime)
            except FileExistsError:
                raise ImageError(f"file already exists: {self.path}", hint="overwrite it: --force") from None
            except OSError as e:
                raise mksquashfs.cannot_write(self.path, e) from e

    def _publish(self, source: str, runtime: bytes) -> None:
        """Write header, runtime and image to a temporary file, then rename it to the bundle. Raises OSError."""
        start = len(self._header())
        offset = -(-(start + len(runtime)) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        digest = hashlib.sha256()
        with making.File(self.path) as file:
            with open(file.fd, "wb", closefd=False) as out:
                out.seek(start)
                for block in _blocks(runtime.ljust(offset - start, b"\0"), source):
                    if self.checksum:
                        digest.update(block)
                    out.write(block)
                out.seek(0)
                out.write(self._header(digest.hexdigest() if self.checksum else "", offset))
            mode = os.fstat(file.fd).st_mode
            os.fchmod(file.fd, mode | (mode & 0o444) >> 2)
            file.publish(replace=self.settings.force_override)

    def _about(self, source: str) -> bytes:
        """Return the metadata that bundled.py reads."""
        included = [pair for pair in sorted(all_settings().items()) if self._includes(pair[1])]
        return marshal.dumps({
            "description": self.description,
            "version": __version__,
            "compression": _compression(source),
            "target": os.path.basename(self.path).removesuffix(".run") if self.target is None else self.target,
            "size": _unpacked_size(source, self.image),
            "start": len(self._header()),
            "settings": {variable: self.settings.text(setting) for variable, setting in included},
        })  # fmt: skip

    def _includes(self, setting: Setting) -> bool:
        """Return whether to include a setting: with --all, each setting of the user or the site that is not a path."""
        return self.everything and self.settings.origin(setting) != "default" and setting.kind != "path"

    def _runtime(self, source: str) -> bytes:
        """Return the tar.gz of Python, modules, programs and configuration. Raises PenrootError."""
        out = io.BytesIO()
        configuration = sorted(self._configuration())
        site_hooks = [path for _, path in configuration if path.endswith(".py")]
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            _add(tar, (carry.ABOUT, self._about(source), 0o644))
            for file in carry.files(site_hooks):
                _add(tar, file)
            for name, path in configuration:
                data = files.content(path) or b""
                _add(tar, (name, data, 0o755 if os.access(path, os.X_OK) else 0o644))
        return gzip.compress(out.getvalue(), 1, mtime=0)  # level 6 takes 0.5 s more and saves 0.5 MB

    def _configuration(self) -> Iterator[tuple[str, str]]:
        """Yield the name in the bundle and the path of each file of environ.d, mounts.d and hooks.d."""
        directories = {"system": sysconf_path(), **({"user": self.settings.config_path} if self.everything else {})}
        for owner, directory in directories.items():
            for kind in _DIRECTORIES:
                for name in files.names(f"{directory}/{kind}"):
                    if not name.startswith("."):
                        yield f"etc/{owner}/{kind}/{name}", f"{directory}/{kind}/{name}"

    def _header(self, checksum: str = "", offset: int = 0) -> bytes:
        """Return the shell script. Its length does not depend on the arguments."""
        with open(f"{LIBRARY}/enroot_py/features/bundle/header.sh") as f:
            text = f.read()
        text = text.replace("@SHA256@", checksum or "0" * 64 * self.checksum).replace("@OFFSET@", f"{offset:014}")
        return text.replace("@MACHINE@", os.uname().machine).encode()


def _blocks(first: bytes, image: str) -> Iterator[bytes]:
    yield first
    with open(image, "rb") as f:
        while block := f.read(_BLOCK_BYTES):
            yield block


@contextlib.contextmanager
def _readable(image: str, settings: Settings) -> Iterator[str]:
    """Yield an image with a compression in _PORTABLE: the same file, or a converted copy."""
    compression = _compression(image)
    if compression in _PORTABLE:
        yield image
        return
    log.info(f"converting {image} from {compression} to {_CONVERTED}, because not every host can read {compression}")
    making.sweep(settings.temp_path)
    with contextlib.ExitStack() as stack:
        try:
            scratch = stack.enter_context(making.Directory(settings.temp_path + "/penroot-bundle", 0o700)).path
            unpacked, converted = scratch + "/rootfs", scratch + "/image.sqsh"
            os.mkdir(unpacked)
            unsquashfs.unpack(image, unpacked, settings)
            inner = settings.replace("bundle", squash_options=f"-comp {_CONVERTED} -b 256K")
            mksquashfs.write((unpacked,), converted, inner)
        except OSError as e:
            hint = filesystems.hint_for(e, settings.temp_path, "ENROOT_TEMP_PATH")
            raise ImageError(f"cannot convert {image} in {settings.temp_path}: {e.strerror}", hint=hint) from e
        yield converted


def _unpacked_size(source: str, image: str) -> int:
    """Return the total size of the files in ``source``, which is the ``image`` or a copy of it. Raises ImageError."""
    command = [run.find("unsquashfs", package="squashfs-tools"), "-lln", source]
    listing = unsquashfs.run_tool(command, image)
    return sum(int(line[1]) for line in map(_LISTED.match, listing.splitlines()) if line)


def _compression(image: str) -> str:
    with open(image, "rb") as f:
        block = f.read(96)
    return COMPRESSIONS.get(int.from_bytes(block[20:22], "little"), "unknown")


def _add(tar: tarfile.TarFile, file: carry.File) -> None:
    name, data, mode = file
    entry = tarfile.TarInfo(name.rstrip("/"))
    entry.mode, entry.size = mode, len(data)
    entry.mtime = int(os.environ.get("SOURCE_DATE_EPOCH") or 0)
    if name.endswith("/"):
        entry.type = tarfile.DIRTYPE
    elif not mode:
        entry.type, entry.linkname, entry.mode, entry.size = tarfile.SYMTYPE, data.decode(), 0o777, 0
    tar.addfile(entry, io.BytesIO(data))
