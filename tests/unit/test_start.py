"""The command line of start: every option in every form in which it can be written."""

from __future__ import annotations

import pytest

from enroot_py.base.errors import UsageError
from enroot_py.cli import start

SHORT = [option for option in start.VALUES if len(option) == 2]
LONG = [option for option in start.VALUES if len(option) > 2]


def parsed(*words: str) -> start.Options:
    options = start.parse([*words, "name", "command", "--root"])
    assert options is not None
    assert (options.target, options.command) == ("name", ("command", "--root"))
    return options


def test_what_enroot_has_is_there() -> None:
    assert {"-c", "--conf", "-e", "--env", "--rc", "-m", "--mount"} <= set(start.VALUES)
    assert {"-r", "--root", "-w", "--rw", "--pid", "--net", "--ipc", "--uts"} <= set(start.FLAGS)


@pytest.mark.parity("long options as --x v and --x=v")
@pytest.mark.parametrize("option", start.VALUES)
def test_value_behind_a_space(option: str) -> None:
    assert getattr(parsed(option, "a=b"), start.VALUES[option]) == ["a=b"]


@pytest.mark.parity("long options as --x v and --x=v")
@pytest.mark.parametrize("option", LONG)
def test_value_behind_an_equals_sign(option: str) -> None:
    assert getattr(parsed(f"{option}=a=b"), start.VALUES[option]) == ["a=b"]


@pytest.mark.parity("long options as --x v and --x=v")
@pytest.mark.parametrize("option", SHORT)
def test_value_joined_to_a_short_option(option: str) -> None:
    assert getattr(parsed(f"{option}a=b"), start.VALUES[option]) == ["a=b"]


@pytest.mark.parity("start --env", "start --mount")
@pytest.mark.parametrize("option", start.VALUES)
def test_options_may_come_again(option: str) -> None:
    assert getattr(parsed(option, "1", option, "2"), start.VALUES[option]) == ["1", "2"]


@pytest.mark.parametrize("option", start.FLAGS)
def test_flags(option: str) -> None:
    assert parsed(option).changes == {start.FLAGS[option]: True}


@pytest.mark.parity("an empty value is a mistake")
@pytest.mark.parametrize("option", start.VALUES)
@pytest.mark.parametrize("form", ["{}=", "{}", "{} "])
def test_empty_and_missing_values_are_mistakes(option: str, form: str) -> None:
    words = [option, ""] if form == "{} " else [form.format(option)]
    if len(option) == 2 and form == "{}=":
        assert getattr(parsed(f"{option}="), start.VALUES[option]) == ["="]  # a value, like any other
        return
    with pytest.raises(UsageError, match=f"{option} needs a value"):
        start.parse(words)


@pytest.mark.parity("an unknown option")
@pytest.mark.parametrize("word", ["--nope", "-x", "--root=yes", "-rw", "--explain=1"])
def test_unknown_options_are_mistakes(word: str) -> None:
    with pytest.raises(UsageError, match="unknown option"):
        start.parse([word, "name"])


@pytest.mark.parametrize(
    ("word", "meant"), [("--explian", "--explain"), ("--root=yes", "--root"), ("--mounts=x", "--mount")]
)
def test_a_slip_is_answered_with_what_was_meant(word: str, meant: str) -> None:
    with pytest.raises(UsageError) as e:
        start.parse([word, "name"])
    assert e.value.hint == f"did you mean {meant}?"


@pytest.mark.parametrize(("word", "hint"), [("-v", "it is --mount"), ("-it", "a container has the terminal")])
def test_options_of_docker_are_answered_with_ours(word: str, hint: str) -> None:
    with pytest.raises(UsageError) as e:
        start.parse([word, "name"])
    assert e.value.hint.startswith(hint)


@pytest.mark.parametrize("word", ["--foo", "-x", "-rw"])
def test_what_is_like_nothing_is_answered_with_help(word: str) -> None:
    with pytest.raises(UsageError) as e:
        start.parse([word, "name"])
    assert e.value.hint == "penroot start --help"


@pytest.mark.parity("`--` ends the options")
def test_two_dashes_end_the_options() -> None:
    options = start.parse(["-r", "--", "--name", "--", "x"])
    assert options is not None
    assert (options.target, options.command) == ("--name", ("--", "x"))


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_wins_over_what_follows(word: str) -> None:
    assert start.parse([word, "--nope"]) is None


@pytest.mark.parametrize("words", [[], ["-r"], ["--"]])
def test_something_must_be_started(words: list[str]) -> None:
    with pytest.raises(UsageError, match="needs a container or an image"):
        start.parse(words)
