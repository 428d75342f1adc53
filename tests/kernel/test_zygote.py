"""Many starts of one squashfs file from Python: a zygote clones process 1 of each container.

The launcher, which starts containers for the Python program, is the parent of the zygote and of its clones.
"""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest

from tests.kernel.conftest import User, pack, servers
from tests.kernel.test_api import nothing_is_left, python

# run_by_zygote() repeats a start until the launcher is the parent of the container's process 1, as with a zygote.
HEAD = """
from pathlib import Path
from enroot_py.api import client

def parent_of(sleeper):
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cmdline").read_bytes() == b"sleep\\0%s\\0" % sleeper.encode():
                return int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has just ended
            continue

def run_by_zygote(image, seconds="0.21"):
    for _ in range(100):
        thread = threading.Thread(target=lambda: enroot_py.run(image, ["sleep", seconds], check=True))
        thread.start()
        while thread.is_alive():
            parent = parent_of(seconds)
            if parent == client.launcher()._process.pid:
                return thread
            time.sleep(0.01)
    raise AssertionError("no start by a zygote")

def executable(pid):
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:  # the process has just ended
        return ""

def zygotes():
    launcher = client.launcher()._process.pid
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if executable(pid) == executable("self")]

def shown(*words):
    return enroot_py.run(image, [*words], stdout=PIPE, stderr=subprocess.STDOUT, text=True).stdout
"""


def zygote(user: User, image: Path, text: str) -> list[str]:
    """Run a Python program that knows the ``image``, and return the lines that it prints."""
    return python(user, f"image = {str(image)!r}\n{HEAD}{textwrap.dedent(text)}").splitlines()


def pack_new(user: User, rootfs: Path) -> None:
    """Make the image new.sqsh, in which /etc/environment has other content."""
    (rootfs / "etc/environment").write_text("NEW=yes\n")
    user.own(pack(rootfs, user.home / "new.sqsh"))


def test_containers_of_a_zygote_are_as_others(user: User, rootfs: Path, image: Path) -> None:
    lines = zygote(
        user,
        image,
        """
        facts = "id -u; id -g; cat /proc/self/uid_map; echo $$ $PPID; ls /proc/self/fd; stat -c '%a %u %n' /*"
        first = shown("sh", "-c", facts)
        with enroot_py.Container(image):  # keeps the image's server running
            run_by_zygote(image).join()
            print({shown("sh", "-c", facts) for _ in range(20)} == {first})
            print({enroot_py.run(image, ["sh", "-c", "exit 5"]).returncode for _ in range(20)})
            with enroot_py.Container(image) as box:
                print(box.run(["sh", "-c", "echo $A"], env={"A": "b"}, stdout=PIPE).stdout)
            try:
                enroot_py.run(image, ["/missing"])
            except enroot_py.PenrootError as e:
                print(e)
        """,
    )
    assert lines[:3] == ["True", "{5}", "b'b\\n'"] and "/missing" in lines[3]
    nothing_is_left(user)


def test_replaced_file_is_started_at_once(user: User, rootfs: Path, image: Path) -> None:
    pack_new(user, rootfs)
    lines = zygote(
        user,
        image,
        """
        with enroot_py.Container(image):
            run_by_zygote(image).join()
            os.rename("new.sqsh", image)
            print(shown("cat", "/etc/environment"))
        """,
    )
    assert lines[0] == "NEW=yes"
    nothing_is_left(user)


@pytest.mark.parametrize("victim", ["zygote", "server"])
def test_starts_go_on_after_a_kill(user: User, rootfs: Path, image: Path, victim: str) -> None:
    victims = {"zygote": "zygotes()", "server": "servers()"}[victim]
    lines = zygote(
        user,
        image,
        f"""
        def servers():
            return [*map(int, subprocess.check_output(["pgrep", f"--uid={{os.getuid()}}", "squashfuse"]).split())]
        box = enroot_py.Container(image)
        run_by_zygote(image).join()
        for pid in {victims}:
            os.kill(pid, signal.SIGKILL)
        for _ in range(20):
            try:
                print(enroot_py.run(image, ["true"]).returncode)
            except enroot_py.PenrootError as e:
                print(e)
        """,
    )
    assert lines[-1] == "0" and set(lines[1:]) == {"0"}  # the kill may make one start fail
    nothing_is_left(user)


