"""Containers from Python: enroot_py.Container, run() and pull(), as an ordinary user."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import images
from tests.installation import LIBRARY, ROOT
from tests.kernel.conftest import User, mounts_under, servers
from tests.kernel.registry import Server
from tests.waiting import until

HEAD = f"""
import asyncio, functools, os, signal, subprocess, sys, threading, time
sys.path.insert(0, {LIBRARY!r})
import enroot_py
from subprocess import PIPE
print = functools.partial(print, flush=True)
"""
MAIN = "import enroot_py.api.client as client; print(client.launcher()._process.pid)"


def python(user: User, text: str, **options: object) -> str:
    """Run a Python program as this user, and return its stdout."""
    return user.run("/usr/bin/python3", "-c", HEAD + textwrap.dedent(text), **options).stdout  # type: ignore[arg-type]


def processes_of(user: User) -> dict[int, str]:
    """Return PID -> command line of each process of the user."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.stat().st_uid == user.uid and (text := (path / "cmdline").read_bytes()):
                found[int(path.name)] = text.replace(b"\0", b" ").decode().strip()
        except OSError:  # it has just ended
            continue
    return found


def leftovers(user: User) -> list[str]:
    """Return the hidden directories in which penroot keeps the changes of containers."""
    return [name for name in os.listdir(user.data) if name.startswith(".")]


def nothing_is_left(user: User) -> None:
    until(lambda: not processes_of(user), "no process of the user")
    assert not leftovers(user)
    assert not mounts_under(user.home)
    assert not servers(user.home)


@pytest.mark.parity("enroot_py.run, Container")
def test_run_gives_output_and_status(user: User, rootfs: Path) -> None:
    assert (
        python(
            user,
            """
            done = enroot_py.run("box", ["sh", "-c", "cat; echo $$ $A; exit 3"], env={"A": "b"}, input="in ", text=True,
                                 capture_output=True)
            print(done.args[0], done.returncode, done.stdout, sep="|", end="")
            print(enroot_py.run("box", ["sh", "-c", "kill -9 $$; pwd"], cwd="/opt/work", stdout=PIPE).stdout)
            """,
        )
        == "sh|3|in 1 b\nb'/opt/work\\n'\n"
    )
    nothing_is_left(user)


@pytest.mark.parity("enroot_py.run, Container")
def test_runs_of_a_container_share_its_processes(user: User, rootfs: Path) -> None:
    output = python(
        user,
        """
        with enroot_py.Container("box", env={"A": "1"}, mounts=[f"{os.environ['HOME']}:/mnt/home:ro"]) as box:
            text = "sleep 60 & echo $! > /tmp/pid; echo $A $B $FROM_IMAGE; pwd"
            box.run(["sh", "-c", text], env={"B": "2"}, cwd="/tmp")
            box.run(["sh", "-c", "kill -0 $(cat /tmp/pid) && echo runs; test -d /mnt/home/data && echo mounted"])
            box.run(["sh", "-c", "touch /file 2>/dev/null || echo read-only; ps | head -n 2 | cut -c 1-6"])
        try:
            box.run(["true"])
        except enroot_py.ContainerError as e:
            print(e)
        """,
    )
    assert output.split("\n") == (
        "1 2 yes\n/tmp\nruns\nmounted\nread-only\nPID   \n    1 \nthe container is closed\n".split("\n")
    )
    nothing_is_left(user)


