"""Check which of the caller's descriptors reach the program of a container."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from tests.installation import LIBRARY
from tests.kernel.conftest import PREFIX, User

SHOW = 'shown=$(for n in 0 1 2 5 6 7 8 9; do echo $n $(readlink /proc/$$/fd/$n); done); echo "$shown" >&5'
# A program that uses enroot_py as a library
PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
for number in sys.argv[2]:  # opened here, because Python does not start with such descriptors
    os.dup2(os.open(".", os.O_PATH if number == "2" else os.O_RDONLY), int(number))
from enroot_py.config.settings import load
from enroot_py.runtime import namespaces
from enroot_py.runtime.enter import Start, enter
from enroot_py.store import containers
settings = load()
start = Start(source=containers.find("box", settings), settings=settings, host=dict(os.environ), superuser=False)
container = enter(start)
namespaces.confine(remap_root=False)
container.execute(tuple(sys.argv[3:]))
"""


def opened(user: User, *command: str) -> dict[str, str]:
    """Run a command with descriptors: 5 is a file, 6 a pipe, 7 a directory, 8 opened with O_PATH, 9 a namespace.

    Return number -> target of these descriptors in the container's program, or "closed" as the target.
    """
    (user.home / "directory").mkdir(exist_ok=True)
    user.own(user.home / "directory")
    wrapper = """\
import os, sys
os.chdir(sys.argv[1])
fds = [os.open("report", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), os.pipe()[0], os.open(".", os.O_RDONLY),
       os.open(".", os.O_PATH), os.open("/proc/self/ns/net", os.O_RDONLY)]
moved = [os.dup2(os.dup(fd), 20 + n) for n, fd in enumerate(fds)]
for n, fd in enumerate(moved):
    os.dup2(fd, 5 + n)
    os.close(fd)
os.execvp(sys.argv[2], sys.argv[2:])
"""
    user.run("/usr/bin/python3", "-c", wrapper, str(user.home / "directory"), *command)
    text = (user.home / "directory/report").read_text()
    return dict((line.split() + ["closed"])[:2] for line in text.splitlines())


def start(*options: str) -> tuple[str, ...]:
    return "penroot", "start", *options, "box", "sh", "-c", SHOW


def library(directories: str) -> tuple[str, ...]:
    """Return a command that starts a shell through the library. With "01", descriptors 0 and 1 are directories."""
    return "/usr/bin/python3", "-IS", "-c", PROGRAM, LIBRARY, directories, "sh", "-c"


WAYS: dict[str, tuple[str, ...]] = {
    "start": start(),
    "root": start("--root"),
    "pid": start("--pid"),
    "library": (*library(""), SHOW),
}


@pytest.mark.parity("descriptors of the caller are inherited")
@pytest.mark.security("C7")
@pytest.mark.parametrize("way", WAYS)
def test_directories_and_namespaces_close_and_files_stay(user: User, rootfs: pathlib.Path, way: str) -> None:
    targets = opened(user, *WAYS[way])
    assert targets["5"].endswith("/report") and targets["6"].startswith("pipe:")
    assert {targets[number] for number in "789"} == {"closed"}


@pytest.mark.security("C7")
def test_stdio_that_is_a_directory_is_replaced(user: User, rootfs: pathlib.Path) -> None:
    """Reading and writing fail on the new descriptors, as on the directory."""
    targets = opened(user, *library("012"), SHOW)
    assert all(targets[number].endswith("/null") for number in "012")
    opened(user, *library("01"), "{ cat; echo out; } 2>&5; true")
    assert (user.home / "directory/report").read_text().lower().count("bad file descriptor") == 2


@pytest.mark.parity("ENROOT_CLOSE_DESCRIPTORS")
@pytest.mark.parametrize("options", [(), ("--root",), ("--pid",)], ids="".join)
def test_setting_closes_all_but_stdio(user: User, rootfs: pathlib.Path, options: tuple[str, ...]) -> None:
    """Variables that name closed descriptors, such as LISTEN_FDS, are removed too."""
    script = "ls /proc/self/fd; echo ${LISTEN_FDS-unset}${LISTEN_PID-unset}${LISTEN_FDNAMES-unset}"
    command = ("start", *options, "-e", "LISTEN_FDS", "-e", "LISTEN_PID=1", "-e", "LISTEN_FDNAMES=a", "box", "sh", "-c")
    listening = {"LISTEN_FDS": "2"}
    read, write = os.pipe()
    os.set_inheritable(read, True)
    words = user.command(f"{PREFIX}/bin/penroot", *command, script)
    for setting, numbers, variables in (
        ("no", {"0", "1", "2", str(read)}, "21a"),
        ("yes", {"0", "1", "2"}, "unset" * 3),
    ):
        env = {**user.environ, **listening, "ENROOT_CLOSE_DESCRIPTORS": setting}
        done = subprocess.run(words, env=env, pass_fds=(read,), capture_output=True, text=True, check=True)
        *shown, last = done.stdout.split()
        assert numbers <= set(shown) and len(shown) == len(numbers) + 1  # ls has /proc/self/fd open
        assert last == variables
    os.close(read)
    os.close(write)


@pytest.mark.parity("ENROOT_CLOSE_DESCRIPTORS")
def test_setting_refuses_a_rank_that_needs_its_descriptor(user: User, rootfs: pathlib.Path) -> None:
    environ = {"ENROOT_CLOSE_DESCRIPTORS": "yes", "PMI_FD": "7", "PMI_RANK": "0"}
    lines = user.penroot("start", "box", "true", env=environ, status=1).stderr.splitlines()
    assert lines == [
        "[ERROR] ENROOT_CLOSE_DESCRIPTORS=yes would close PMI_FD, which connects this rank to the MPI launcher",
        "[HINT] set ENROOT_CLOSE_DESCRIPTORS=no, or ENROOT_MPI=no if the program is not an MPI rank",
    ]
    assert user.start("box", "echo", "ran", env={**environ, "ENROOT_MPI": "no"}) == "ran\n"
