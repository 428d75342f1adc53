"""Parse texts of podman's and skopeo's registries.conf."""

from __future__ import annotations

import pytest

from enroot_py.base.errors import ConfigError
from enroot_py.registry import containerstoml
from enroot_py.registry.containersconf import Endpoint, Table

# Text -> part of the error
INVALID = {
    "registry = 1": "bad value of registry",
    "[[registry]]\nlocation = 1": "registry[0]: bad value of location",
    "registry = [1]": "registry[0] is not a table",
    "[[registry]]": "registry[0] has no location",
    "[[registry]]\nlocation = '*.a.test'": "bad wildcard",
    "[[registry]]\nprefix = '*.a.test/x'": "bad wildcard",
    "[[registry]]\nprefix = 'a.*.test'\nlocation = 'b.test'": "bad wildcard",
    "[[registry]]\nlocation = 'https://a.test'": "bad location",
    "[[registry]]\nlocation = 'a.test'\n[[registry.mirror]]": "registry[0].mirror[0] has no location",
    "[[registry]]\nlocation = 'a.test'\nmirror-by-digest-only = true\n[[registry.mirror]]\nlocation = 'b.test'\n"
    "pull-from-mirror = 'all'": "both pull-from-mirror and mirror-by-digest-only are set",
    "[registries.block]\nregistries = ['a.test']\n[[registry]]\nlocation = 'a.test'": "mixes version 1 and 2",
    "[[registry]]\nlocation = 'a.test'\nblocked = true\n"
    "[[registry]]\nprefix = 'b.test'\nlocation = 'a.test'": "contradict each other: blocked",
    "a = " + "[" * 100_000: "",
    "\xff": "",
}


@pytest.mark.parametrize("text", INVALID, ids=lambda text: text[:40])
def test_error_names_file_and_table(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        containerstoml.parse("/x.conf", text.encode("latin-1"))
    assert str(caught.value).startswith("/x.conf: ") and INVALID[text] in str(caught.value) and caught.value.hint
    assert "\n" not in str(caught.value)


def test_spelling_of_hosts_is_canonical() -> None:
    text = "[[registry]]\nprefix = 'REG.test:443/Team/'\nlocation = 'index.docker.io/x'\n"
    assert containerstoml.parse("x", text.encode()) == (
        ("reg.test/Team", ("docker.io/x", False, True, True), (), False),
    )


@pytest.mark.parametrize(
    ("prefix", "name", "rest"),
    [
        ("reg.test", "reg.test/a:1", "/a:1"),
        ("reg.test", "reg.test:5000/a:1", ":5000/a:1"),
        ("reg.test", "reg.test.evil/a:1", None),
        ("reg.test/a", "reg.test/a@sha256:x", "@sha256:x"),
        ("reg.test/a", "reg.test/ab:1", None),
        ("reg.test/a:1", "reg.test/a:1", ""),
        ("reg.test/a:1", "reg.test/a:10", None),
        ("*.reg.test", "a.b.reg.test:5000/a:1", ":5000/a:1"),
        ("*.reg.test", "a.reg.test.reg.test/a:1", "/a:1"),
        ("*.reg.test", "reg.test/a:1", None),
        ("*.reg.test", "evil.test/a.reg.test:1", None),
        ("*.reg.test", "a.reg.test.evil/a:1", None),
    ],
)
def test_prefix_matches_whole_components(prefix: str, name: str, rest: str | None) -> None:
    assert Table(prefix, Endpoint("x"), (), False, "").rest(name) == rest
