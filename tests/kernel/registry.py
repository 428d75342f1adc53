"""A real registry on loopback for a test, and one that fails on purpose in front of it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

from tests.images import Pusher
from tests.kernel.conftest import require
from tests.waiting import until

PROGRAM = "docker-registry"


def own_address() -> str:
    """An address of loopback that is this process's: what others listen on there, they listen on everywhere."""
    pid = os.getpid()
    return f"127.{64 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}"


@dataclass
class Server:
    """A running docker-registry; ``host`` is HOST:PORT."""

    host: str
    log: Path

    @property
    def pusher(self) -> Pusher:
        return Pusher(f"http://{self.host}")


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[Server]:
    """Run docker-registry with its storage in ``directory``."""
    program = shutil.which(PROGRAM)
    require(program, f"{PROGRAM} is not installed: tests/prerequisites")
    assert program is not None
    directory.mkdir(exist_ok=True)
    config = f"""\
version: 0.1
log: {{level: info, accesslog: {{disabled: false}}}}
storage: {{filesystem: {{rootdirectory: {directory}/data}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:0"}}
"""
    (directory / "config.yml").write_text(config)
    log = directory / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([program, "serve", str(directory / "config.yml")], stdout=out, stderr=out)
    try:

        def listening() -> list[str]:
            assert process.poll() is None, f"{PROGRAM} did not start: {log.read_text()}"
            return re.findall(r'msg="listening on (\S+)"', log.read_text())

        yield Server(until(listening, f"{PROGRAM} listens")[0], log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@dataclass
class Fault:
    """What goes wrong with the answers whose path contains ``path``, the first ``times`` times."""

    path: str
    times: int = 1
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    drop_at: float = 0.0  # of the body; then the connection is cut
    stall_at: float = 0.0  # of the body; then nothing comes any more
    trickle: bool = False  # the body comes a few bytes at a time
    change: Callable[[bytes], bytes] | None = None  # of the body


@dataclass
class Login:
    """Who may read: Docker's token authentication, or Basic where ``basic``."""

    users: dict[str, str]  # an empty user is anybody
    basic: bool = False
    uses: int = 1000  # of a token, then it has expired
    ended: int = 401  # the status of an answer to a token that has expired
    ends: bool = False  # the login itself expires with the first token, or after as many uses
    tokens: dict[str, int] = field(default_factory=dict)

    def allows(self, authorization: str) -> bool:
        if self.basic:
            self.uses -= bool(authorization) and self.ends
            return self.user(authorization) is not None and self.uses >= 0
        token = authorization.removeprefix("Bearer ")
        if token in self.tokens:
            self.tokens[token] -= 1
        return self.tokens.get(token, -1) >= 0

    def user(self, authorization: str) -> str | None:
        """Who gives the right password in a Basic authorization."""
        given = base64.b64decode(authorization.removeprefix("Basic ")).decode() if authorization else ":"
        user, _, password = given.partition(":")
        return user if self.users.get(user) == password else None

    def token(self) -> str:
        token = f"token{len(self.tokens)}"
        self.tokens[token] = self.uses
        return token


@dataclass
class Faulty:
    """A front that spoils the answers of a registry; ``seen`` is (method, path, Range, bytes of body sent)."""

    host: str
    faults: list[Fault]
    login: Login | None
    seen: list[tuple[str, str, str, int]] = field(default_factory=list)
    authorizations: list[tuple[str, str]] = field(default_factory=list)  # (path, header)
    ranges: bool = True  # as some proxies, it may not know them

    def asked(self, path: str) -> int:
        """How often a path that contains ``path`` was asked for with GET."""
        return sum(method == "GET" and path in seen for method, seen, _, _ in self.seen)

    def sent(self, path: str) -> int:
        """Bytes of the bodies sent for paths that contain ``path``."""
        return sum(sent for _, seen, _, sent in self.seen if path in seen)


class Front(BaseHTTPRequestHandler):
    """One connection to a Faulty."""

    protocol_version = "HTTP/1.1"
    state: Faulty
    upstream: str
    over: threading.Event

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        state, authorization = self.state, self.headers.get("Authorization", "")
        state.authorizations.append((self.path, authorization))
        if state.login and self.path.startswith("/token"):
            self.give_token(state.login, authorization)
            return
        if state.login and not state.login.allows(authorization):
            if authorization and state.login.ended != 401:
                self.answer(state.login.ended, {}, b'{"errors": [{"message": "it is over"}]}')
                return
            realm = f'Bearer realm="http://{state.host}/token",service="test",scope="repository:x:pull"'
            self.answer(401, {"WWW-Authenticate": 'Basic realm="test"' if state.login.basic else realm}, b"{}")
            return
        fault = next((f for f in state.faults if f.path in self.path and f.times > 0), None)
        if fault is not None:
            fault.times -= 1
            if fault.status:
                self.answer(fault.status, fault.headers, b"")
                return
        status, headers, body = self.ask()
        if fault is not None and fault.change is not None:
            body = fault.change(body)
            headers |= {"Content-Length": str(len(body)), **fault.headers}
        self.answer(status, headers, body, fault)

    def give_token(self, login: Login, authorization: str) -> None:
        if login.user(authorization) is None or login.ends and login.tokens:
            self.answer(401, {}, b"{}")
        else:
            self.answer(200, {}, json.dumps({"token": login.token()}).encode())

    def ask(self) -> tuple[int, dict[str, str], bytes]:
        """What the real registry says."""
        request = urllib.request.Request(f"http://{self.upstream}{self.path}", method=self.command)
        for key in ("Accept", "Range") if self.state.ranges else ("Accept",):
            if self.headers.get(key):
                request.add_header(key, self.headers[key])
        try:
            response = urllib.request.urlopen(request)
        except urllib.error.HTTPError as e:
            response = e
        with response:
            names = ("Content-Type", "Content-Length", "Docker-Content-Digest", "Content-Range")
            headers = {key: response.headers[key] for key in names if response.headers.get(key)}
            return response.status, headers, response.read()

    def answer(self, status: int, headers: dict[str, str], body: bytes, fault: Fault | None = None) -> None:
        end = len(body) if self.command != "HEAD" else 0  # more would be taken for the next answer
        if fault is not None and (fault.drop_at or fault.stall_at):
            end = int(len(body) * (fault.drop_at or fault.stall_at))
        # Before who asked has the answer, and looks.
        self.state.seen.append((self.command, self.path, self.headers.get("Range", ""), end))
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            while fault is not None and fault.trickle and not self.over.wait(0.1):
                self.wfile.write(b"few")
            self.wfile.write(body[:end])
            self.wfile.flush()
        if fault is not None and fault.stall_at:
            self.over.wait()
            self.close_connection = True
        if fault is not None and fault.drop_at:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True


@contextlib.contextmanager
def faulty(
    upstream: str,
    *faults: Fault,
    login: Login | None = None,
    bind: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    listener: socket.socket | None = None,
) -> Iterator[Faulty]:
    """Serve what ``upstream`` (HOST:PORT) serves, but for ``faults`` and only to who can log in.

    ``listener`` is a listening socket, perhaps of another network namespace; ``bind`` is its name then.
    """
    over = threading.Event()
    state = Faulty("", list(faults), login)
    handler = type("Bound", (Front,), {"state": state, "upstream": upstream, "over": over})
    server = ThreadingHTTPServer((bind, 0), handler, bind_and_activate=listener is None)
    if listener is not None:
        server.socket.close()
        server.socket = listener
        server.server_address = listener.getsockname()
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    state.host = f"{bind}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def tunnel(target: str, user: str = "", password: str = "") -> Iterator[tuple[str, list[str]]]:
    """A proxy that answers CONNECT alone, whatever to, with a connection to ``target``; its address and what was asked.

    Source: RFC 9110, "CONNECT".
    """
    asked: list[str] = []
    wanted = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    class Tunnel(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            return

        def do_CONNECT(self) -> None:
            asked.append(self.path)
            self.close_connection = True
            if user and self.headers.get("Proxy-Authorization") != wanted:
                self.send_response(407)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            host, _, port = target.rpartition(":")
            with socket.create_connection((host, int(port))) as other:
                self.send_response(200)
                self.end_headers()
                back = threading.Thread(target=pump, args=(other, self.connection))
                back.start()
                pump(self.connection, other)
                back.join()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Tunnel)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    login = f"{quote(user, safe='')}:{password}@" if user else ""
    try:
        yield f"http://{login}127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def authority(directory: Path) -> tuple[Path, ssl.SSLContext]:
    """The file of a new certificate authority, and a server at 127.0.0.1 that it vouches for."""
    require(shutil.which("openssl"), "openssl is not installed")
    ca, key, cert = directory / "ca.pem", directory / "key.pem", directory / "cert.pem"
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    use = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]  # as Python asks of it since 3.13
    for command in (
        [*new, *use, "-keyout", directory / "ca.key", "-out", ca, "-subj", "/CN=Test Authority"],
        [*new, "-keyout", key, "-out", cert, "-subj", "/CN=here", *names, "-CA", ca, "-CAkey", directory / "ca.key"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    ca.chmod(0o644)
    return ca, context
