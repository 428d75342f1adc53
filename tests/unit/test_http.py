from __future__ import annotations

from enroot_py.registry import http


def test_retry_after_is_seconds_or_a_date() -> None:
    assert http.retry_after("7") == 7
    assert http.retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert http.retry_after("soon") is None
    assert http.retry_after("Wed, 21 Oct 2015 07:28:9999999999999999999999 GMT") is None
