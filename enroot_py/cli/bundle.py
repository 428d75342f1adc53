"""``penroot bundle``: an image and all that it takes to run it, in one executable file.

The file is a shell script, a tar.gz of the static helper programs and the
driver, and the squashfs image as it is. Of the host it needs sh, mkdir, tar and
gzip, for the small tar, and sha256sum if it has a checksum; the image is mounted
out of the file where the host has squashfuse, else unpacked by a helper that
reads squashfs itself. So nothing is converted here, nothing stored twice, and a
bundle starts at once where it can.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from enroot_py import LIBRARY, __version__
from enroot_py.base import filesystems, log, making, run, superblock
from enroot_py.base.errors import ImageError, PenrootError
from enroot_py.config import files
from enroot_py.config.settings import Settings, sysconf_path
from enroot_py.config.table import all_settings
from enroot_py.runtime import environ, etc, hooks, mounts, secrets
from enroot_py.store import containers, mksquashfs, squashfs, unsquashfs

PROGRAMS = ("penroot-unshare", "penroot-mount", "penroot-switchroot", "penroot-runfile")
ALIASES = {
    "enroot-unshare": "penroot-unshare",
    "enroot-nsenter": "penroot-unshare",
    "enroot-mount": "penroot-mount",
    "enroot-switchroot": "penroot-switchroot",
}
COMPRESSIONS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}  # squashfs_fs.h
_ALIGNMENT = 4096  # of the image in the file, so that it could be a loop device too
_BLOCK = 1 << 20
_DIRECTORIES: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("environ.d", ".env", environ.SHIPPED),
    ("mounts.d", ".fstab", mounts.SYSTEM),
)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A squashfs image and what is to come with it. With SOURCE_DATE_EPOCH set the same gives the same bytes."""

    image: str
    settings: Settings
    output: str | None = None  # by default the image's name with .run
    everything: bool = False  # the user's configuration and ENROOT_* variables, not only the system's
    checksum: bool = False
    description: str = ""
    target: str | None = None  # where it unpacks itself with --keep, which replaces ${VAR} then; by default its name

    @property
    def path(self) -> str:
        return os.path.abspath(
            self.output or os.path.basename(os.path.realpath(self.image)).removesuffix(".sqsh") + ".run"
        )

    def write(self) -> None:
        """Make the file, whole or not at all. Raises ImageError, PenrootError."""
        squashfs.check(self.image)
        containers.admit_file(self.image, self.settings)
        if self.output == mksquashfs.STDOUT:
            raise ImageError("a bundle is a file to run", hint="name it: --output FILE")
        mksquashfs.check_output(self.path, self.settings)
        making.sweep(os.path.dirname(self.path))
        with _readable(self.image, self.settings) as source:
            runtime = self._runtime(self._config(source))
            try:
                self._publish(source, runtime)
            except FileExistsError:
                raise ImageError(f"file already exists: {self.path}", hint="--force overwrites it") from None
            except OSError as e:
                raise mksquashfs.cannot_write(self.path, e) from e

    def _publish(self, source: str, runtime: bytes) -> None:
        """Header, runtime and image beside the bundle, then under its name. Raises OSError."""
        start = len(_header("0" * 64 if self.checksum else ""))
        offset = -(-(start + len(runtime)) // _ALIGNMENT) * _ALIGNMENT
        digest = hashlib.sha256()
        with making.File(self.path) as file:
            with open(file.fd, "wb", closefd=False) as out:
                out.seek(start)
                for block in _blocks(runtime.ljust(offset - start, b"\0"), source):
                    if self.checksum:
                        digest.update(block)
                    out.write(block)
                out.seek(0)
                out.write(_header(digest.hexdigest() if self.checksum else "", offset))
            mode = os.fstat(file.fd).st_mode
            os.fchmod(file.fd, mode | (mode & 0o444) >> 2)
            file.publish(replace=self.settings.force_override)

    def _config(self, source: str) -> str:
        """What the driver knows of this bundle, as assignments of sh(1)."""
        values = {
            "description": self.description,
            "version": __version__,
            "compression": _compression(source),
            "target": os.path.basename(self.path).removesuffix(".run") if self.target is None else self.target,
            "size": str(-(-_unpacked_size(source, self.image) // 1024)),
            **secrets.secret_lists(),
        }
        script = etc.read_rc(unsquashfs.read(self.image, "etc/rc"), unsquashfs.read(self.image, "etc/rc.local"))
        if script is not None:  # no shell is needed to know what it runs
            values["image_run"] = "y"
            values["image_workdir"] = script.workdir
            values["image_entrypoint"] = " ".join(map(etc.quote, script.entrypoint))
            values["image_command"] = " ".join(map(etc.quote, script.command))
        return "".join(f"{key}={etc.quote(value)}\n" for key, value in values.items())

    def _runtime(self, config: str) -> bytes:
        """The tar.gz of programs, driver and configuration."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for program in PROGRAMS:
                with open(find(program), "rb") as f:
                    _add(tar, f"bin/{program}", f.read(), 0o755)
            for alias, program in sorted(ALIASES.items()):
                entry = _entry(f"bin/{alias}", 0o777)
                entry.type, entry.linkname = tarfile.SYMTYPE, program
                tar.addfile(entry)
            for part in ("driver", "inside"):
                with open(find(f"{part}.sh"), "rb") as f:
                    _add(tar, part, f.read(), 0o644)
            with open(hooks.STANDARD + "/common.sh", "rb") as f:
                _add(tar, "lib/common.sh", f.read(), 0o644)
            order, scripts = self._hooks()
            config += f"order={etc.quote(' '.join(map(etc.quote, order)))}\n"
            _add(tar, "config", config.encode("utf-8", "surrogateescape"), 0o644)
            for name, data in sorted(scripts.items()):
                _add(tar, name, data, 0o755)
            for name, data, mode in sorted(self._configuration()):
                _add(tar, name, data, mode)
        return gzip.compress(out.getvalue(), mtime=0)

    def _hooks(self) -> tuple[list[str], dict[str, bytes]]:
        """What runs, in order: hooks of its driver by name, and scripts by path beneath etc; and the scripts."""
        order: list[str] = []
        scripts: dict[str, bytes] = {}
        settings = self.settings if self.everything else self.settings.replace("bundle", config_path=os.devnull)
        for hook in hooks.arrange(hooks.STANDARD, settings, os.environ):
            ours = hook.path == f"{hooks.STANDARD}/{hook.name}.py"
            script = hook.path if hook.is_script else "" if ours else hook.original
            if script:
                place = "user" if script.startswith(settings.config_path + "/") else "system"
                order.append(f"{place}/hooks.d/{os.path.basename(script)}")
                with open(script, "rb") as f:
                    scripts["etc/" + order[-1]] = f.read()
            elif hook.path:
                if not ours:
                    log.warn(f"hook {hook.path} is left out: a bundle runs where there is no Python")
                order.append(hook.name)
        return order, scripts

    def _configuration(self) -> Iterator[tuple[str, bytes, int]]:
        """Name, content and mode of each file of environ.d, mounts.d and hooks.d that goes along."""
        places = [("system", sysconf_path(), True)]
        if self.everything:
            places.append(("user", self.settings.config_path, False))
            lines = []
            for variable, setting in sorted(all_settings().items()):
                if self.settings.origin(setting) != "default" and setting.kind != "path":
                    value = etc.quote(self.settings.text(setting))
                    lines.append(f'[ -n "${{{variable}+set}}" ] || export {variable}={value}\n')
            yield "etc/settings", "".join(lines).encode("utf-8", "surrogateescape"), 0o644
        for place, directory, first in places:
            for kind, suffix, shipped in _DIRECTORIES:
                ours = shipped if first else {}
                for origin, text in files.fragments((f"{directory}/{kind}",), suffix, ours):
                    name = f"etc/{place}/{kind}/{os.path.basename(origin)}"
                    yield name, text.encode("utf-8", "surrogateescape"), 0o644


def _blocks(first: bytes, image: str) -> Iterator[bytes]:
    yield first
    with open(image, "rb") as f:
        while block := f.read(_BLOCK):
            yield block


def _header(checksum: str, offset: int = 0) -> bytes:
    """The script at the beginning; of the same length whatever the number is."""
    with open(find("header.sh")) as f:
        return f.read().replace("@OFFSET@", f"{offset:014}").replace("@SHA256@", checksum).encode()


def find(name: str) -> str:
    """A static helper or a part of the driver: beside an installation, or in a source tree. Raises PenrootError."""
    for directory in (
        LIBRARY + "/libexec",
        LIBRARY + "/c_shims/helpers/build",
        LIBRARY + "/configs/bundle",
    ):
        if os.path.isfile(f"{directory}/{name}"):
            return f"{directory}/{name}"
    raise PenrootError(
        f"the helper program {name} is not installed",
        hint="make install PREFIX=... builds it; a plain pip install has none",
    )


@contextlib.contextmanager
def _readable(image: str, settings: Settings) -> Iterator[str]:
    """An image that the helper can unpack and squashfuse can serve: the same file, or a copy in zstd owned by root."""
    known = run.Program([find("penroot-runfile"), "compressions"]).run().split()
    with open(image, "rb") as file:
        all_root = superblock.is_all_root(file.fileno())
    if _compression(image) in known and all_root:
        yield image
        return
    why = f"from {_compression(image)} to {known[-1]}, for hosts without squashfuse"
    log.info(f"converting {image}{' ' + why if all_root else ': root must own all files'}")
    making.sweep(settings.temp_path)
    with contextlib.ExitStack() as stack:
        try:
            scratch = stack.enter_context(making.Directory(settings.temp_path + "/penroot-bundle", 0o700)).path
            unpacked, converted = scratch + "/rootfs", scratch + "/image.sqsh"
            os.mkdir(unpacked)
            unsquashfs.unpack(image, unpacked, settings)
            inner = settings.replace("bundle", squash_options=f"-comp {known[-1]} -b 256K")
            mksquashfs.write((unpacked,), converted, inner)
        except OSError as e:
            hint = filesystems.way_out(e, settings.temp_path, "ENROOT_TEMP_PATH")
            raise ImageError(f"cannot convert {image} in {settings.temp_path}: {e.strerror}", hint=hint) from e
        yield converted


def _unpacked_size(source: str, image: str) -> int:
    """Bytes of what is in ``source``, which is the ``image`` or a copy of it. Raises ImageError."""
    try:
        return int(run.Program([find("penroot-runfile"), "size", source, "0"], error=ImageError).run())
    except ImageError as e:
        why = str(e).partition(" failed: ")[2]
        if "is damaged" not in why:
            raise
        raise ImageError(why.replace("the image", f"the image {image}", 1), hint="import or copy it again") from e


def _compression(image: str) -> str:
    with open(image, "rb") as f:
        block = f.read(96)
    return COMPRESSIONS.get(int.from_bytes(block[20:22], "little"), "unknown")


def _entry(name: str, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.mode = mode
    entry.mtime = int(os.environ.get("SOURCE_DATE_EPOCH") or 0)
    return entry


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = _entry(name, mode)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))