@pytest.mark.parity("enroot_py: errors")
def test_bad_input_names_the_fix(user: User, rootfs: Path) -> None:
    output = python(
        user,
        """
        def error(act):
            try:
                act()
            except enroot_py.PenrootError as e:
                print(type(e).__name__, e.exit_code, e, bool(e.hint), sep=" | ")

        error(lambda: enroot_py.Container("nothing"))
        error(lambda: enroot_py.Container("box", mounts="/a:/b"))
        error(lambda: enroot_py.Container("box", mounts=["/nowhere:/mnt"]))
        error(lambda: enroot_py.Container("box", env={"A=": "1"}))
        error(lambda: enroot_py.run("box", "true"))
        error(lambda: enroot_py.run("box", ["true", "a\\0"]))
        error(lambda: enroot_py.run("box", ["nothing"]))
        error(lambda: enroot_py.run("box", ["true"], cwd="/nowhere"))
        with enroot_py.Container("box") as box:
            error(lambda: box.run(["/etc/environment"]))
            error(lambda: box.popen(["nothing"], stdin=PIPE, stdout=PIPE, stderr=PIPE))
            error(lambda: box.run(["true"], cwd="/nowhere"))
            error(lambda: box.run(["true"], input="", stdin=PIPE))
            error(lambda: box.copy_to("/nowhere", "/tmp"))
            error(lambda: box.copy_to(__import__("enroot_py").__file__, "/file"))
            error(lambda: box.copy_from("/dev/null", "/tmp"))
        error(lambda: enroot_py.pull("docker://"))
        """,
    )
    first = [line.split(" | ")[:2] for line in output.splitlines()]
    assert first == [
        [name, status]
        for name, status in zip(
            "ContainerError UsageError MountError UsageError UsageError UsageError CommandError ContainerError "
            "CommandError CommandError ContainerError UsageError ContainerError ContainerError ContainerError "
            "ImageReferenceError".split(),
            "1 1 1 1 1 1 127 1 126 127 1 1 1 1 1 1".split(),
            strict=True,
        )
    ], output
    assert "no such container: nothing in" in output
    nothing_is_left(user)


@pytest.mark.parity("enroot_py: a timeout")
def test_timeout_ends_program_and_its_children(user: User, rootfs: Path, image: Path) -> None:
    output = python(
        user,
        """
        def expired(act):
            try:
                act()
            except subprocess.TimeoutExpired as e:
                print("expired", e.timeout)

        words = ["sh", "-c", "sleep 61 & sleep 62"]
        expired(lambda: enroot_py.run("box", words, timeout=0.2))
        expired(lambda: enroot_py.run("box.sqsh", words, timeout=0.2))
        expired(lambda: enroot_py.run("box", words, timeout=0.2, writable=True))
        with enroot_py.Container("box") as box:
            expired(lambda: box.run(words, timeout=0.2, capture_output=True))
            expired(lambda: asyncio.run(box.run_async(words, timeout=0.2, capture_output=True)))
            time.sleep(0.2)
            box.run(["sh", "-c", "ps | grep -c '[s]leep 6'"])
        """,
    )
    assert output == "expired 0.2\n" * 5 + "0\n"
    nothing_is_left(user)


@pytest.mark.parity("Container.popen")
def test_popen_has_pipes_and_signals(user: User, rootfs: Path) -> None:
    output = python(
        user,
        """
        with enroot_py.Container("box") as box:
            with box.popen(["cat"], stdin=PIPE, stdout=PIPE, text=True) as cat:
                cat.stdin.write("a line\\n"); cat.stdin.flush()
                print(cat.stdout.readline(), isinstance(cat, subprocess.Popen), cat.poll())
            print(cat.returncode)
            trap = box.popen(["sh", "-c", "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.01; done"],
                             stdout=PIPE, text=True)
            trap.stdout.readline()
            threading.Timer(0.1, trap.terminate).start()
            print(trap.communicate()[0], trap.wait())
            sleep = box.popen(["sleep", "60"])
            sleep.kill()
            print(sleep.wait(), sleep.poll(), sleep.kill())
            left = box.popen(["sleep", "60"])
        print(left.wait(), os.path.exists(f"/proc/{left.pid}"))
        """,
    )
    assert output == "a line\n True None\n0\ncaught\n 5\n-9 -9 None\n-9 False\n"


@pytest.mark.parity("enroot_py: threads")
def test_threads_start_containers_at_once(user: User, rootfs: Path, image: Path) -> None:
    output = python(
        user,
        """
        from concurrent.futures import ThreadPoolExecutor
        def one(number):
            name = "box.sqsh" if number % 6 == 5 else "box"
            with enroot_py.Container(name, env={"N": str(number)}, writable=number % 2 == 0) as box:
                text = "echo $N > /tmp/n; cat /tmp/n; ps | grep -c '[p]enroot-init'"
                mine = box.run(["sh", "-c", text], capture_output=True)
            once = enroot_py.run("box", ["sh", "-c", f"exit {number}"])
            return mine.stdout.split()[:2] == [b"%d" % number, b"1"] and once.returncode == number
        with ThreadPoolExecutor(8) as pool:
            print(sum(pool.map(one, range(24))))
        """,
    )
    assert output == "24\n"
    nothing_is_left(user)


