from __future__ import annotations

import io
import re
import socket
import time

import pytest

from enroot_py.base import log
from enroot_py.config import settings
from enroot_py.registry import connections, http
from tests.fakeregistry import Reply, fake


def test_retry_after_is_seconds_or_a_date() -> None:
    assert http.retry_after("7") == 7
    assert http.retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert http.retry_after("soon") is None
    assert http.retry_after("Wed, 21 Oct 2015 07:28:9999999999999999999999 GMT") is None


def test_debug_shows_requests_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "_debug", True)
    monkeypatch.setattr(log, "sink", lambda level, text: lines.append(f"{level} {text}"))
    headers = {"Authorization": "Bearer s3cret"}
    with fake(lambda request: Reply(body=b"x"), bind="127.0.0.3") as storage, fake(bind="127.0.0.2") as registry:
        moved = Reply(307, {"Location": f"http://{storage.host}/blob?signature=s3cret"})
        registry.answer = lambda request: moved if request.method == "GET" else Reply()
        loaded = settings.load({"HOME": "/nowhere", "ENROOT_ALLOW_HTTP": registry.host})
        client = http.HttpClient(registry.host, loaded, lambda busy: None)
        client.request("HEAD", "/v2/?scope=s3cret", headers).close()
        client.request("GET", "/v2/team/app/blobs/1", headers).close()
    assert [re.sub(r" after \d+\.\d{3} s$", "", line) for line in lines] == [
        f"DEBUG HEAD http://{registry.host}/v2/: 200",
        f"DEBUG GET http://{registry.host}/v2/team/app/blobs/1: 307",
        f"DEBUG GET http://{storage.host}/blob: 200",
    ]


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_connection_answers_soon_after_a_fast_body(connection: str) -> None:
    bodies = {"/v2/big": bytes(8 << 20), "/v2/small": b"x"}
    with fake(lambda request: Reply(200, {"Connection": connection}, bodies[request.path])) as registry:
        environ = {"HOME": "/nowhere", "ENROOT_ALLOW_HTTP": registry.host, "ENROOT_STALL_TIMEOUT": "20"}
        client = http.HttpClient(registry.host, settings.load(environ), lambda busy: None)
        for path in ("/v2/big", "/v2/small", "/v2/big"):
            with client.request("GET", path, {}) as response:
                received = b""
                while data := response.read(1 << 18):
                    received += data
                assert received == bodies[path]
        assert len(set(registry.sockets)) == (1 if connection == "keep-alive" else 3)


def test_a_body_is_read_in_batches_of_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb", buffering=0) as raw:
        assert isinstance(raw, io.RawIOBase)
        reader = connections._LimitedReader(raw, ours, 0)

        def low_water(count: int) -> int:
            reader.expect(count)
            return ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

        reader.begin_body()
        assert low_water(1 << 20) == 1
        theirs.send(bytes(1 << 17))
        reader.readinto(bytearray(1 << 17))
        now[0] = 0.1
        assert low_water(1 << 20) == 48 << 10  # the largest batch
        assert low_water(64 << 10) == 1  # the rest may be in a buffer
        now[0] = 1.0
        assert low_water(1 << 20) == 12 << 10  # 128 KiB in a second, in units of 4 KiB
        now[0] = 10.0
        assert low_water(1 << 20) == 1
        now[0], reader._stall_s = 0.1, 30
        assert low_water(1 << 20) == 12 << 10  # the sender may slow down to 1000 bytes a second


def test_body_of_another_kind_of_socket_is_read_without_batches() -> None:
    """With an HTTPS proxy, urllib3 passes its own class SSLTransport, which has no setsockopt()."""
    reader = connections._LimitedReader(io.BytesIO(bytes(1 << 20)), object(), 0)  # type: ignore[arg-type]
    reader.begin_body()
    reader.readinto(bytearray(1 << 19))
    reader.expect(1 << 19)
