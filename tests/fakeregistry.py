"""A fake registry on loopback. It sends a test's replies, or a real registry's replies with faults."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

NAME = "team/app"


def credentials(authorization: str) -> str:
    """Return USER:PASSWORD of a Basic authorization, or the token of another scheme."""
    scheme, _, value = authorization.partition(" ")
    return base64.b64decode(value).decode() if scheme == "Basic" else value


@dataclass
class Request:
    """A request. ``sent`` is the number of bytes of the reply's body that were sent."""

    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    sent: int = 0

    @property
    def authorization(self) -> str:
        return self.headers.get("authorization", "")

    @property
    def login(self) -> str:
        """Return USER:PASSWORD, or the token of the request."""
        return credentials(self.authorization)

    @property
    def range(self) -> str:
        return self.headers.get("range", "")


@dataclass
class Fault:
    """A fault of the first ``times`` replies for paths that contain ``path``."""

    path: str
    times: int = 1
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    drop_at: float = 0.0  # fraction of the body before the connection closes
    stall_at: float = 0.0  # fraction of the body before the server stalls
    trickle: bool = False  # send the body a few bytes at a time
    change: Callable[[bytes], bytes] | None = None  # applied to the body


@dataclass
class Reply:
    """A reply. ``raw`` is sent unchanged, instead of status, headers and body."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw: bytes | None = None
    fault: Fault = field(default_factory=lambda: Fault(""))
    relay: str = ""  # HOST:PORT to connect the client to


@dataclass
class Fake:
    """A server on loopback that replies with ``answer``, and records the requests."""

    host: str = ""
    answer: Callable[[Request], Reply] = lambda request: Reply(404)
    seen: list[Request] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)  # one for each request
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def logins(self) -> set[str]:
        return {request.login for request in self.seen if request.login}

    @property
    def uri(self) -> str:
        return f"docker://{self.host}/{NAME}:1"

    def asked(self, path: str) -> int:
        """Count the GET requests for paths that contain ``path``."""
        return sum(request.method == "GET" and path in request.path for request in self.seen)

    def sent(self, path: str) -> int:
        """Sum the bytes of bodies sent for paths that contain ``path``."""
        return sum(request.sent for request in self.seen if path in request.path)


class _Handler(BaseHTTPRequestHandler):
    """A connection to a fake."""

    protocol_version = "HTTP/1.1"
    fake: Fake

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        headers = {key.lower(): ", ".join(self.headers.get_all(key, ())) for key in self.headers}
        request = Request(self.command, self.path, headers)
        self.fake.sockets.append(self.connection)
        reply = self.fake.answer(request)
        body = reply.body if self.command != "HEAD" else b""  # the client would read a body as the next reply
        request.sent = int(len(body) * (reply.fault.drop_at or reply.fault.stall_at or 1))
        self.fake.seen.append(request)  # before the reply: a test may look at ``seen`` as soon as it has the reply
        with contextlib.suppress(OSError):
            if reply.raw is not None:
                self.wfile.write(reply.raw)
                self.close_connection = True
            elif reply.relay:
                self._relay(reply.relay)
            else:
                self.send_response(reply.status)
                for key, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                self._send(body[: request.sent], reply.fault)

    do_HEAD = do_POST = do_CONNECT = do_GET

    def _send(self, body: bytes, fault: Fault) -> None:
        while fault.trickle and not self.fake.over.wait(0.1):
            self.wfile.write(b"few")
        self.wfile.write(body)
        self.wfile.flush()
        if fault.stall_at:
            self.fake.over.wait()
            self.close_connection = True
        if fault.drop_at:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _relay(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.close_connection = True
        with socket.create_connection((host, int(port))) as other:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=_pump, args=(other, self.connection))
            back.start()
            _pump(self.connection, other)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _run(
    fake: Fake, bind: str = "127.0.0.1", tls: ssl.SSLContext | None = None, listener: socket.socket | None = None
) -> Iterator[None]:
    """Serve ``fake`` at ``bind``, or on ``listener``, which may be in another network namespace."""
    handler = type("Bound", (_Handler,), {"fake": fake})
    server = ThreadingHTTPServer((bind, 0), handler, bind_and_activate=listener is None)
    if listener is not None:
        server.socket.close()
        server.socket = listener
        server.server_address = listener.getsockname()
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    fake.host = f"{bind}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        fake.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def fake(
    answer: Callable[[Request], Reply] = lambda request: Reply(404),
    bind: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
) -> Iterator[Fake]:
    """Serve the replies of ``answer``."""
    server = Fake(answer=answer)
    with _run(server, bind, tls):
        yield server


@contextlib.contextmanager
def tunnel(target: str, user: str = "", secret: str = "") -> Iterator[tuple[str, Fake]]:
    """Serve a proxy that connects every CONNECT request to ``target``: RFC 9110, "CONNECT". Yield URL and proxy."""

    def answer(request: Request) -> Reply:
        allowed = not user or credentials(request.headers.get("proxy-authorization", "")) == f"{user}:{secret}"
        return Reply(relay=target) if allowed else Reply(407)

    login = f"{quote(user, safe='')}:{secret}@" if user else ""
    with fake(answer) as proxy:
        yield f"http://{login}{proxy.host}", proxy


@dataclass
class Login:
    """The users who may read, by Docker's token authentication, or by Basic if ``basic``."""

    users: dict[str, str]  # user to password; the user "" is anonymous
    basic: bool = False
    uses: int = 1000  # requests before a token expires
    ended: int = 401  # status for an expired token
    ends: bool = False  # the login itself expires after the first token, or after ``uses`` Basic requests
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
        """Return the user of a Basic authorization, or None if the password is wrong."""
        user, _, secret = credentials(authorization).partition(":")
        return user if self.users.get(user) == secret else None

    def token(self) -> str:
        token = f"token{len(self.tokens)}"
        self.tokens[token] = self.uses
        return token


