"""start --net=proxy=SOCKET: the container's only connection is a proxy on a Unix socket of the caller."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import User
from tests.waiting import until

FETCH = "wget -q -O - http://example.org/page"


class Proxy(socketserver.StreamRequestHandler):
    """A proxy that answers with the first line of the request and a megabyte. A test counts these bytes."""

    def handle(self) -> None:
        line = self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        body = line + b"x" * (1 << 20)
        self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


@pytest.fixture
def proxy(user: User) -> Iterator[pathlib.Path]:
    path = user.home / "proxy.sock"
    with socketserver.ThreadingUnixStreamServer(str(path), Proxy) as server:
        user.own(path)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield path
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parity("start --net=proxy=SOCKET")
@pytest.mark.security("O8")
@pytest.mark.parametrize("root", [(), ("--root",)])
@pytest.mark.parametrize("writable", [(), ("--rw",)])
def test_proxy_is_the_only_connection(
    user: User, rootfs: pathlib.Path, proxy: pathlib.Path, root: tuple[str, ...], writable: tuple[str, ...]
) -> None:
    script = f"{FETCH}; echo; ls /sys/class/net | tr '\\n' ' '; cat /proc/net/route | wc -l"
    out = user.start(*root, *writable, f"--net=proxy={proxy}", "box", "sh", "-c", script)
    page, rest = out.split("\n", 1)
    assert page.startswith("GET http://example.org/page HTTP/1.")
    assert rest.count("x") == 1 << 20
    assert rest.splitlines()[-1] == "lo 1"


def test_relative_path_names_the_socket(user: User, rootfs: pathlib.Path, proxy: pathlib.Path) -> None:
    assert user.start("--net=proxy=proxy.sock", "box", "sh", "-c", FETCH).startswith("GET ")


def test_proxy_that_does_not_listen_is_a_502(user: User, rootfs: pathlib.Path) -> None:
    path = user.home / "proxy.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    user.own(path)
    done = user.penroot("start", f"--net=proxy={path}", "box", "sh", "-c", FETCH, status=None)
    assert done.returncode != 0
    assert "502" in done.stderr


@pytest.mark.parametrize("target", ["", "proxy=", "pasta=", "proxy=/missing", "proxy=/etc/passwd"])
def test_unusable_network_is_refused(user: User, rootfs: pathlib.Path, target: str) -> None:
    done = user.penroot("start", f"--net={target}", "box", "true", status=None)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("[ERROR]")]) == 1


def test_variable_without_namespaces_is_refused(user: User, rootfs: pathlib.Path, proxy: pathlib.Path) -> None:
    """ENROOT_NET_PROXY needs private network and PID namespaces, which --net=proxy adds."""
    done = user.penroot("start", "box", "true", env={"ENROOT_NET_PROXY": str(proxy)}, status=None)
    assert done.returncode != 0
    assert "private network and PID namespaces" in done.stderr


def test_relay_that_cannot_start_is_a_failure(user: User, rootfs: pathlib.Path, proxy: pathlib.Path) -> None:
    """With few descriptors, the start fails or the relay listens on port 3128, which is 0C38 in /proc/net/tcp."""
    for limit in range(5, 13):
        script = f"ulimit -n {limit}; exec penroot start --net=proxy={proxy} box grep -c :0C38 /proc/net/tcp"
        assert user.run("sh", "-c", script, status=None).stdout in ("", "1\n"), limit


@pytest.mark.parametrize("end", ["exit", "SIGKILL"])
def test_relay_ends_with_the_container(user: User, rootfs: pathlib.Path, proxy: pathlib.Path, end: str) -> None:
    command = ["penroot", "start", f"--net=proxy={proxy}", "box", "sh", "-c", "echo up; read line"]
    with user.begin(*command, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert len(processes(user)) >= 3  # the process that waits for the container, the shell and the relay
        if end == "SIGKILL":
            process.send_signal(signal.SIGKILL)
        process.communicate("\n")
    until(lambda: not processes(user), "the end of the relay")


def test_program_cannot_enter_the_relay(user: User, rootfs: pathlib.Path, proxy: pathlib.Path) -> None:
    """The relay runs beside the container's program, and has the host's root directory."""
    script = "for p in /proc/[0-9]*; do test $p = /proc/$$ || ls -d $p/root/ $p/fd/0 $p/cwd/; done 2>&1 | sort -u"
    for root in ((), ("--root",)):
        out = user.start(*root, f"--net=proxy={proxy}", "box", "sh", "-c", script)
        accessible = [line for line in out.splitlines() if not line.startswith("ls: ")]
        assert all(word not in line for line in accessible for word in ("/proc/2/root", "/proc/2/fd", "/proc/2/cwd")), (
            out
        )


def processes(user: User) -> list[int]:
    """Return the PIDs of the user."""
    pids = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user.uid:
                pids.append(int(name))
    return pids
