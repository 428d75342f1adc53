"""A container made of this machine's programs, which needs no registry and no network."""

from __future__ import annotations

import glob
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.kernel.conftest import User, busybox_rootfs, user

__all__ = ["user"]

# The interpreter that has PyTorch, if it is not the interpreter of the tests.
PYTHON = os.environ.get("PENROOT_TORCH_PYTHON") or shutil.which("python3") or sys.executable


class Box:
    """The container ``box``: libraries of programs are copied, trees of Python are mounted."""

    def __init__(self, user: User) -> None:
        self.user = user
        self.root = user.data / "box"
        self.mounts: list[str] = []
        # Only this machine's variables may name the driver's directory.
        user.environ["PATH"] += f":{os.environ['PATH']}"
        user.environ["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")
        busybox_rootfs(self.root)
        user.own(user.data)
        # As on every system, the image supplies the dependencies of the driver's libraries.
        self.copy(libraries(driver()))

    def add(self, program: pathlib.Path | str) -> None:
        """Add a program at its own path, with its libraries except the driver's."""
        self.copy([str(program), *libraries([str(program)])])

    def copy(self, paths: Iterable[str]) -> None:
        for path in paths:
            target = self.root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copy(path, target)
        self.user.own(self.root)

    def tree(self, path: str) -> None:
        """Mount a directory at its own path, or copy it if the user cannot read it outside."""
        if self.user.run("sh", "-c", 'test -r "$0" && echo yes; true', path).stdout:
            self.mounts.append(path)
        else:
            shutil.copytree(path, self.root / path.lstrip("/"), symlinks=True, dirs_exist_ok=True)
            self.user.own(self.root)

    def run(self, *command: str, env: dict[str, str] | None = None) -> str:
        variables = {"NVIDIA_VISIBLE_DEVICES": "all", **(env or {})}
        options = [word for mount in self.mounts for word in ("--mount", f"{mount}:{mount}:none:x-create=dir,rbind,ro")]
        return self.user.start(*options, "box", *command, env=variables)


def driver() -> list[str]:
    """Return the driver's libraries that programs load, wherever this machine has them."""
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    paths = {line.rpartition(" => ")[2] for line in known.splitlines() if " => " in line}
    for directory in ("/usr/local/nvidia/lib*", *os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        paths.update(glob.glob(f"{directory}/*.so.1"))
    names = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libcudadebugger.so.1")
    return sorted(path for path in paths if os.path.basename(path) in names)


def libraries(programs: list[str]) -> set[str]:
    """Return the libraries that the loader finds on this machine, without the driver's."""
    if not programs:
        return set()
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False)
    found = set()
    for line in done.stdout.splitlines():
        words = line.split()
        path = words[2] if "=>" in words and len(words) > 2 else words[0] if words else ""
        if path.startswith("/") and not path.endswith(":") and "nvidia" not in path and "libcuda.so" not in path:
            found.add(path)
    return found


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skip without a GPU. Unlike ``require``, it does not fail in CI."""
    if not os.path.exists("/proc/driver/nvidia/version") and not os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has no GPU of NVIDIA")


@pytest.fixture
def box(gpu: None, user: User) -> Box:
    return Box(user)


@pytest.fixture
def torch_box(box: Box) -> tuple[Box, str]:
    """Return the box with PyTorch, and the path of its interpreter."""
    ask = "import json, sys, sysconfig, torch; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, \
sysconfig.get_path('stdlib'), torch.__path__[0]]))"
    done = subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{PYTHON} has no PyTorch; name another in PENROOT_TORCH_PYTHON")
    executable, prefix, base, stdlib, torch = json.loads(done.stdout.splitlines()[-1])
    trees = [stdlib, prefix if prefix != base else os.path.dirname(torch)]
    objects = [str(path) for path in pathlib.Path(stdlib).rglob("*.so")]
    objects += [str(path) for path in pathlib.Path(torch, "lib").glob("*.so*")]
    box.copy(path for path in libraries(objects) if not path.startswith(tuple(trees)))
    for tree in trees:
        box.tree(tree)
    # The interpreter of a virtual environment is a link, or a chain of them.
    link = executable
    while os.path.islink(link):
        if not link.startswith(tuple(trees)):
            place = box.root / link.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(os.readlink(link))
        link = os.path.join(os.path.dirname(link), os.readlink(link))
    box.add(link)
    return box, executable
