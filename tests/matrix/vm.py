"""A virtual machine, configured like a site's node: Debian's kernel, systemd, and cgroup version 2 only."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .roots import CHECKOUT, MatrixError, Root, tail

PACKAGES = ("libbpf1", "systemd-sysv", "dbus", "libpam-systemd", "dbus-user-session", "udev")
DISK = "24G"  # sparse
MEMORY = "6G"
KERNEL_BANNER = "Linux version"
BOOT_TIMEOUT_S = 60  # seconds until the first line of the kernel, with KVM
SERVICE = "etc/systemd/system/penroot-tests.service"
UNIT = """\
[Unit]
Description=penroot's tests
SuccessAction=poweroff
FailureAction=poweroff

[Service]
Type=exec
WorkingDirectory={checkout}
Environment={environ}
ExecStart=/bin/sh -c '{script}'
StandardOutput=tty
StandardError=tty
TTYPath=/dev/{console}
"""


@dataclass(frozen=True)
class Machine:
    """A machine for qemu(1): its name in uname(2), Debian's qemu package, and a processor for each accelerator."""

    name: str
    package: str
    board: str
    console: str
    processors: dict[str, str]

    @property
    def qemu(self) -> str:
        return f"qemu-system-{self.name}"

    @property
    def native(self) -> bool:
        return self.name == os.uname().machine


# QEMU 7.2 corrupts the flags of an emulated cmpxchg16b, which makes the kernel report a double fault.
MACHINES = {
    "amd64": Machine("x86_64", "qemu-system-x86", "pc", "ttyS0", {"kvm": "host", "tcg": "max,cx16=off"}),
    "arm64": Machine("aarch64", "qemu-system-arm", "virt", "ttyAMA0", {"kvm": "host", "tcg": "neoverse-n1"}),
}


def packages(arch: str) -> tuple[str, ...]:
    """Return the packages that turn a root into a machine: Debian's kernel and systemd."""
    return (f"linux-image-cloud-{arch or native()}", *PACKAGES)


def native() -> str:
    """Return Debian's name of this architecture. Raises MatrixError."""
    for arch, machine in MACHINES.items():
        if machine.native:
            return arch
    raise MatrixError(f"no virtual machine is known for {os.uname().machine}")


def run(root: Root, arch: str, script: str, log: Path, say: Callable[[str], None]) -> Path:
    """Run a shell command in the checkout of a machine made of ``root``. Return its disk after shutdown.

    The console's text goes to ``log``. Raises MatrixError if the machine does not start.
    """
    machine = MACHINES[arch or native()]
    for program in (machine.qemu, "mke2fs", "debugfs"):
        if not shutil.which(program):
            raise MatrixError(f"not installed: {program}: apt-get install {machine.package} e2fsprogs")
    enable(root, script, machine.console)
    disk = log.with_suffix(".disk")
    say(f"{root.release}: making {disk}")
    make(disk, root.path)
    for accelerator in machine.processors:
        if accelerator == "kvm" and not (machine.native and os.access("/dev/kvm", os.R_OK | os.W_OK)):
            say(f"{root.release}: no KVM here: the processor is emulated, which takes hours")
            continue
        if boot(root, disk, machine, accelerator, log):
            return disk
        say(f"{root.release}: the kernel does not start with {accelerator}, see {log}")
    raise MatrixError(f"{root.release}: the virtual machine does not start\n{tail(log)}")


def enable(root: Root, script: str, console: str) -> None:
    """Have systemd run ``script`` after boot, and then power the machine off."""
    variables = {"HOME": "/root", "TERM": "dumb", **root.environ}
    environ = " ".join(f'"{name}={value}"' for name, value in variables.items()).replace("%", "%%")
    unit = root.path / SERVICE
    unit.write_text(UNIT.format(checkout=CHECKOUT, environ=environ, script=script, console=console))
    wants = unit.parent / "multi-user.target.wants" / unit.name
    wants.unlink(missing_ok=True)
    wants.symlink_to(f"/{SERVICE}")
    (root.path / "etc/machine-id").write_text("")  # prevents the questions of the first boot


def make(disk: Path, tree: Path) -> None:
    """Create a file system from a directory with mke2fs(8), without mounting it."""
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-E", "root_owner=0:0", "-d", str(tree), str(disk), DISK]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise MatrixError(f"{' '.join(command)}: {done.stderr.strip()}")


def boot(root: Root, disk: Path, machine: Machine, accelerator: str, log: Path) -> bool:
    """Boot the machine and wait for its shutdown. Return whether it came up."""
    kernel = max((root.path / "boot").glob("vmlinuz-*"))
    append = (
        f"root=/dev/vda rw console={machine.console} panic=-1 penroot.vm systemd.hostname=node1 "
        f"systemd.show_status=no systemd.mask=serial-getty@{machine.console}.service "
        "systemd.default_timeout_start_sec=15min"
    )
    command = [
        *[machine.qemu, "-machine", machine.board, "-accel", accelerator, "-cpu", machine.processors[accelerator]],
        *["-smp", str(os.cpu_count())],
        *["-m", MEMORY, "-no-reboot", "-nodefaults", "-nographic", "-serial", f"file:{log}"],
        *["-drive", f"file={disk},format=raw,if=virtio,cache=unsafe"],
        *["-kernel", str(kernel), "-initrd", str(kernel).replace("vmlinuz", "initrd.img"), "-append", append],
    ]
    log.unlink(missing_ok=True)
    with log.with_suffix(".qemu").open("ab") as file:
        qemu = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while accelerator == "kvm" and not (log.exists() and KERNEL_BANNER in log.read_text(errors="replace")):
            if qemu.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(1)
        return qemu.wait() == 0
    finally:
        qemu.kill()


def fetch(disk: Path, path: str, to: Path) -> None:
    """Copy a file out of the disk with debugfs(8). A missing file is not created."""
    subprocess.run(["debugfs", "-R", f"dump {path} {to}", str(disk)], capture_output=True, stdin=subprocess.DEVNULL)
