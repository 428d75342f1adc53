"""Values in the config of an image that are accepted or refused."""

from __future__ import annotations

import json

import pytest

from enroot_py.base.errors import ImageError
from enroot_py.store.imageconfig import ImageConfig


def config(**fields: object) -> ImageConfig:
    return ImageConfig(json.dumps({"config": fields}).encode(), "x")


NO_TEXT, NO_LIST = "x: the image config has a value that is not text", "in the image config is not a list of strings"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        *(({"Env": ["A=\0"]}, NO_TEXT), ({"Entrypoint": ["a\0b"]}, NO_TEXT), ({"Cmd": "\0"}, NO_TEXT)),
        *(({"WorkingDir": "/\0"}, NO_TEXT), ({"Cmd": ["\ud800"]}, NO_TEXT)),
        *(({"Env": {"A": "b"}}, NO_LIST), ({"Entrypoint": 1}, NO_LIST), ({"Cmd": [["a"]]}, NO_LIST)),
        *(({"Labels": ["a"]}, "is not an object"), ({"Volumes": "/data"}, "is not an object")),
    ],
)
def test_fields_of_another_kind_are_refused(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ImageError, match=why):
        config(**fields).files("docker://r#x:1")


def test_one_string_is_one_word() -> None:
    """A string in place of a list is one word. Without entrypoint and command, /bin/sh runs."""
    assert b"exec 'a b' \"$@\"" in config(Entrypoint="a b").files("u")["rc"]
    assert b"exec  '/bin/sh'" in config().files("u")["rc"]


@pytest.mark.parametrize(("value", "workdir"), [(None, "/"), ("a/", "/a"), ("/a/../../b", "/b")])
def test_working_directory_is_a_path_from_the_root(value: str | None, workdir: str) -> None:
    assert config(WorkingDir=value).workdir == workdir


def test_working_directory_is_not_too_deep() -> None:
    with pytest.raises(ImageError, match="WorkingDir"):
        assert config(WorkingDir="/a" * 1000).workdir


@pytest.mark.parametrize("data", [b"", b"[]", b'{"config": [1]}', b"[" * 100_000])
def test_invalid_config_is_refused(data: bytes) -> None:
    with pytest.raises(ImageError, match="x: the image config is "):
        ImageConfig(data, "x")


def test_env_words_without_name_or_value_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    files = config(Env=["A=1", "NOEQUALS", "=noname", "TWO\nLINES=1"]).files("docker://r#x:1")
    assert files["environment"] == b"A=1\n"
    (line,) = capfd.readouterr().err.splitlines()
    assert "x: Env of the image config has 'NOEQUALS', '=noname', 'TWO\\nLINES=1': not NAME=VALUE" in line


@pytest.mark.parametrize(("created", "seconds"), [("1970-01-01T00:01:00.5Z", 60.0), ("soon", 0.0), (None, 0.0)])
def test_time_of_an_image(created: str | None, seconds: float) -> None:
    assert ImageConfig(json.dumps({"created": created}).encode(), "x").created == seconds
