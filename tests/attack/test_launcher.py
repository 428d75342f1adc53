"""Attacks by programs on the launcher of the Python API: signals, inherited descriptors, a full descriptor table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel.conftest import User
from tests.kernel.test_api import nothing_is_left, python


@pytest.mark.security("C14")
@pytest.mark.parametrize("root", [False, True])
def test_signals_to_all_spare_launcher_and_container(user: User, rootfs: Path, root: bool) -> None:
    text = f"""
        with enroot_py.Container("box", root={root}) as box, enroot_py.Container("box") as other:
            for signal in ("STOP", "KILL"):
                box.run(["sh", "-c", f"kill -{{signal}} -1 1; exit 0"])
                print(box.run(["true"]).returncode, other.run(["true"]).returncode)
        """
    assert python(user, text) == "0 0\n0 0\n"
    nothing_is_left(user)


@pytest.mark.security("C14")
@pytest.mark.parametrize("source", ["box", "x.sqsh"])
def test_programs_inherit_no_descriptor(user: User, rootfs: Path, image: Path, source: str) -> None:
    text = f"""
        source = {source if source == "box" else str(image)!r}
        listing = ["sh", "-c", "for fd in /proc/$$/fd/*; do readlink $fd; done; true"]
        standard = dict(stdin=subprocess.DEVNULL, stdout=PIPE, stderr=subprocess.STDOUT, text=True)
        print(*enroot_py.run(source, listing, **standard).stdout.split())
        with enroot_py.Container(source) as box:
            print(*box.run(listing, **standard).stdout.split())
        """
    for line in python(user, text).splitlines():
        null, *pipes = line.split()
        assert null == "/dev/null"
        assert len(pipes) == 2 and len({*pipes}) == 1 and pipes[0].startswith("pipe:"), line
    nothing_is_left(user)


@pytest.mark.security("C14")
@pytest.mark.parametrize("call", ["box.run", "functools.partial(enroot_py.run, 'box')"])
def test_full_descriptor_table_fails_one_request(user: User, rootfs: Path, call: str) -> None:
    """recvmsg(2) drops descriptors for which the launcher has no room: no program may run without its stdout."""
    text = f"""
        import os, resource
        from enroot_py.api import client
        with enroot_py.Container("box") as box:
            enroot_py.run("box", ["true"])
            launcher = client.launcher()._process.pid
            limits = resource.prlimit(launcher, resource.RLIMIT_NOFILE)
            opened = max(map(int, os.listdir(f"/proc/{{launcher}}/fd"))) + 1
            for limit in range(opened, opened + 12):
                resource.prlimit(launcher, resource.RLIMIT_NOFILE, (limit, limits[1]))
                try:
                    print({call}(["sh", "-c", "echo out"], stdout=PIPE).stdout)
                except enroot_py.PenrootError as e:
                    print(type(e).__name__, e)
            resource.prlimit(launcher, resource.RLIMIT_NOFILE, limits)
            print(box.run(["echo", "alive"], stdout=PIPE).stdout)
        """
    *lines, last = python(user, text).splitlines()
    assert {line for line in lines if "open files" not in line} == {"b'out\\n'"}, lines
    assert last == "b'alive\\n'"
    nothing_is_left(user)
