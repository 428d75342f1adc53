"""A client with logins talks to a hostile registry. It soon fails with clear errors, and no other host gets a login."""

from __future__ import annotations

import gzip
import json
import pathlib
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import pytest

from enroot_py.base.errors import PenrootError
from enroot_py.config import settings
from enroot_py.registry import addresses, authorization, http, site
from enroot_py.registry.manifests import Descriptor, Manifest
from enroot_py.registry.reference import Reference
from enroot_py.registry.repository import Repository
from enroot_py.store.imageconfig import ImageConfig
from tests.fakeregistry import Fake, Reply, fake
from tests.images import OCI
from tests.unit.test_fuzz import retyped

pytestmark = pytest.mark.soak

SECRET = "hunter2"
D = "sha256:" + "0" * 64
MANIFEST = json.dumps({"schemaVersion": 2, "config": {"digest": D, "size": 2}, "layers": [{"digest": D, "size": 9}]})
WORDS = [
    *rb"""\ @ / : , " = %00 %5c http:// https:// file:// [ ] [::1%25lo] 127.1 \ud800 null 1e999""".split(),
    *(b"\r\n", b"\n", b"\0", b" ", b"\t", b"\xff", b"\xc2\xa0", b"\x1b[2J"),
    *(b"{" * 2000, b"[" * 70000, b"9" * 5000, b"ffffffffffff\r\n", b"0\r\n\r\n", b"HTTP/2 "),
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Content-Encoding: deflate, gzip, br, zstd\r\n",
    b"Location: //\r\n",
    b"Retry-After: 1e400\r\n",
    b"WWW-Authenticate: Bearer realm=\r\n",
    b"Docker-Content-Digest: x\r\n",
    b"Set-Cookie: a=b\r\n",
    b"Connection: close\r\n",
]


@pytest.fixture
def servers() -> Iterator[tuple[Fake, Fake]]:
    """Yield a hostile registry, and a second server to which it redirects clients."""
    token = Reply(raw=answer(b"200 OK", b"", b'{"token": "x"}'))
    with fake(bind="127.0.0.2") as registry, fake(lambda request: token, bind="127.0.0.3") as other:
        yield registry, other


def answer(status: bytes, headers: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, headers, len(body), body)


def seeds(own: str, other: str) -> list[bytes]:
    """Return one reply of each kind that a client handles."""
    realms = [f"http://{own}/token", f"http://{other}/token", rf"http://{own}\\@{other}/token", f"http://me@{other}/"]
    locations = [f"http://{other}/x", "/v2/", "//x/", rf"http://{own}\@{other}/", "file:///etc/passwd"]
    return [
        *(
            answer(b"401 No", f'WWW-Authenticate: Bearer realm="{r}",service="s",scope="x"\r\n'.encode(), b"")
            for r in realms
        ),
        *(answer(b"307 There", f"Location: {location}\r\n".encode(), b"") for location in locations),
        answer(b"401 No", b"WWW-Authenticate: Basic realm=x\r\n", b"{}"),
        answer(b"200 OK", b"", b'{"token": "abc", "access_token": 5}'),
        answer(b"200 OK", b"Docker-Content-Digest: " + D.encode() + b"\r\n", MANIFEST.encode()),
        answer(b"200 OK", b"Content-Encoding: gzip\r\n", gzip.compress(MANIFEST.encode())),
        answer(b"206 Part", b"Content-Range: bytes 0-8/9\r\n", b"123456789"),
        answer(b"404 No", b"", b'{"errors": [{"message": "no", "code": 5}]}'),
        answer(b"200 OK", b"", b'{"tags": ["a", 5, null, {"x": []}]}'),
        answer(b"429 Wait", b"Retry-After: 0\r\n", b""),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n123456789\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n{}",
    ]


