from __future__ import annotations

import random

import pytest

from enroot_py.registry import authorization


@pytest.mark.parametrize(
    ("header", "meaning"),
    [
        ("", []),
        ("Basic realm=x", [("basic", {"realm": "x"})]),
        (
            'Bearer realm="https://auth/token",service="reg.io",scope="repository:a/b:pull,push"',
            [("bearer", {"realm": "https://auth/token", "service": "reg.io", "scope": "repository:a/b:pull,push"})],
        ),
        ('Basic realm="a, b", Bearer realm = "c"', [("basic", {"realm": "a, b"}), ("bearer", {"realm": "c"})]),
        ('Bearer realm="a\\"b"', [("bearer", {"realm": 'a"b'})]),
        ('Bearer realm="unclosed', [("bearer", {"realm": "unclosed"})]),
        ("Negotiate, Basic REALM=x", [("negotiate", {}), ("basic", {"realm": "x"})]),
    ],
)
def test_challenges(header: str, meaning: list[tuple[str, dict[str, str]]]) -> None:
    assert list(authorization.challenges(header)) == meaning


def test_parser_of_challenges_terminates() -> None:
    source = random.Random(1)
    for _ in range(5000):
        list(authorization.challenges("".join(source.choice('ab=", \\') for _ in range(source.randrange(20)))))