def test_zygote_ends_soon_after_the_last_start(user: User, rootfs: Path, image: Path) -> None:
    """A zygote keeps the server of its image running, so it ends soon after the last container."""
    lines = zygote(
        user,
        image,
        """
        box = enroot_py.Container(image)
        run_by_zygote(image).join()
        box.close()
        for _ in range(300):
            if not zygotes():
                break
            time.sleep(0.01)
        print(len(zygotes()))
        """,
    )
    assert lines == ["0"]
    assert not servers(user.home)


@pytest.mark.security("C14")
def test_programs_of_a_zygote_inherit_no_descriptor(user: User, rootfs: Path, image: Path) -> None:
    lines = zygote(
        user,
        image,
        """
        with enroot_py.Container(image):
            run_by_zygote(image).join()
            text = "for fd in /proc/$$/fd/*; do readlink $fd; done | grep -v '^pipe:\\\\|^/proc/'; true"
            listing = ["sh", "-c", text]
            for _ in range(20):
                done = enroot_py.run(image, listing, stdin=subprocess.DEVNULL, stdout=PIPE, stderr=subprocess.STDOUT)
                print(done.stdout)
        """,
    )
    assert set(lines) == {"b'/dev/null\\n'"}


def test_stopped_zygote_holds_up_no_start(user: User, rootfs: Path, image: Path) -> None:
    lines = zygote(
        user,
        image,
        """
        with enroot_py.Container(image):
            run_by_zygote(image).join()
            for pid in zygotes():
                os.kill(pid, signal.SIGSTOP)
            print(enroot_py.run(image, ["true"], timeout=60).returncode)
        """,
    )
    assert lines == ["0"]
    nothing_is_left(user)


@pytest.mark.parametrize("victim", ["launcher", "os.getpid()"])
def test_stopped_zygote_ends_with_the_launcher(user: User, rootfs: Path, image: Path, victim: str) -> None:
    zygote_of_launcher = f"""
        box = enroot_py.Container(image)
        run_by_zygote(image).join()
        launcher = client.launcher()._process.pid
        for pid in zygotes():
            os.kill(pid, signal.SIGSTOP)
        os.kill({victim}, signal.SIGKILL)
        os._exit(0)
        """
    text = f"image = {str(image)!r}\n{HEAD}{textwrap.dedent(zygote_of_launcher)}"
    python(user, text, status=0 if victim == "launcher" else -signal.SIGKILL)
    nothing_is_left(user)


def test_link_that_changes_leads_to_its_new_image(user: User, rootfs: Path, image: Path) -> None:
    pack_new(user, rootfs)
    lines = zygote(
        user,
        image,
        """
        link = os.path.dirname(image) + "/link"
        def switch():
            time.sleep(0.001 * number)
            os.symlink("new.sqsh", link + ".new")
            os.rename(link + ".new", link)
        for number in range(6):
            os.symlink("box.sqsh", link + ".old")
            os.rename(link + ".old", link)
            time.sleep(0.6)
            thread = threading.Thread(target=switch)
            thread.start()
            enroot_py.run(link, ["true"])
            thread.join()
            print(*{enroot_py.run(link, ["cat", "/etc/environment"], stdout=PIPE).stdout for _ in range(3)})
        """,
    )
    assert lines == ["b'NEW=yes\\n'"] * 6


def test_zygote_ends_while_the_launcher_is_busy(user: User, rootfs: Path, image: Path) -> None:
    lines = zygote(
        user,
        image,
        """
        other, box = enroot_py.Container("box"), enroot_py.Container(image)
        run_by_zygote(image).join()
        box.close()
        end = time.monotonic() + 60
        while zygotes() and time.monotonic() < end:
            other.run(["true"])
        print(len(zygotes()))
        """,
    )
    assert lines == ["0"]