@dataclass
class Faulty(Fake):
    """A proxy in front of a registry that adds faults to its replies."""

    upstream: str = ""
    faults: list[Fault] = field(default_factory=list)
    login: Login | None = None
    ranges: bool = True  # False: ignore Range, as some proxies do

    def spoil(self, request: Request) -> Reply:
        if self.login:
            refused = self._refuse(self.login, request)
            if refused:
                return refused
        fault = next((f for f in self.faults if f.path in request.path and f.times > 0), Fault(""))
        fault.times -= 1
        if fault.status:
            return Reply(fault.status, fault.headers)
        reply = self._ask(request)
        reply.fault = fault
        if fault.change is not None:
            reply.body = fault.change(reply.body)
            reply.headers = {**reply.headers, "Content-Length": str(len(reply.body)), **fault.headers}
        return reply

    def _refuse(self, login: Login, request: Request) -> Reply | None:
        if request.path.startswith("/token"):
            if login.user(request.authorization) is None or login.ends and login.tokens:
                return Reply(401, {}, b"{}")
            return Reply(200, {}, json.dumps({"token": login.token()}).encode())
        if login.allows(request.authorization):
            return None
        if request.authorization and login.ended != 401:
            return Reply(login.ended, {}, b'{"errors": [{"message": "it is over"}]}')
        realm = f'Bearer realm="http://{self.host}/token",service="test",scope="repository:x:pull"'
        return Reply(401, {"WWW-Authenticate": 'Basic realm="test"' if login.basic else realm}, b"{}")

    def _ask(self, asked: Request) -> Reply:
        """Return the real registry's reply. A client that uses this server as a proxy sends an absolute URL."""
        path = re.sub("^http://[^/]*", "", asked.path)
        request = urllib.request.Request(f"http://{self.upstream}{path}", method=asked.method)
        for key in ("accept", "range") if self.ranges else ("accept",):
            if asked.headers.get(key):
                request.add_header(key, asked.headers[key])
        try:
            response = urllib.request.urlopen(request)
        except urllib.error.HTTPError as e:
            response = e
        with response:
            names = ("Content-Type", "Content-Length", "Docker-Content-Digest", "Content-Range")
            headers = {key: response.headers[key] for key in names if response.headers.get(key)}
            return Reply(response.status, headers, response.read())


@contextlib.contextmanager
def faulty(
    upstream: str,
    *faults: Fault,
    login: Login | None = None,
    bind: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    listener: socket.socket | None = None,
) -> Iterator[Faulty]:
    """Serve the registry ``upstream`` (HOST:PORT) with ``faults``, and only to users of ``login``."""
    server = Faulty(upstream=upstream, faults=list(faults), login=login)
    server.answer = server.spoil
    with _run(server, bind, tls, listener):
        yield server
