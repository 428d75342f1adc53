"""Kill one of our processes at any moment of a start, an import or a step: nobody waits long, and nothing is left.

The default is a small sample; --soak runs five hundred kills.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.images import Image, busybox, entry
from tests.kernel.conftest import PREFIX, User, mounts_under, require
from tests.kernel.registry import Server
from tests.kernel.test_api import HEAD, nothing_is_left, python
from tests.slurm.lab import Lab
from tests.slurm.steps import assert_nothing_left, on_node
from tests.waiting import until

MAX_WAIT_S = 10  # a test fails if a command ends later than this after a kill
FIRST_S = 0.02  # the longest time from the start of a command to the first attempt to kill
GIVE_UP_S = 60  # the test gives up after this time, even on a busy machine
SERVERS = ("squashfuse", "squashfuse_ll", "fuse-overlayfs")
STARTS = ("image", "data", "--pid image", "fuse-overlayfs", "box")


def of_user(uid: int) -> dict[int, str]:
    """Return the living processes of a user: PID to name."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            status = pathlib.Path("/proc", name, "status").read_text()
            if re.search(rf"^Uid:\s{uid}\s", status, re.MULTILINE) and "\nState:\tZ" not in status:
                found[int(name)] = status.partition("\n")[0].removeprefix("Name:\t")
    return found


def kill_server(run: subprocess.Popen[str]) -> str:
    """Kill the server that ``run`` starts, before the server reports to its parent. Return "" if there is no server."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and run.poll() is None:
        with contextlib.suppress(OSError):
            for parent in children(run.pid):
                for pid in children(parent):
                    os.kill(pid, signal.SIGKILL)
                    return "the server as it started"
    return ""


def children(process: int) -> list[int]:
    return list(map(int, pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()))


def kill_one(victims: Callable[[], dict[int, str]], rng: random.Random, *, first: tuple[str, ...] = ()) -> str:
    """Kill a process, preferably one named in ``first``. Return its name, or "" without a victim."""
    found = victims()
    pids = [pid for pid, name in found.items() if name in first and rng.random() < 0.7] or list(found)
    if not pids:
        return ""
    pid = rng.choice(sorted(pids))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return found[pid]


def assert_in_words(err: str) -> None:
    """Check that each line of stderr is a message for users, without a trace of Python."""
    lines = [line for line in err.splitlines() if line]
    assert all(re.match(r"\[(ERROR|HINT|WARN|INFO)\] ", line) for line in lines), err
    assert not re.search(r"Traceback|\.py\b|Errno|Error:|a bug in", err), err


def finish(process: subprocess.Popen[str], about: str) -> tuple[str, str]:
    """Wait for the end of a command whose process was killed, and fail if that takes long."""
    began = time.monotonic()
    out, err = process.communicate(timeout=GIVE_UP_S)
    assert time.monotonic() - began < MAX_WAIT_S, about
    return out, err


@pytest.mark.security("L5")
@pytest.mark.soak
@pytest.mark.parametrize("what", STARTS)
def test_kills_in_the_first_moments_of_a_start(
    user: User, image: pathlib.Path, rng: random.Random, soak: bool, what: str
) -> None:
    require(shutil.which("fuse-overlayfs"), "fuse-overlayfs is not installed")
    require(os.geteuid() == 0, "only root sees all processes of the user")
    options, env = [str(image)], dict(user.environ)
    if what == "box":
        options = ["--rw", "box"]
    elif what == "data":
        options = ["--mount", f"{image}:/mnt:sqsh", "box"]
    elif what == "--pid image":
        options = ["--pid", "--root", str(image)]
    elif what == "fuse-overlayfs":
        env["ENROOT_NATIVE_OVERLAYFS"] = "no"
    command = user.command(f"{PREFIX}/bin/penroot", "start", *options, "echo", "up")
    for number in range(100 if soak else 4):
        began = time.monotonic()
        run = subprocess.Popen(
            command,
            env=env,
            cwd=user.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        moment = rng.uniform(0, FIRST_S)
        killed = kill_server(run) if what != "box" and number % 2 else ""
        while not killed and run.poll() is None:
            # Wait until a process exists, and kill it in its first moments.
            time.sleep(max(0, began + moment - time.monotonic()))
            killed = kill_one(lambda: of_user(user.uid), rng, first=SERVERS)
        about = f"start {what}, number {number}: killed {killed or 'nothing'} after {moment * 1000:.1f} ms"
        out, err = finish(run, about)
        assert out in ("", "up\n"), about
        assert run.returncode or out == "up\n", f"{about}\n{err}"
        if run.returncode > 0:
            assert_in_words(err)
        until(lambda: not of_user(user.uid), f"{about}: every process ends", GIVE_UP_S)
        assert mounts_under(user.home) == [], about
        if soak or number == 3:
            again = subprocess.run(
                command, env=env, cwd=user.home, capture_output=True, text=True, timeout=60, check=True
            )
            assert again.stdout == "up\n" and again.stderr == "", about
    left = [name for name in os.listdir(user.home / "run") if name != "servers" and not name.startswith("named-")]
    assert left == [], "nothing is left in the runtime directory but entries for servers"


API = """
def start_and_run(number):
    for _ in range(6):
        try:
            if number % 2:
                enroot_py.run(image, ["true"], writable=writable)
            else:
                with enroot_py.Container(image, writable=writable) as box:
                    box.run(["true"])
        except enroot_py.PenrootError:
            pass