@pytest.mark.parity("Container.run_async")
def test_asyncio_runs_programs_at_once(user: User, rootfs: Path) -> None:
    output = python(
        user,
        """
        async def main():
            with enroot_py.Container("box") as box:
                texts = [str(n).encode() * 100_000 for n in range(8)]
                done = await asyncio.gather(
                    *(box.run_async(["sh", "-c", "sleep 0.3; cat"], input=text, capture_output=True) for text in texts))
                print([one.stdout for one in done] == texts, {one.returncode for one in done})
                task = asyncio.create_task(box.run_async(["sleep", "60"]))
                await asyncio.sleep(0.3)
                task.cancel()
                print(type((await asyncio.gather(task, return_exceptions=True))[0]).__name__)
                try:
                    await box.run_async(["false"], check=True)
                except subprocess.CalledProcessError as e:
                    print(e.returncode)
                print((await box.run_async(["sh", "-c", "ps | grep -c '[s]leep 60'"], capture_output=True)).stdout)
                print(repr((await box.run_async(["cat"], input="é", text=True, capture_output=True)).stdout))
        asyncio.run(main())
        """,
    )
    assert output == "True {0}\nCancelledError\n1\nb'0\\n'\n'é'\n"


@pytest.mark.parity("Container, writable")
def test_changes_disappear_with_the_container(user: User, rootfs: Path) -> None:
    output = python(
        user,
        """
        with enroot_py.Container("box", writable=True) as one, enroot_py.Container("box", writable=True) as two:
            one.run(["sh", "-c", "echo 1 > /file; rm -r /opt; mkdir -m 0 /closed"])
            two.run(["sh", "-c", "cat /file; ls -d /opt"])
            print(sum(name.startswith(".rw.") for name in os.listdir(os.environ["ENROOT_DATA_PATH"])))
        with enroot_py.Container("box", writable=True, root=True) as box:
            box.run(["sh", "-c", "id -u; ls -d /file /opt"])
        """,
    )
    assert output == "/opt\n2\n0\n/opt\n"
    assert (rootfs / "opt/work").is_dir() and not (rootfs / "file").exists()
    nothing_is_left(user)


@pytest.mark.parity("Container.copy_to")
def test_files_are_copied_both_ways(user: User, rootfs: Path) -> None:
    user.write("tree/sub/run.sh", "#!/bin/sh\necho ran\n", 0o755)
    os.symlink("/etc/passwd", user.home / "tree/link")
    (user.home / "outside").mkdir()
    user.own(user.home / "outside")
    output = python(
        user,
        """
        with enroot_py.Container("box", writable=True) as box:
            box.copy_to("tree", "/app/")
            box.copy_to("tree/sub/run.sh", "/app/second")
            box.run(["sh", "-c", "/app/tree/sub/run.sh; /app/second; readlink /app/tree/link"])
            box.run(["sh", "-c", "mkdir -p /made/x && ln -s /outside /made/to && echo text > /made/x/file"])
            box.copy_from("/made", "out")
            box.copy_from("/made/x/file", "out/")
            print(open("out/x/file").read(), open("out/file").read(), os.readlink("out/to"))
            os.symlink(os.path.abspath("outside"), "out/y")
            box.run(["sh", "-c", "mkdir /made/y && touch /made/y/escaped"])
            try:
                box.copy_from("/made/.", "out/../out")
                box.copy_from("/made/y", "out/y/../")
            except enroot_py.ContainerError as e:
                print(e)
        """,
    )
    assert output.startswith("ran\nran\n/etc/passwd\ntext\n text\n /outside\n")
    assert not list((user.home / "outside").iterdir())


@pytest.mark.parity("Container.export")
def test_exported_image_starts_with_the_changes(user: User, rootfs: Path, image: Path) -> None:
    for name in ("box", str(image)):
        output = python(
            user,
            f"""
            with enroot_py.Container({name!r}, writable=True) as box:
                box.run(["sh", "-c", "echo changed > /file; rm /bin/touch"])
                box.export("mine.sqsh", overwrite={name != "box"})
            enroot_py.run("mine.sqsh", ["sh", "-c", "cat /file; ls /bin/touch 2>/dev/null; ls -d /opt"])
            """,
        )
        assert output == "changed\n/opt\n"
    nothing_is_left(user)


