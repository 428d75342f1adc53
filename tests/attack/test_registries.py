"""Attacks by a registry, by who hands out its tokens, by a proxy, and by files that say they are images."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests import images
from tests.attack.conftest import User
from tests.images import OCI, Image, Layer, entry

SECRET = "hunter2"
NAME = "team/app"


@dataclass(frozen=True)
class Request:
    """What a server was asked."""

    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def login(self) -> str:
        """USER:PASSWORD, or the token that it came with."""
        scheme, _, value = self.headers.get("authorization", "").partition(" ")
        return base64.b64decode(value).decode() if scheme == "Basic" else value


@dataclass
class Reply:
    """What it answers; ``raw`` goes out as it is, in the place of a status and headers."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw: bytes = b""


@dataclass
class Server:
    """A server on loopback that answers as ``answer`` says, and remembers what it was asked."""

    host: str
    answer: Callable[[Request], Reply]
    seen: list[Request] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def logins(self) -> set[str]:
        return {request.login for request in self.seen if request.login}

    @property
    def uri(self) -> str:
        return f"docker://{self.host}/{NAME}:1"


@contextlib.contextmanager
def serve(answer: Callable[[Request], Reply] = lambda request: Reply(404), bind: str = "127.0.0.1") -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            return

        def do_GET(self) -> None:
            headers = {key.lower(): value for key, value in self.headers.items()}
            server.seen.append(Request(self.command, self.path, headers))
            reply = server.answer(server.seen[-1])
            with contextlib.suppress(OSError):
                if reply.raw:
                    self.wfile.write(reply.raw)
                    self.close_connection = True
                    return
                self.send_response(reply.status)
                for key, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(reply.body)

        do_HEAD = do_POST = do_CONNECT = do_GET

    listener = ThreadingHTTPServer((bind, 0), Handler)
    listener.daemon_threads = True
    server = Server(f"{bind}:{listener.server_address[1]}", answer)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        listener.shutdown()
        listener.server_close()
        thread.join()


def image_of(*layers: bytes, **settings: object) -> Image:
    one = images.tar([entry("bin/true", b"#!", mode=0o755)])
    return Image([Layer(data) for data in layers or (one,)], dict(settings), OCI)


