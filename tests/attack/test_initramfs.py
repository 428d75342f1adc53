"""A node that runs from its initial RAM file system: containers start, and cannot reach the files beneath their root.

qemu(1) boots such a machine. $PENROOT_TEST_KERNEL is a directory with an unpacked kernel package:
``dpkg -x linux-image-*.deb DIRECTORY``.
"""

from __future__ import annotations

import gzip
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.installation import ROOT
from tests.kernel.conftest import require

KERNEL = os.environ.get("PENROOT_TEST_KERNEL", "")
QEMU = ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", "2048", "-nographic", "-no-reboot"]
BOX = "home/u/.local/share/enroot/box"
INIT = """#!/bin/busybox sh
export PATH=/bin:/usr/bin:/opt/penroot/bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
mkdir /dev/shm /dev/pts; mount -t tmpfs shm /dev/shm; mount -t devpts pts /dev/pts
insmod /overlay.ko; chown -R 1000:1000 /home/u; chmod 1777 /tmp
run() { su u -s /bin/sh -c "cd /home/u; HOME=/home/u $*" 2>&1; echo "[$?]"; }
echo BEGIN
run penroot start box cat /etc/secret
run penroot start box python3 -S /beneath.py
run penroot start --root --rw box python3 -S /beneath.py
run penroot start --root --rw --pid --net box python3 -S /beneath.py
echo END
poweroff -f
"""


def copy_python(root: pathlib.Path) -> None:
    """Copy the interpreter, its standard library, penroot's C module and the shared libraries that they need."""
    library = pathlib.Path(os.__file__).parent
    skipped = shutil.ignore_patterns("__pycache__", "test", "idlelib", "config-*", "site-packages", "dist-packages")
    shutil.copytree(library, root / f"usr/lib/{library.name}", ignore=skipped)
    shutil.copy(os.path.realpath(sys.executable), root / "usr/bin/python3")
    modules = [*library.glob("lib-dynload/*.so"), *(ROOT / "enroot_py/base").glob("_linux*.so"), *cffi()]
    needed = subprocess.run(["ldd", sys.executable, *modules], capture_output=True, text=True, check=True).stdout
    for path in sorted({*re.findall(r"(/lib\S+) \(", needed)}):
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path[1:])


def cffi() -> list[pathlib.Path]:
    return [*(ROOT / ".venv/lib").glob("python3*/site-packages/_cffi_backend*.so")]


@pytest.fixture
def initramfs(tmp_path: pathlib.Path) -> pathlib.Path:
    root = tmp_path / "root"
    for name in ("bin", "proc", "sys", "dev", "tmp", "run", "etc", "usr/bin", "usr/lib", "opt/penroot"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    require(busybox, "busybox is not installed")
    require(shutil.which(QEMU[0]) and shutil.which("cpio"), "qemu-system-x86 or cpio is not installed")
    shutil.copy(str(busybox), root / "bin/busybox")
    for name in "sh mount insmod chown chmod su mkdir cat echo poweroff sleep kill".split():
        (root / f"bin/{name}").symlink_to("busybox")
    copy_python(root)
    (root / "etc/hosts").touch()
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nu:x:1000:1000::/home/u:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nu:x:1000:\n")
    for name in ("resolv.conf", "machine-id", "localtime"):
        (root / f"etc/{name}").touch()
    (root / "etc/hostname").touch()
    # The container: the same programs, in another directory.
    shutil.copytree(root, root.parent / "box", symlinks=True)
    (root / BOX).parent.mkdir(parents=True)
    (root.parent / "box").rename(root / BOX)
    (root / BOX / "mnt").mkdir()
    (root / "etc/secret").write_text("beneath\n")
    (root / BOX / "etc/secret").write_text("inside\n")
    shutil.copy(ROOT / "tests/attack/beneath.py", root / BOX)
    for name in ("enroot_py", "bin", "libexec", "hooks", "configs"):
        shutil.copytree(ROOT / name, root / "opt/penroot" / name, symlinks=True)
    packages = root / f"opt/penroot/.venv/lib/python3.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    for path in cffi():
        shutil.copy(path, packages)
    [overlay] = pathlib.Path(KERNEL).glob("lib/modules/*/kernel/fs/overlayfs/overlay.ko")
    shutil.copy(overlay, root)
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    return pack(root)


def pack(root: pathlib.Path) -> pathlib.Path:
    names = "\0".join(str(path.relative_to(root)) for path in [root, *sorted(root.rglob("*"))])
    archive = subprocess.run(
        ["cpio", "--create", "--null", "--quiet", "--format=newc"],
        input=names.encode(),
        cwd=root,
        capture_output=True,
        check=True,
    ).stdout
    path = root.parent / "initramfs.gz"
    path.write_bytes(gzip.compress(archive, 1))
    return path


@pytest.mark.security("C12")
@pytest.mark.skipif(not KERNEL, reason="PENROOT_TEST_KERNEL names no kernel")
def test_container_on_initramfs_stays_inside(initramfs: pathlib.Path) -> None:
    [kernel] = pathlib.Path(KERNEL).glob("boot/vmlinuz-*")
    machine = ["-kernel", str(kernel), "-initrd", str(initramfs), "-append", "console=ttyS0 quiet panic=-1"]
    done = subprocess.run(
        [*QEMU, *machine], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )
    out = done.stdout.partition("BEGIN")[2].partition("END")[0]
    lines = [line.strip() for line in out.splitlines() if " sees " in line or line.strip() in ("inside", "[0]")]
    assert lines[:2] == ["inside", "[0]"], done.stdout
    seen = {line.rpartition(" ")[2] for line in lines if " sees " in line}
    assert seen == {"inside", "nothing"}, done.stdout  # an attempt sees "nothing" in a root that it made itself
    assert lines.count("[0]") == 4 and len(lines) == 1 + 4 + 3 * 12 * 2
