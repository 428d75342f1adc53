"""Images for another machine type: a start fails with a clear error, or runs an emulator from binfmt_misc."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from enroot_py.registry.platforms import architecture
from tests import images
from tests.images import OCI
from tests.installation import LIBRARY
from tests.kernel.conftest import User, require
from tests.kernel.registry import serve

# Run in a user namespace. Since Linux 6.7, each user namespace has a private binfmt_misc.
PRIVATE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNT = "mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc"
NUMBERS = {"x86_64": 62, "aarch64": 183}
HERE = os.uname().machine
OTHER = "aarch64" if HERE == "x86_64" else "x86_64"
# Register an interpreter for programs of OTHER. The tests register busybox, which runs the applet named as the program.
EMULATOR = f"echo ':test:M:18:\\x{NUMBERS.get(OTHER, 0):02x}\\x00::{{}}:{{}}' > /proc/sys/fs/binfmt_misc/register"
WHY = f"it is for {OTHER}, and this node is {HERE}: use an image for {HERE}, or register an emulator in binfmt_misc"


@pytest.fixture
def foreign(user: User, rootfs: Path) -> Path:
    """Return a container whose busybox has an ELF header of the machine type OTHER."""
    require(HERE in NUMBERS, f"the test does not know an ELF machine number for {HERE}")
    done = subprocess.run([*PRIVATE, MOUNT], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"user namespaces have no binfmt_misc before Linux 6.7: {done.stderr.strip()}")
    (user.home / "busybox").write_bytes((rootfs / "bin/busybox").read_bytes())
    (user.home / "busybox").chmod(0o755)
    with open(rootfs / "bin/busybox", "r+b") as file:
        file.seek(18)
        file.write(NUMBERS[OTHER].to_bytes(2, "little"))
    return rootfs


def test_start_of_another_machines_image_names_both(user: User, foreign: Path) -> None:
    (foreign / "bin/script").write_text("#!/bin/sh\necho never\n")
    (foreign / "bin/script").chmod(0o755)
    for command, why in (("sh -c true", WHY), ("script", WHY.replace("it is", "its interpreter /bin/sh is"))):
        done = user.run(*PRIVATE, f"{MOUNT}; penroot start box {command}", status=126)
        assert done.stderr.startswith(f"[ERROR] cannot run /bin/{command.split()[0]}: {why}")


def test_start_of_another_machines_image_uses_an_emulator(user: User, foreign: Path) -> None:
    register = EMULATOR.format(user.home / "busybox", "F")
    done = user.run(*PRIVATE, f"{MOUNT}; {register}; penroot start box sh -c 'echo emulated'")
    assert done.stdout == "emulated\n"


def test_emulator_without_flag_f_is_not_in_the_container(user: User, foreign: Path) -> None:
    """Without the flag F of binfmt_misc, the kernel looks up the emulator in the container. The error says so."""
    register = EMULATOR.format(user.home / "busybox", "")
    done = user.run(*PRIVATE, f"{MOUNT}; {register}; penroot start box sh -c true", status=127)
    assert f"{WHY} with the flag F" in done.stderr


@pytest.mark.parametrize("node", ["no emulator", "an emulator", "another emulator", "no binfmt_misc"])
def test_step_asks_binfmt_misc_before_the_kernel(user: User, foreign: Path, node: str) -> None:
    """slurmstepd runs the program itself, so the plugin must know beforehand whether the kernel can run it."""
    lines = {
        "no emulator": "true",
        "an emulator": EMULATOR.format(user.home / "busybox", "F"),
        "another emulator": EMULATOR.format(user.home / "busybox", "F").replace(":18:", ":19:"),
        "no binfmt_misc": "mount -t tmpfs tmpfs /proc/sys/fs/binfmt_misc",
    }
    ask = (
        "import os; from enroot_py.runtime.interpreters import explain_in; "
        f"print(explain_in('/', 'sh', {str(foreign / 'bin')!r}, os.open('/proc', os.O_PATH)))"
    )
    command = f"{MOUNT}; {lines[node]}; PYTHONPATH={LIBRARY} {sys.executable} -c {shlex.quote(ask)}"
    stdout = subprocess.run([*PRIVATE, command], capture_output=True, text=True, check=True).stdout
    refused = node in ("no emulator", "another emulator")
    assert stdout == (f"cannot run {foreign}/bin/sh: {WHY} with the flag F\n" if refused else "\n")


def test_import_of_another_machines_image_warns_or_refuses(user: User, tmp_path: Path) -> None:
    """Without --arch, import only warns, because a node may have an emulator."""
    here, other = architecture(HERE), architecture(OTHER)
    with serve(tmp_path) as registry:
        registry.pusher.image("test/box", "1", images.busybox(kinds=OCI, architecture=other))
        uri = f"docker://{registry.host}/test/box:1"
        done = user.penroot("import", "-o", "box.sqsh", uri)
        assert f"test/box:1 is for {other}, this machine is {here}\n" in done.stderr
        assert "[WARN]" not in user.penroot("import", "-a", OTHER, "-f", "-o", "box.sqsh", uri).stderr
        stderr = user.penroot("import", "-a", HERE, "-f", "-o", "box.sqsh", uri, status=1).stderr
        assert f"is for {other} only" in stderr