def registry_of(image: Image, wants: str = "", realm: str = "") -> Callable[[Request], Reply]:
    """Answers of a registry that has an image; with ``realm``, to whom has the token ``wants`` of that."""
    blobs = {images.digest(layer.blob): layer.blob for layer in image.layers}
    blobs[images.digest(image.config())] = image.config()

    def answer(request: Request) -> Reply:
        if realm and request.login != wants:
            return Reply(401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="x",scope="repository:other:pull"'})
        if "/manifests/" in request.path:
            return Reply(
                200,
                {"Content-Type": OCI["manifest"], "Docker-Content-Digest": images.digest(image.manifest())},
                image.manifest(),
            )
        blob = blobs.get(request.path.rpartition("/")[2])
        return Reply(200, {}, blob) if blob is not None else Reply(404)

    return answer


def token_server(user: str = "me", token: str = "a-token") -> Callable[[Request], Reply]:
    """Gives a token to a user with the secret, or to anybody where there is no user."""

    def answer(request: Request) -> Reply:
        if user and request.login != f"{user}:{SECRET}":
            return Reply(401)
        return Reply(200, {}, json.dumps({"token": token}).encode())

    return answer


def say(user: User, name: str, text: str, mode: int = 0o600) -> None:
    """Write a file of the user's configuration."""
    path = user.home / ".config/enroot" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    user.own(user.home / ".config")


def credentials(user: User, *hosts: str) -> None:
    say(user, ".credentials", "".join(f"machine {host} login me password {SECRET}\n" for host in hosts))


# -- 7: secrets go to the registry that they are for


@pytest.mark.parametrize(
    "form",
    [
        r"http://{evil}\@{good}/token",
        r"http://{evil}\\@{good}/token",
        "http://{evil}/@{good}/token",
        "http://x@{good}\t@{evil}/token",
        "http://{good}@{evil}/token",
        "http://{evil}#@{good}/token",
        "http://{evil}?@{good}/token",
        "http://{evil}%5c@{good}/token",
    ],
)
def test_realm_that_two_parsers_read_differently_gets_no_password(user: User, form: str) -> None:
    """7: the realm is ``//evil\\@good/``: its password is found by one parser, and sent by the other one."""
    with serve(bind="127.0.0.2") as evil, serve(bind="127.0.0.3") as good:
        credentials(user, "127.0.0.3", good.host)
        realm = form.format(evil=evil.host, good=good.host)
        quoted = realm.replace("\\", "\\\\")
        evil.answer = lambda request: Reply(401, {"WWW-Authenticate": f'Bearer realm="{quoted}",service="x"'})
        done = user.penroot("digest", evil.uri, status=1, env={"ENROOT_TRANSFER_RETRIES": "0"})
        assert evil.logins == good.logins == set()
        assert "Traceback" not in done.stderr and SECRET not in done.stderr


def test_token_for_another_registry_is_not_fetched(user: User) -> None:
    """7: a registry names the token server of another one, to be handed a token for that one's repository."""
    with serve(token_server(), bind="127.0.0.3") as good, serve(bind="127.0.0.2") as evil:
        credentials(user, good.host)
        evil.answer = registry_of(image_of(), "a-token", f"http://{good.host}/token")
        done = user.penroot("digest", evil.uri, status=1)
        assert good.logins == evil.logins == set()
        line = f"{evil.host} token={good.host}"
        assert "gets no login" in done.stderr and line in done.stderr and "registries.conf" in done.stderr


def test_password_of_a_registry_is_not_sent_where_that_says(user: User) -> None:
    """7: whoever answers for a registry, or may write its configuration, has its users' passwords sent elsewhere."""
    with serve(token_server(), bind="127.0.0.3") as evil, serve(bind="127.0.0.2") as victim:
        credentials(user, victim.host)
        victim.answer = registry_of(image_of(), "a-token", f"http://{evil.host}/token")
        user.penroot("digest", victim.uri, status=1)
        assert evil.logins == set()


def test_token_server_on_another_host_is_named_by_a_setting(user: User) -> None:
    """7: the way out: as with GitLab, whose tokens come from another host than its images."""
    with serve(token_server(), bind="127.0.0.3") as tokens, serve(bind="127.0.0.2") as registry:
        registry.answer = registry_of(image_of(), "a-token", f"http://{tokens.host}/jwt/auth?a=b")
        say(user, "registries.conf", f"{registry.host} token={tokens.host}\n")
        for host in (registry.host, tokens.host):  # as docker's files have it, and as enroot's
            credentials(user, host)
            user.penroot("digest", registry.uri)
        assert tokens.logins == {f"me:{SECRET}"} and registry.logins == {"a-token"}
        say(user, "registries.conf", f"{registry.host} token=http://{tokens.host}\n")
        assert "token=HOST[:PORT]" in user.penroot("digest", registry.uri, status=1).stderr


def test_public_image_needs_no_such_setting(user: User) -> None:
    with serve(token_server(""), bind="127.0.0.3") as tokens, serve(bind="127.0.0.2") as registry:
        credentials(user, registry.host, tokens.host)
        registry.answer = registry_of(image_of(), "a-token", f"http://{tokens.host}/token")
        user.penroot("digest", registry.uri)
        assert tokens.logins == set()


def test_scope_of_a_token_is_the_repository_that_was_asked_for(user: User) -> None:
    """7: a registry that several share has a token made for another repository than the one asked for."""
    with serve(bind="127.0.0.2") as server:
        credentials(user, server.host)
        has = registry_of(image_of(), "a-token", f"http://{server.host}/token")
        server.answer = lambda request: token_server()(request) if "/token" in request.path else has(request)
        user.penroot("digest", server.uri)
        asked = [request.path for request in server.seen if "/token" in request.path]
        assert asked and all("scope=repository%3Ateam%2Fapp%3Apull" in path and "other" not in path for path in asked)


@pytest.mark.parametrize("where", ["Location", "realm"])
@pytest.mark.parametrize(
    "address", [r"http://{other}\x", "http://me:pw@{other}/x", "http://{other}/\x01x", "file:///etc/passwd", "//\\x/"]
)
def test_address_with_what_no_address_has_is_refused(user: User, where: str, address: str) -> None:
    """7: no backslash, control character or user in what a registry sends us to; nor another scheme."""
    with serve(bind="127.0.0.3") as other, serve(bind="127.0.0.2") as registry:
        target = address.format(other=other.host)
        quoted = target.replace("\\", "\\\\")
        headers = {"Location": target} if where == "Location" else {"WWW-Authenticate": f'Bearer realm="{quoted}"'}
        registry.answer = lambda request: Reply(307 if where == "Location" else 401, headers)
        env = {"ENROOT_TRANSFER_RETRIES": "0"}
        done = user.penroot("import", "-o", "x.sqsh", registry.uri, status=1, env=env)
        assert other.seen == [] and "Traceback" not in done.stderr and "pw@" not in done.stderr


@pytest.mark.parametrize("token", ["a\r\nX-More: 1", "a\nb", "a\0b", "\u00e9", "x" * 70_000, "a b"])
def test_token_that_is_none_is_an_error(user: User, token: str) -> None:
    """7: a token with a line feed: a traceback of http.client, or a header that the registry made."""
    with serve(bind="127.0.0.2") as server:
        has = registry_of(image_of(), token, f"http://{server.host}/token")
        server.answer = lambda request: token_server("", token)(request) if "/token" in request.path else has(request)
        done = user.penroot("digest", server.uri, status=1)
        assert "sent no token" in done.stderr and "Traceback" not in done.stderr


def test_dollar_in_a_password_is_a_dollar(user: User) -> None:
    """7: the password ``pa$$word`` or ``$2y$10$…`` is not the one that is sent."""
    for written, meant in ((f"$2y${SECRET}", f"$2y${SECRET}"), (rf"\${SECRET}", f"${SECRET}"), ("$WORD", "w$rd")):
        with serve(lambda request: Reply(401, {"WWW-Authenticate": "Basic realm=x"}), bind="127.0.0.2") as server:
            say(user, ".credentials", f"machine {server.host} login me password {written}\n")
            user.penroot("digest", server.uri, status=1, env={"WORD": "w$rd"})
            assert server.logins == {f"me:{meant}"}


def test_plain_http_is_allowed_by_registry(user: User) -> None:
    """7: ENROOT_ALLOW_HTTP=yes for one registry lets whoever is between have the passwords of all."""
    with serve(registry_of(image_of()), bind="0.0.0.0") as server:  # not a local name: see is_local()
        port = server.host.rpartition(":")[2]
        for allowed in ("0.0.0.0", server.host, f"build.site, {server.host}", "yes"):
            user.penroot("digest", server.uri, env={"ENROOT_ALLOW_HTTP": allowed})
        for other in ("build.site", f"0.0.0.0:1{port}", "no", ""):
            seen = len(server.seen)
            done = user.penroot("digest", server.uri, status=1, env={"ENROOT_ALLOW_HTTP": other})
            assert "ENROOT_ALLOW_HTTP" in done.stderr and len(server.seen) == seen
        done = user.penroot("digest", server.uri, status=1, env={"ENROOT_ALLOW_HTTP": "yes,0.0.0.0"})
        assert "must be yes, no, or" in done.stderr


def test_password_in_a_reference_is_not_taken(user: User) -> None:
    """No secret is printed: a reference ends in messages, lists and provenance."""
    said = user.penroot("digest", f"docker://me:{SECRET}@127.0.0.1:1/x:1", status=1).stderr
    assert ".credentials" in said and SECRET not in said


def test_no_secret_is_seen(user: User) -> None:
    """No secret in the debug log, in errors, in --explain, in arguments or in what hooks are told."""
    seen = user.home / "seen"
    hook = user.home / "etc/hooks.d/50-see.sh"
    hook.parent.mkdir(parents=True)
    hook.write_text(f"#!/bin/sh\nenv >> {seen}\ncat /proc/*/cmdline 2>/dev/null | tr '\\0' ' ' >> {seen}\n")
    hook.chmod(0o755)
    with serve(bind="127.0.0.2") as server:
        # The command tells the arguments of all processes as it runs.
        command = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' >> {seen}; S={SECRET}; printf %s $S"
        say(user, ".credentials", f"machine {server.host} login me password $({command})\n")
        has = registry_of(
            Image([Layer(images.tar([entry("etc/hostname")]))], {}, OCI), "t0ken", f"http://{server.host}/token"
        )
        server.answer = (
            lambda request: token_server(token="t0ken")(request) if "/token" in request.path else has(request)
        )
        env = {"PENROOT_DEBUG": "1"}
        said = user.penroot("create", "-n", "box", server.uri, env=env).stderr
        started = user.penroot("start", "--explain", "box", "true", env=env)
        assert server.logins == {f"me:{SECRET}", "t0ken"}
        everything = said + started.stdout + started.stderr + seen.read_text()
        assert "DEBUG" in said and SECRET not in everything and "t0ken" not in everything
