"""docs/reference/parity-*.md and beyond.md list each verb, option, variable and hook, and each line has a test."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from enroot_py.cli import start
from enroot_py.cli.verbs import penroot
from enroot_py.config.table import UNUSED, all_settings
from enroot_py.runtime.hooks import OURS
from pyxis_py.request import settings as plugin
from pyxis_py.request.options import Option, all_options
from tests.docs import ROOT
from tests.docs.proofs import PAGES, lines, marks, named, sections

TEXT = "\n".join(line for page in ("parity-enroot", "beyond") for _, entries in sections(page) for line in entries)


def test_each_mark_names_one_line() -> None:
    """The text of a mark is the beginning of one line in docs/reference/parity-*.md or beyond.md."""
    assert [mark for mark in marks("parity") if len(named(mark)) != 1] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_line_has_a_test_or_a_reason(page: str) -> None:
    proved = {line for mark in marks("parity") for line in named(mark)}
    entries = [line for _, section in sections(page) for line in section]
    assert len(entries) > 50
    assert not {*entries} & {*lines()} - proved
    assert len({*entries} - {*lines()}) <= 1, "only one line of a page may have no test, and it must say why"


def about(verb: str) -> str:
    """Return the lines that begin with the verb ``verb``."""
    return "\n".join(line for line in TEXT.splitlines() if line.split()[0].rstrip(":") == verb)


@pytest.mark.parametrize("verb", sorted(set(penroot.commands) - {"start", "batch", "help", "manual", "completion"}))
def test_every_option_of_a_verb_has_a_line(verb: str) -> None:
    text = about(verb)
    assert text
    commands = getattr(penroot.commands[verb], "commands", {"": penroot.commands[verb]})
    for command in commands.values():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                for option in parameter.opts:
                    assert re.search(rf"(^|[ ,]){option}\b", text, re.M), f"{verb} {option}"


@pytest.mark.parametrize("option", [*start.FLAGS, *start.VALUES, *start.feature_flags(), "--explain"])
def test_every_option_of_a_start_has_a_line(option: str) -> None:
    assert re.search(rf"^start (--[\w-]+, )?{option}\b", about("start"), re.M)


@pytest.mark.parametrize("variable", [*all_settings(), *UNUSED])
def test_every_variable_has_a_line(variable: str) -> None:
    assert re.search(rf"\b{variable}\b", TEXT)


def test_every_hook_and_small_tool_has_a_line() -> None:
    hooks = [
        hook for directory in OURS for pattern in ("[0-9]*", "extra/[0-9]*") for hook in Path(directory).glob(pattern)
    ]
    assert len(hooks) > 12
    for hook in hooks:
        assert re.search(rf"^{hook.stem}\b", TEXT, re.M), hook.name
    for makefile, variable in (("c_shims/programs/Makefile", "NAMES"), ("Makefile", "TOOLS")):
        names = re.search(rf"^{variable}\s*:= (.*)$", (ROOT / makefile).read_text(), re.M)
        assert names
        for name in names[1].replace("$(LAYERS)", "aufs2ovlfs mksquashovlfs").split():
            assert re.search(rf"^penroot-{name}\b", TEXT, re.M), name


def section(title: str) -> str:
    """Return the lines of a section in parity-pyxis.md, and all lines of beyond.md."""
    beyond = [line for _, entries in sections("beyond") for line in entries]
    return "\n".join((*dict(sections("parity-pyxis"))[title], *beyond))


@pytest.mark.parametrize("option", all_options(), ids=lambda option: option.name)
def test_every_option_of_a_step_and_its_variable_have_a_line(option: Option) -> None:
    assert re.search(rf"(^|[ ,])--{option.name}(?![\w-])", section("Options"), re.M)
    assert not option.variable or re.search(rf"^{option.variable}$", section("Variables"), re.M)


@pytest.mark.parametrize("argument", plugin.all_settings())
def test_every_argument_of_the_plugin_has_a_line(argument: str) -> None:
    assert re.search(rf"(^|, ){argument}\b", section("plugstack.conf"), re.M)
