from __future__ import annotations

import re

import pytest

from enroot_py.base import log
from enroot_py.config import settings
from enroot_py.registry import http
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