@pytest.mark.parity("enroot_py: SIGKILL", "penroot-init")
def test_container_ends_with_the_api_process(user: User, rootfs: Path) -> None:
    text = """
        box = enroot_py.Container("box", writable=True)
        threading.Thread(target=enroot_py.run, args=("box", ["sleep", "63"]), kwargs={"writable": True}).start()
        box.run(["sh", "-c", "setsid sleep 64 & setsid sleep 65 &"])
        time.sleep(0.5)
        print("ready", flush=True)
        time.sleep(60)
        """
    with user.running("/usr/bin/python3", "-c", HEAD + textwrap.dedent(text), stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        assert (
            sum(line.startswith("sleep 6") for line in processes_of(user).values()) == 3 and len(leftovers(user)) == 2
        )
        process.kill()
        process.wait()
        nothing_is_left(user)


@pytest.mark.parity("enroot_py: SIGKILL")
def test_killed_launcher_takes_its_containers_along(user: User, rootfs: Path) -> None:
    output = python(
        user,
        f"""
        box = enroot_py.Container("box", writable=True)
        sleep = box.popen(["sleep", "60"])
        {MAIN}
        os.kill(client.launcher()._process.pid, signal.SIGKILL)
        print(sleep.wait())
        try:
            box.run(["true"])
        except enroot_py.ContainerError as e:
            print(bool(e.hint))
        box.close()
        with enroot_py.Container("box", writable=True) as other:
            other.run(["echo", "goes on"])
            print(len([name for name in os.listdir(os.environ["ENROOT_DATA_PATH"]) if name.startswith(".")]))
        """,
    )
    assert output.split("\n", 1)[1] == "-9\nTrue\ngoes on\n1\n"
    nothing_is_left(user)


@pytest.mark.parametrize("how", ["container", "start"])
@pytest.mark.parity("enroot_py: SIGKILL", "start --rw=disk")
def test_next_start_removes_what_sigkill_left(user: User, rootfs: Path, how: str) -> None:
    if how == "container":
        text = f"box = enroot_py.Container('box', writable=True)\n{MAIN}; sys.stdout.flush(); time.sleep(60)"
        command = ["/usr/bin/python3", "-c", HEAD + text]
    else:
        command = ["penroot", "start", "--rw=disk", "box", "sh", "-c", "echo 0; sleep 60"]
    with user.running(*command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        launcher = int(process.stdout.readline())
        assert len(leftovers(user)) == 1
        for pid in (process.pid, launcher):
            if pid:
                os.kill(pid, signal.SIGKILL)
        process.wait()
        until(lambda: not processes_of(user), "no process")
    assert len(leftovers(user)) == 1
    assert user.start("--rw=disk", "box", "sh", "-c", "echo x > /file; cat /file") == "x\n"
    nothing_is_left(user)


@pytest.mark.parity("start --rw=disk")
def test_rw_disk_keeps_nothing(user: User, rootfs: Path, image: Path) -> None:
    for target in ("box", str(image)):
        script = "touch /file && ls -d /opt/work && df / >/dev/null 2>&1; exit 4"
        assert user.penroot("start", "--rw=disk", target, "sh", "-c", script, status=4).stdout == "/opt/work\n"
    user.penroot("create", "--name", "changed", str(image))
    user.start("--rw", "changed", "touch", "/kept")
    assert user.start("--rw=disk", "changed", "sh", "-c", "ls /kept; rm /kept; touch /gone") == "/kept\n"
    assert user.start("changed", "sh", "-c", "ls /kept /gone 2>/dev/null || true") == "/kept\n"
    assert "--rw=disk for changes on disk" in user.penroot("start", "--rw=tape", "box", status=1).stderr
    nothing_is_left(user)


@pytest.mark.parity("penroot-init")
def test_first_process_cannot_be_influenced(user: User, rootfs: Path) -> None:
    """Programs in the container run as the same user as its first process, but cannot trace or kill it."""
    output = python(
        user,
        """
        with enroot_py.Container("box", writable=True) as box:
            attack = "kill -9 1; kill -STOP 1; cat /proc/1/environ; readlink /proc/1/exe; echo > /proc/1/fd/0"
            box.run(["sh", "-c", attack], stderr=subprocess.DEVNULL)
            box.run(["sh", "-c", "cut -d' ' -f3 /proc/1/stat; grep CapEff /proc/self/status"])
        """,
    )
    assert output.split() == ["S", "CapEff:", "0000000000000000"]
    nothing_is_left(user)


def test_forked_process_has_its_own_launcher(user: User, rootfs: Path) -> None:
    output = python(
        user,
        """
        box = enroot_py.Container("box")
        child = os.fork()
        if not child:
            print(enroot_py.run("box", ["sh", "-c", "exit 6"]).returncode, flush=True)
            try:
                box.run(["true"])
            except enroot_py.ContainerError:
                print("not mine", flush=True)
            box.close()
            sys.exit()
        os.waitpid(child, 0)
        print(box.run(["true"]).returncode)
        """,
    )
    assert output == "6\nnot mine\n0\n"
    nothing_is_left(user)


def test_warnings_go_to_the_log(user: User, rootfs: Path) -> None:
    output = python(
        user,
        """
        import logging
        logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
        enroot_py.run("box", ["true"], env={"SSL_CERT_FILE": "/nowhere"})
        """,
    )
    assert output.startswith("penroot WARNING no such file or directory in the container: SSL_CERT_FILE=/nowhere")


@pytest.mark.parity("enroot_py: the tutorial")
def test_agent_runs_commands(user: User, rootfs: Path) -> None:
    """examples/agent.py runs each line of stdin in the container, and prints the results as JSON."""
    program = ROOT / "examples/agent.py"
    done = user.run(
        *("/usr/bin/python3", str(program), "box"),
        env={"PYTHONPATH": LIBRARY},
        stdin="echo one > file\ncat file; false\nnothing\n",
    )
    observed = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["status"] for each in observed] == [0, 1, 127]
    assert observed[1]["output"] == "one\n"
    assert (user.home / "work/file").read_text() == "one\n"
    nothing_is_left(user)


@pytest.mark.parity("enroot_py: the tutorial")
def test_fixture_gives_each_test_a_container(user: User, rootfs: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(ROOT / "examples/test_in_container.py"),
    ]
    done = user.run(*command, env={"PYTHONPATH": LIBRARY, "IMAGE": "box", "PYTHONDONTWRITEBYTECODE": "1"})
    assert "2 passed" in done.stdout
    nothing_is_left(user)


@pytest.mark.parity("enroot_py.pull")
def test_pulled_image_runs(user: User, registry: Server) -> None:
    config = {"Env": ["GREETING=hello", "PATH=/bin"], "WorkingDir": "/srv", "Cmd": ["sh"]}
    image = images.busybox()
    image.settings = config
    registry.pusher.image("test/api", "1", image)
    output = python(
        user,
        f"""
        image = enroot_py.pull("docker://{registry.host}/test/api:1")
        print(image.digest[:7], len(image.digest), image.config["WorkingDir"], len(image.layers), image.size > 1000)
        print(image == enroot_py.pull("docker://{registry.host}/test/api:1"), len({{image}}))
        with enroot_py.Container(image) as box:
            box.run(["sh", "-c", "echo $GREETING; pwd"])
        enroot_py.run(image, ["sh", "-c", "echo once"])
        enroot_py.run("docker://{registry.host}/test/api:1", ["sh", "-c", "echo twice"])
        try:
            enroot_py.pull("docker://{registry.host}/test/nothing:1")
        except enroot_py.RegistryError as e:
            print("refused")
        """,
    )
    assert output == "sha256: 71 /srv 1 True\nTrue 1\nhello\n/srv\nonce\ntwice\nrefused\n"


@pytest.mark.parity("enroot_py: the tutorial")
def test_tutorial_runs(user: User, registry: Server, packed: Path) -> None:
    registry.pusher.image("debian", "12", images.busybox())
    text = (
        (ROOT / "docs/tutorials/python.md")
        .read_text()
        .replace("docker://debian:12", f"docker://{registry.host}/debian:12")
    )
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) == 5
    output = user.run("/usr/bin/python3", "-c", HEAD + "\n".join(blocks)).stdout
    assert output.startswith("no such container: no-such-container in ")
    assert (user.home / "result").read_text() == "data\n"
    assert user.start("mine.sqsh", "cat", "/app/file") == "data\n"
    nothing_is_left(user)
