"""start --net=pasta --publish: pasta(1) connects the container's private network with the host's network."""

from __future__ import annotations

import contextlib
import http.server
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import User, require
from tests.waiting import until

OUTSIDE = "198.51.100.77"  # TEST-NET-2, RFC 5737
HIDDEN = ("unshare", "--mount", "sh", "-c", 'mount --bind /dev/null "$0" && exec "$@"')
LOCAL_RESOLVER = (
    *("unshare", "--mount", "sh", "-c"),
    'printf "search lab\\nnameserver 127.0.0.53\\n" > "$0" && mount --bind "$0" /etc/resolv.conf && exec "$@"',
)

ECHO = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("", {}))
    while True:
        server.sendto(*server.recvfrom(100))
"""


@pytest.fixture(autouse=True)
def tun() -> None:
    require(shutil.which("pasta"), "passt is not installed")
    require(os.path.exists("/dev/net/tun"), "this machine has no /dev/net/tun")
    require(os.geteuid() == 0, "only root can open /dev/net/tun to a user, and add an address")
    os.chmod("/dev/net/tun", 0o666)  # udev sets this mode


@pytest.fixture
def page(tmp_path: pathlib.Path) -> Iterator[int]:
    """Return the port of a web server that listens on all addresses of this machine, including OUTSIDE."""
    (tmp_path / "page").write_text("from outside")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            return

    address = ["ip", "address", "add", f"{OUTSIDE}/32", "dev", "lo"]
    subprocess.run(address, check=False, stderr=subprocess.DEVNULL)  # fails if another test has added it
    with http.server.ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def pastas(user: User) -> list[int]:
    """Return the PIDs of the user's pasta processes."""
    pids = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid in (
                0,
                user.uid,
            ):  # pasta is not dumpable, so root owns its /proc/PID
                command = pathlib.Path(f"/proc/{name}/cmdline").read_bytes()
                status = pathlib.Path(f"/proc/{name}/status").read_text()
                if command.startswith(b"/usr/bin/pasta\0") and f"\nUid:\t{user.uid}\t" in status:
                    pids.append(int(name))
    return pids


@pytest.mark.parity("start --net=pasta, ENROOT_NET_PASTA")
@pytest.mark.security("O9")
@pytest.mark.parametrize("root", [(), ("--root",)])
@pytest.mark.parametrize("writable", [(), ("--rw",)])
def test_pasta_leads_outside_only(
    user: User, rootfs: pathlib.Path, page: int, root: tuple[str, ...], writable: tuple[str, ...]
) -> None:
    """The container has a private loopback interface. Even root in the container cannot reach the host's loopback."""
    script = f"""
        busybox wget -q -O - http://{OUTSIDE}:{page}/page; echo
        busybox wget -q -O - http://127.0.0.1:{page}/page 2>&1 | grep -c refused
        busybox ip address del 127.0.0.1/8 dev lo 2>&1 | grep -c permitted
        busybox ip route add local 127.0.0.1 dev eth0 2>&1 | grep -c permitted
        ls /sys/class/net | wc -w"""
    output = user.start(*root, *writable, "--net=pasta", "box", "sh", "-c", script)
    assert output == "from outside\n1\n1\n1\n2\n"  # 2 interfaces: lo and pasta's


@pytest.mark.parity("start --publish PORT")
@pytest.mark.parametrize("root", [(), ("--root",)])
def test_published_port_leads_into_the_container(user: User, rootfs: pathlib.Path, root: tuple[str, ...]) -> None:
    port = free_port()
    script = "echo inside > /tmp/page.$$; cd /tmp; mv page.$$ page; busybox httpd -f -p 80 -h /tmp"
    command = ["penroot", "start", "--rw", *root, "--net=pasta", f"--publish=127.0.0.1:{port}:80", "-m", "tmpfs:/tmp"]
    with user.running(*command, "box", "sh", "-c", script):
        until(lambda: fetched(f"http://127.0.0.1:{port}/page") == b"inside\n", "the page")
    until(lambda: not pastas(user), "the end of pasta")


