"""Check /dev/fuse and squashfuse, which mount squashfs images."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator

from enroot_py.base import carried, elf
from enroot_py.base.fds import Fd
from enroot_py.cli.findings import Finding
from enroot_py.runtime import pods, squashfuse

_UPGRADE = "install squashfuse 0.5 or later with squashfuse_ll, or unpack images: penroot create IMAGE"


def findings() -> Iterator[Finding]:
    """Check /dev/fuse and squashfuse."""
    # In a pod, a device plugin may withhold /dev/fuse from containers that need no FUSE.
    verdict = "warn" if pods.is_made() else "bad"
    try:
        info = os.stat("/dev/fuse")
    except FileNotFoundError:
        message = "there is no /dev/fuse: layers in the store can be mounted, but squashfs images cannot"
        yield Finding(verdict, message, pods.without_fuse(squashfuse.INSTEAD))
        return
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISCHR(info.st_mode) or mode & 0o006 != 0o006:
        fix = """echo 'KERNEL=="fuse", MODE="0666"' > /etc/udev/rules.d/80-fuse.rules; chmod 666 /dev/fuse"""
        yield Finding("bad", f"/dev/fuse has mode {mode:04o}: users cannot mount squashfs images", fix)
    else:
        yield Finding("ok", f"/dev/fuse has mode {mode:04o}")
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except PermissionError as e:
        if e.errno == errno.EPERM:  # from the device cgroup; the mode of the file would cause EACCES
            slurm_fix = (
                "add /dev/fuse to cgroup_allowed_devices_file.conf if this Slurm reads that file, "
                "else set ConstrainDevices=no"
            )
            yield Finding(
                verdict,
                "the device cgroup of this process denies /dev/fuse: squashfs images cannot be mounted",
                pods.without_fuse(squashfuse.INSTEAD) if pods.is_made() else slurm_fix,
            )
    if server := carried.installed("squashfuse_ll", "squashfuse"):
        yield squashfuse_version(server)
    else:
        yield Finding("bad", "squashfuse is not installed: squashfs images cannot be mounted", "install squashfuse")


def squashfuse_version(program: str) -> Finding:
    """Check libfuse's version and the threads of squashfuse.

    Sources: NEWS and ll_main.c of squashfuse; ChangeLog.rst of libfuse, 3.3.0.
    """
    with Fd(os.open(program, os.O_RDONLY | os.O_CLOEXEC)) as file:
        text = file.content()
        libraries: tuple[str, ...] = ()
        with contextlib.suppress(elf.NotElf):
            libraries = elf.read(file).needed
    version = re.search(rb"squashfuse (\d+(?:\.\d+)+)", text)
    name = f"{program} ({version[1].decode()})" if version else program
    if "libfuse.so.2" in libraries:
        message = (
            f"{name} is built with libfuse 2, which cannot serve an open /dev/fuse: squashfs images cannot be mounted"
        )
        return Finding("bad", message, _UPGRADE)
    # squashfuse with threads calls fuse_session_loop_mt. If squashfuse's library is a separate file, the program does
    # not contain this name: check the version instead.
    parts = tuple(map(int, version[1].split(b"."))) if version else ()
    has_library = any(name.startswith("libsquashfuse") for name in libraries)
    if b"fuse_session_loop_mt" in text or (has_library and parts >= (0, 3)):
        return Finding("ok", f"{name} mounts squashfs images, with several threads")
    message = f"{name} has one thread: processes of a container that read its image wait for each other"
    return Finding("warn", message, _UPGRADE)
