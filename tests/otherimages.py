"""Images of foreign distributions: another release of Debian, and one with musl and busybox."""

from __future__ import annotations

import fcntl
import os
import pathlib
import shutil
import subprocess

from tests.kernel.conftest import require
from tests.matrix import roots
from tests.slurm.lab.images import cache_directory

HELLO = 'int puts(const char *);\nint main(void) { return puts("hello of musl") < 0; }\n'


def other_release() -> str:
    """Return Debian's release 13, or 12 on a node with 13."""
    return "bookworm" if "VERSION_CODENAME=trixie" in pathlib.Path("/etc/os-release").read_text() else "trixie"


def debian() -> str:
    """Make the squashfs image of another Debian release once, by debootstrap(8), without Slurm. Return its path."""
    require(shutil.which("debootstrap"), "debootstrap is not installed")
    release, cache = other_release(), pathlib.Path(cache_directory())
    cache.mkdir(parents=True, exist_ok=True)
    image, log = cache / f"{release}.sqsh", cache / f"{release}.log"
    with (cache / f"{release}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not image.exists():
            tree = cache / f"{release}.tree"
            shutil.rmtree(tree, ignore_errors=True)
            roots.bootstrap(release, tree, ("hostname",), log)
            squash(tree, image)
            shutil.rmtree(tree)
    return str(image)


def squash(tree: pathlib.Path, image: pathlib.Path) -> None:
    new = image.with_suffix(".new")
    new.unlink(missing_ok=True)
    options = ["-all-root", "-noappend", "-quiet", "-no-progress", "-comp", "lz4"]
    subprocess.run(["mksquashfs", tree, new, *options], check=True, stdout=subprocess.DEVNULL)
    new.chmod(0o644)
    new.rename(image)


def musl(parent: pathlib.Path, script: str = "") -> str:
    """Make an image in ``parent`` with musl, busybox, a program for musl, and no /etc/passwd. Return its path.

    The shell commands ``script`` run in the image's root directory before it is packed.
    """
    tree = parent / "musl.tree"
    for directory in ("bin", "lib", "etc", "proc", "sys", "dev", "tmp", "run", "usr/bin"):
        (tree / directory).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox
    shutil.copy(busybox, tree / "bin/busybox")
    for name in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if name != "busybox":
            (tree / "bin" / name).symlink_to("busybox")
    require(shutil.which("musl-gcc"), "musl-tools is not installed")
    compiler = ["musl-gcc", "-xc", "-", "-o", str(tree / "bin/hello")]
    subprocess.run(compiler, input=HELLO, text=True, check=True)
    (loader,) = pathlib.Path("/lib").glob("ld-musl-*.so.1")
    shutil.copy(os.path.realpath(loader), tree / "lib" / loader.name)
    subprocess.run(["sh", "-ec", script], cwd=tree, check=True)
    squash(tree, parent / "musl.sqsh")
    return str(parent / "musl.sqsh")
