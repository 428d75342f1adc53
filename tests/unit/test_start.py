"""Parse the command line of start: every option in every form."""

from __future__ import annotations

import pytest

from enroot_py.base.errors import UsageError
from enroot_py.cli import start


def parsed(*words: str) -> start.Options:
    options = start.parse([*words, "name", "command", "--root"])
    assert options is not None
    assert (options.target, options.command) == ("name", ("command", "--root"))
    return options


def test_options_of_enroot_exist() -> None:
    assert {"-c", "--conf", "-e", "--env", "--rc", "-m", "--mount"} <= set(start.VALUES)
    assert {"-r", "--root", "-w", "--rw", "--pid", "--net", "--ipc", "--uts"} <= set(start.FLAGS)


FORMS = [
    *((option, [option, "a=b"]) for option in start.VALUES),
    *((option, [f"{option}=a=b" if option.startswith("--") else f"{option}a=b"]) for option in start.VALUES),
]


@pytest.mark.parity("long options: --x VALUE and --x=VALUE are the same", "start --env", "start --mount")
@pytest.mark.parametrize(("option", "words"), FORMS)
def test_value_in_each_form_and_twice(option: str, words: list[str]) -> None:
    assert getattr(parsed(*words), start.VALUES[option]) == ["a=b"]
    assert getattr(parsed(*words, option, "2"), start.VALUES[option]) == ["a=b", "2"]


@pytest.mark.parametrize("option", start.FLAGS)
def test_flags(option: str) -> None:
    assert parsed(option).changes == {start.FLAGS[option]: True}


@pytest.mark.parity("an empty value is an error")
@pytest.mark.parametrize("option", start.VALUES)
@pytest.mark.parametrize("form", ["{}=", "{}", "{} "])
def test_empty_and_missing_values_are_mistakes(option: str, form: str) -> None:
    words = [option, ""] if form == "{} " else [form.format(option)]
    if len(option) == 2 and form == "{}=":
        assert getattr(parsed(f"{option}="), start.VALUES[option]) == ["="]  # "=" is the value of a short option
        return
    with pytest.raises(UsageError, match=f"{option} needs a value"):
        start.parse(words)


@pytest.mark.parity("an unknown option")
@pytest.mark.parametrize(
    ("word", "hint"),
    [
        *(("--nope", ""), ("--explain=1", "did you mean --explain?"), ("--explian", "did you mean --explain?")),
        *(("--root=yes", "did you mean --root?"), ("--mounts=x", "did you mean --mount?")),
        *((word, "penroot start --help") for word in ("--foo", "-x", "-rw")),
        *(
            ("-v", "penroot start --mount"),
            ("-it", "remove -it: a container has"),
        ),
        *(
            ("-w/tmp", "penroot start --workdir DIR"),
            ("--user", "penroot start --root NAME"),
        ),
    ],
)
def test_unknown_option_gets_a_hint(word: str, hint: str) -> None:
    with pytest.raises(UsageError, match="unknown option") as caught:
        start.parse([word, "name"])
    assert caught.value.hint.startswith(hint)


def test_directory_after_w_gets_the_hint_for_workdir() -> None:
    with pytest.raises(UsageError, match="/tmp is a directory: -w means --rw") as caught:
        start.parse(["-w", "/tmp", "name"])
    assert caught.value.hint.startswith("penroot start --workdir DIR")


@pytest.mark.parity("`--` ends the options")
def test_two_dashes_end_the_options() -> None:
    options = start.parse(["-r", "--", "--name", "--", "x"])
    assert options is not None
    assert (options.target, options.command) == ("--name", ("--", "x"))


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_takes_precedence_over_later_words(word: str) -> None:
    assert start.parse([word, "--nope"]) is None


@pytest.mark.parametrize("words", [[], ["-r"], ["--"]])
def test_start_without_a_target_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="needs a container or an image"):
        start.parse(words)