threads = [threading.Thread(target=start_and_run, args=[number]) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.security("L5")
@pytest.mark.soak
@pytest.mark.parametrize("what", ["box", "image", "writable image"])
def test_kills_at_any_moment_of_containers_from_python(
    user: User, image: pathlib.Path, rng: random.Random, soak: bool, what: str
) -> None:
    require(os.geteuid() == 0, "only root sees all processes of the user")
    path = "box" if what == "box" else str(image)
    head = f"{HEAD}image, writable = {path!r}, {what != 'image'}\n"
    for number in range(70 if soak else 4):
        moment = rng.uniform(0, 0.7)
        run = subprocess.Popen(
            user.command("/usr/bin/python3", "-c", head + API),
            env=user.environ,
            cwd=user.home,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(moment)
        killed = kill_one(lambda: of_user(user.uid), rng, first=SERVERS)
        about = f"{what}, number {number}: killed {killed or 'nothing'} after {moment * 1000:.0f} ms"
        err = finish(run, about)[1]
        assert "Traceback" not in err, f"{about}\n{err}"
        again = 'print(enroot_py.run(image, ["echo", "up"], writable=writable, stdout=PIPE).stdout)'
        assert python(user, f"image, writable = {path!r}, {what != 'image'}\n{again}") == "b'up\\n'\n", about
        nothing_is_left(user)


def numbered(number: int) -> Image:
    """Return an image that takes a while to import."""
    bulk = random.Random(number).randbytes(200_000)
    return busybox(*(entry(f"bulk{n}", bulk + b"%d" % n) for n in range(20)), entry("number", b"%d\n" % number))


@pytest.mark.security("L5")
@pytest.mark.soak
def test_kills_at_any_moment_of_an_import(user: User, registry: Server, rng: random.Random, soak: bool) -> None:
    require(os.geteuid() == 0, "only root sees all processes of the user")
    for number in range(100 if soak else 4):
        name = f"test/kill{number}"
        registry.pusher.image(name, "1", numbered(number))
        command = user.command(
            f"{PREFIX}/bin/penroot", "import", "-f", "-o", "x.sqsh", f"docker://{registry.host}#{name}:1"
        )
        began = time.monotonic()
        run = subprocess.Popen(
            command, env=user.environ, cwd=user.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        moment = rng.uniform(0, FIRST_S if rng.random() < 0.3 else 0.6)
        time.sleep(moment)
        killed = kill_one(lambda: of_user(user.uid), rng)
        about = f"import number {number}: killed {killed or 'nothing'} after {moment * 1000:.0f} ms"
        out, err = finish(run, about)
        if run.returncode > 0:
            assert_in_words(err)
        until(lambda: not of_user(user.uid), f"{about}: every process ends", GIVE_UP_S)
        began = time.monotonic()
        again = subprocess.run(command, env=user.environ, cwd=user.home, capture_output=True, text=True, check=False)
        assert again.returncode == 0, f"{about}\n{err}\n{again.stderr}"
        assert time.monotonic() - began < GIVE_UP_S, about
        assert os.listdir(user.home / "cache/tmp") == [], about
        left = [name for name in os.listdir(user.home) if name.endswith(("making", "trash"))]
        assert left == [], about
    assert user.penroot("cache", "verify").returncode == 0
    assert user.start("x.sqsh", "cat", "/number") == f"{number}\n"


@pytest.mark.security("L6")
@pytest.mark.soak
@pytest.mark.parametrize("held", ["stopped", "killed"])
def test_import_beside_a_process_that_holds_its_lock(
    user: User, registry: Server, rng: random.Random, soak: bool, held: str
) -> None:
    """A stopped import delays other imports only briefly, and a killed one not at all."""
    require(os.geteuid() == 0, "only root sees all processes of the user")
    for number in range(50 if soak else 2):
        name = f"test/held{held}{number}"
        registry.pusher.image(name, "1", numbered(1000 + number))
        words = ("import", "-f", "-o")
        uri = f"docker://{registry.host}#{name}:1"
        first = subprocess.Popen(
            user.command(f"{PREFIX}/bin/penroot", *words, "x.sqsh", uri),
            env=user.environ,
            cwd=user.home,
            stderr=subprocess.DEVNULL,
        )
        moment = rng.uniform(0.1, 0.6)
        time.sleep(moment)
        holders = of_user(user.uid)
        for pid in holders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if held == "stopped" else signal.SIGKILL)
        try:
            began = time.monotonic()
            second = subprocess.run(
                user.command(f"{PREFIX}/bin/penroot", *words, "y.sqsh", uri),
                env=user.environ,
                cwd=user.home,
                capture_output=True,
                text=True,
                timeout=GIVE_UP_S,
                check=False,
            )
            assert second.returncode == 0, second.stderr
            about = f"import number {number}, {held} after {moment:.2f} s"
            assert time.monotonic() - began < MAX_WAIT_S + 5, f"{about}: {second.stderr}"
        finally:
            for pid in holders:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            first.wait(timeout=GIVE_UP_S)
        until(lambda: not of_user(user.uid), "every process ends", GIVE_UP_S)
    user.penroot("import", "-f", "-o", "z.sqsh", uri)
    assert os.listdir(user.home / "cache/tmp") == []
    assert user.penroot("cache", "verify").returncode == 0


# -- steps


def of_node(lab: Lab, node: str, uid: int = 2001) -> dict[int, str]:
    """Return a user's helpers and servers on a node, which has its own PID namespace."""
    space = os.readlink(f"/proc/{lab.node(node).pid}/ns/pid")
    found = {}
    for pid, name in of_user(uid).items():
        with contextlib.suppress(OSError):
            ours = name in SERVERS or b"pyxis_py.helper" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
            if ours and os.readlink(f"/proc/{pid}/ns/pid") == space:
                found[pid] = name
    return found


@pytest.mark.security("L5")
@pytest.mark.soak
def test_kills_in_the_first_moments_of_a_step(lab: Lab, rng: random.Random, soak: bool) -> None:
    """The victim is the helper, the process that builds the container, or squashfuse."""
    lab.run("penroot import -o kills.sqsh docker://registry:5000#minimal:1")
    files = ("./kills.sqsh", "registry:5000#minimal:1")
    try:
        for number in range(100 if soak else 4):
            file = files[number % 2]
            options = rng.choice(((), ("--container-writable",), ("--container-name=kills",)))
            step = lab.popen(["srun", "-w", "n1", f"--container-image={file}", *options, "echo", "up"])
            until(lambda step=step: of_node(lab, "n1") or step.poll() is not None, "the helper runs")  # type: ignore[misc]
            moment = rng.uniform(0, FIRST_S)
            time.sleep(moment)
            killed = kill_one(lambda: of_node(lab, "n1"), rng, first=SERVERS)
            about = f"step {number} of {file}: killed {killed or 'nothing'} after {moment * 1000:.1f} ms"
            out, err = finish(step, about)
            assert out in ("", "up\n"), about
            assert step.returncode or out == "up\n", f"{about}\n{err}"
            assert not re.search(r"Traceback|\.py\b|Errno|Error:|Error\(|a bug in", err), f"{about}\n{err}"
            lab.run("penroot list | xargs -r penroot remove -f", node="n1", check=False)
            again = lab.run(["srun", "-w", "n1", f"--container-image={file}", "echo", "up"])
            assert again.stdout == "up\n", about
    finally:
        lab.run("rm -f kills.sqsh")
    on_node(lab, "true")
    assert_nothing_left(lab, "n1")