def mutate(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        if rng.random() < 0.3:
            data = data[:at] + data[at + rng.randint(1, 20) :]
        else:
            data = data[:at] + rng.choice(WORDS) + data[at:]
    return data


def test_mutated_answers(
    servers: tuple[Fake, Fake], tmp_path: pathlib.Path, rng: random.Random, soak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, other = servers
    config = tmp_path / ".config/enroot"
    config.mkdir(parents=True)
    login = f"login me password {SECRET}\n"
    (config / ".credentials").write_text(
        f"machine {server.host} {login}machine {other.host} {login}machine 127.0.0.3 {login}"
    )
    more = {"ENROOT_TRANSFER_RETRIES": "1", "ENROOT_STALL_TIMEOUT": "1", "ENROOT_CONNECT_TIMEOUT": "1"}
    configuration = settings.load({"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), **more})
    getaddrinfo = socket.getaddrinfo  # resolve only numeric addresses, so no name server gets a request
    numeric = {"flags": socket.AI_NUMERICHOST}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *_, **__: getaddrinfo(host, port, 0, 1, **numeric))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # do not wait between two attempts
    known = seeds(server.host, other.host)
    requests: list[Callable[[Repository], object]] = [
        lambda client: client.manifest("amd64"),
        lambda client: client.digest(),
        lambda client: client.blob(Descriptor("", D, 9, (f"https://{other.host}/x",))).read(100),
        lambda client: client.config(client.manifest("amd64")),
    ]
    context = ssl.create_default_context()
    monkeypatch.setattr(
        site, "tls", lambda: context
    )  # loading the certificate authorities would take longer than the rest of a round
    for _ in range(20_000 if soak else 300):
        replies = [mutate(rng.choice(known), rng) for _ in range(rng.randint(1, 4))]
        server.answer = lambda request, replies=replies: Reply(raw=rng.choice(replies))  # type: ignore[misc]
        client = Repository(Reference(server.host, "team/app", "1"), configuration)
        began = time.monotonic()
        try:
            rng.choice(requests)(client)
        except PenrootError as e:
            assert SECRET not in f"{e}{e.hint}" and len(str(e)) < 2000, replies
        except BaseException as e:
            raise AssertionError(replies) from e
        assert time.monotonic() - began < 30, replies
        assert not other.logins & {f"me:{SECRET}", "abc"}, replies
        other.seen.clear()


def test_mutated_addresses_are_unambiguous(rng: random.Random, soak: bool) -> None:
    """If our parser accepts an address, the address contains no user, and urllib3's parser reads it in the same way."""
    from urllib3.util import parse_url

    for _ in range(30_000 if soak else 1_000):
        seed = rng.choice([b"https://good.site:5000/a/b?c=d#e", b"//good/x", b"/x", b"http://[::1]:80/", b"?x"])
        text = mutate(seed, rng).decode("latin-1")
        try:
            address = addresses.read(text, addresses.read("https://base.site/v2/x"))
        except ValueError as e:
            assert type(e) is ValueError or isinstance(e, UnicodeError)
            continue
        again = parse_url(str(address))
        assert addresses.read(str(address)) == address
        assert (again.scheme, again.host, again.auth) == (address.scheme, address.host, None), text
        assert "\\" not in str(address) and str(address).isprintable() and "@" not in address.netloc, text


def test_mutated_lists_of_no_proxy(rng: random.Random, soak: bool) -> None:
    for _ in range(100_000 if soak else 2_000):
        text = mutate(b"10.0.0.0/8, .site, *.x, host:80, [::1]:5, fe80::/10, *", rng).decode("latin-1")
        addresses.bypasses(rng.choice(["10.1.2.3:5000", "a.site", "[fe80::1]:80", "x"]), text)


def test_mutated_retry_after(rng: random.Random, soak: bool) -> None:
    for _ in range(100_000 if soak else 2_000):
        wait = http.retry_after(mutate(b"Wed, 21 Oct 2015 07:28:00 GMT", rng).decode("latin-1"))
        assert wait is None or wait >= 0


D1, D2 = "sha256:" + "1" * 64, "sha256:" + "2" * 64
CONFIG = {
    "architecture": "amd64",
    "os": "linux",
    "created": "2026-01-01T00:00:00Z",
    "rootfs": {"type": "layers", "diff_ids": [D]},
    "config": {
        "Env": ["A=b"],
        "Cmd": ["true"],
        "Entrypoint": ["sh"],
        "Labels": {"a": "b"},
        "Volumes": {"/v": {}},
        "WorkingDir": "/w",
    },
}
ENTRY = {"mediaType": OCI["manifest"], "digest": D1, "size": 9, "platform": {"os": "linux", "architecture": "amd64"}}
DOCUMENTS: dict[str, dict[str, object]] = {
    "token": {"token": "abc", "access_token": "abc", "expires_in": 60},
    "errors": {"errors": [{"code": "DENIED", "message": "no", "detail": {}}]},
    "tags": {"name": "team/app", "tags": ["a", "b"]},
    "manifest": {
        "schemaVersion": 2,
        "mediaType": OCI["manifest"],
        "config": {"mediaType": OCI["config"], "digest": D1, "size": 9},
        "layers": [{"mediaType": OCI["layer"] + "+gzip", "digest": D2, "size": 9, "urls": ["https://x.site/y"]}],
    },
    "index": {"schemaVersion": 2, "mediaType": OCI["index"], "manifests": [ENTRY]},
    "config": CONFIG,
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_documents_with_fields_of_other_types(
    servers: tuple[Fake, Fake],
    tmp_path: pathlib.Path,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """In each document of a registry, one value has another type."""
    server, _ = servers
    environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "ENROOT_TRANSFER_RETRIES": "0"}
    configuration = settings.load(environ)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    context = ssl.create_default_context()
    monkeypatch.setattr(site, "tls", lambda: context)
    challenge = f'WWW-Authenticate: Bearer realm="http://{server.host}/token"\r\n'.encode()
    for data in retyped(DOCUMENTS[kind]):

        def reply(path: str, data: bytes = data) -> bytes:
            if kind == "token":
                token = "/token" in path
                return answer(b"200 OK", b"", data) if token else answer(b"401 No", challenge, b"{}")
            if kind == "errors":
                return answer(rng.choice((b"400 No", b"403 No", b"429 Wait")), b"", data)
            if kind == "tags":
                return answer(b"200 OK", b"", data) if "/tags/" in path else answer(b"404 No", b"", b"{}")
            return answer(b"200 OK", b"", data)

        server.answer = lambda request, reply=reply: Reply(raw=reply(request.path))  # type: ignore[misc]
        authorization._TOKENS.clear()
        client = Repository(Reference(server.host, "team/app", "1"), configuration)
        try:
            if kind == "config":
                config = ImageConfig(data, "x")
                (config.platform, config.created, config.workdir, config.files("docker://x"))
                config.diff_ids(Manifest(D, D, b"", Descriptor("", D, 1), (Descriptor("", D, 1),)))
            else:
                client.manifest("amd64")
        except PenrootError as e:
            assert str(e) and len(str(e)) < 20_000, data
        except BaseException as e:
            raise AssertionError(data) from e