def fetched(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bytes(reply.read())
    except OSError:
        return b""


def test_published_udp_port_leads_into_the_container(user: User, rootfs: pathlib.Path) -> None:
    """The host and the container use the same port, because pasta of Debian 12 loses answers from another port."""
    port = free_port(socket.SOCK_DGRAM)
    mounts = ["/usr:/usr:ro", "/usr/lib:/lib:ro", "/usr/lib64:/lib64:ro"]
    command = [
        "penroot",
        "start",
        "--net=pasta",
        f"--publish={port}:{port}/udp",
        *(f"--mount={mount}" for mount in mounts),
    ]
    command += ["box", "/usr/bin/python3", "-c", ECHO.format(port)]
    with user.running(*command), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(0.2)

        def is_echoed() -> bool:
            client.sendto(b"hello", ("127.0.0.1", port))
            with contextlib.suppress(OSError):
                return client.recv(10) == b"hello"
            return False

        until(is_echoed, "the echo")


def test_port_in_use_is_an_error(user: User, rootfs: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        publish = f"--publish=127.0.0.1:{port}:80"
        done = user.penroot("start", "--net=pasta", publish, "box", "true", status=1)
    assert "pasta cannot connect the container" in done.stderr and str(port) in done.stderr
    until(lambda: not pastas(user), "the end of pasta")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--net=pasta", "--publish=http"], "a port is a number from 1 to 65535"),
        (["--net=pasta", "--publish=0:80"], "a port is a number from 1 to 65535"),
        (["--net=pasta", "--publish=1-2:3"], "the ranges must have the same length"),
        (["--net=pasta", "--publish=80/sctp"], "the protocol must be tcp or udp"),
        (["--net=pasta", "--publish=example.org:80:80"], "example.org is not an IP address"),
        (["--publish=8080:80"], "only --net=pasta publishes ports"),
        (["--net", "--publish=8080:80"], "only --net=pasta publishes ports"),
    ],
)
def test_unusable_port_is_refused(user: User, rootfs: pathlib.Path, words: list[str], message: str) -> None:
    done = user.penroot("start", *words, "box", "true", status=1)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("/usr/bin/pasta", "pasta is not installed on", "install the package passt"),
        ("/dev/net/tun", "cannot open /dev/net/tun on", "modprobe tun; chmod 666 /dev/net/tun"),
    ],
)
def test_missing_prerequisite_is_named(user: User, rootfs: pathlib.Path, path: str, message: str, hint: str) -> None:
    prefix = HIDDEN if path.startswith("/usr") else ("unshare", "--mount", "sh", "-c", _NO_TUN)
    done = user.penroot("start", "--net=pasta", "box", "true", status=1, prefix=(*prefix, path))
    assert message in done.stderr and hint in done.stderr


_NO_TUN = 'mount -t tmpfs none /dev/net && touch "$0" && chmod 600 "$0" && exec "$@"'


def test_resolver_on_the_loopback_is_replaced(user: User, rootfs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    prefix = (*LOCAL_RESOLVER, str(tmp_path / "resolv.conf"))
    for words in ([], ["--rw"], ["--root"]):
        done = user.penroot("start", *words, "--net=pasta", "box", "cat", "/etc/resolv.conf", prefix=prefix)
        assert done.stdout == "nameserver 169.254.1.1\nsearch lab\n", words
    assert "127.0.0.53" in user.penroot("start", "--net", "box", "cat", "/etc/resolv.conf", prefix=prefix).stdout


@pytest.mark.parametrize("end", ["exit", "SIGKILL"])
def test_pasta_ends_with_the_container(user: User, rootfs: pathlib.Path, end: str) -> None:
    command = ["penroot", "start", "--net=pasta", "box", "sh", "-c", "echo up; read line"]
    with user.begin(*command, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert len(pastas(user)) == 1
        if end == "SIGKILL":
            process.send_signal(signal.SIGKILL)
        process.communicate("\n")
    until(lambda: not pastas(user), "the end of pasta")


def test_container_in_the_background_has_the_network(user: User, rootfs: pathlib.Path, page: int) -> None:
    name = user.start("--detach", "--net=pasta", "box", "sleep", "100").strip()
    script = f"busybox wget -q -O - http://{OUTSIDE}:{page}/page"
    for words in ([], ["--root"]):
        user.penroot("stop", name)
        name = user.start("--detach", *words, "--net=pasta", "box", "sleep", "100").strip()
        assert user.penroot("exec", name, "sh", "-c", script).stdout == "from outside"
    user.penroot("stop", name)
    until(lambda: not pastas(user), "the end of pasta")


@pytest.mark.security("O9")
def test_program_cannot_enter_pasta(user: User, rootfs: pathlib.Path) -> None:
    """pasta has sockets in the host's network namespace."""
    script = "for p in /proc/[0-9]*; do test $p = /proc/$$ || ls -d $p/root/ $p/fd/0 $p/cwd/ $p/ns/net; done 2>&1; true"
    for root in ((), ("--root",)):
        out = user.start(*root, "--net=pasta", "box", "sh", "-c", script)
        accessible = [line for line in out.splitlines() if not line.startswith("ls: ")]
        assert not [line for line in accessible if line.startswith("/proc/2/")], out


def test_python_gets_the_network(user: User, rootfs: pathlib.Path, page: int) -> None:
    script = f"""
import enroot_py
words = ["busybox", "wget", "-q", "-O", "-", "http://{OUTSIDE}:{page}/page"]
with enroot_py.Container("box", net="pasta") as box:
    print(box.run(words, capture_output=True, text=True).stdout)
print(enroot_py.run("box", words, net="pasta", capture_output=True, text=True).stdout)
try:
    enroot_py.run("box", words, publish="80:80")
except enroot_py.PenrootError as e:
    print(e)
"""
    from tests.kernel.test_api import python

    assert python(user, script) == "from outside\nfrom outside\npublish='80:80' is not a list\n"
    until(lambda: not pastas(user), "the end of pasta")
