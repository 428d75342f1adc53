"""Every item of the parity lists has a test that there is, and the tables say what the lists say."""

from __future__ import annotations

import re

import click
import pytest

from enroot_py.cli import start
from enroot_py.cli.verbs import penroot
from enroot_py.config.table import SETTINGS, UNUSED
from pyxis_py import settings as plugin
from pyxis_py.options import OPTIONS, Option
from tests.parity import NAMES, ROOT, Item, exists, items, page, table

# Items that may say "missing: WHY".
GAPS = {
    "pyxis: --container-image: dockerd://, podman://",
    "enroot: packages: deb and rpm, and the flavours +caps (not needed here) and -hardened (descriptors closed)",
}
BEYOND = [item.what for item in items("beyond")]
TEXT = "\n".join((*(item.what for item in items("enroot")), *BEYOND))


@pytest.mark.parametrize(("name", "item"), [pytest.param(n, i, id=f"{n}: {i.what}") for n in NAMES for i in items(n)])
def test_item_has_a_proof(name: str, item: Item) -> None:
    assert item.tests or f"{name}: {item.what}" in GAPS
    for test in item.tests:
        assert exists(test), f"no such test: {test}"


@pytest.mark.parametrize("name", NAMES)
def test_table_is_fresh(name: str) -> None:
    assert page(name).read_text() == table(name), "run: python3 -m tests.parity"


def lines(verb: str) -> str:
    """The items of a verb."""
    return "\n".join(line for line in TEXT.splitlines() if line.split()[0].rstrip(":") == verb)


@pytest.mark.parametrize("verb", sorted(set(penroot.commands) - {"start", "batch", "help", "manual", "completion"}))
def test_every_option_of_a_verb_is_in_an_item(verb: str) -> None:
    found = lines(verb)
    assert found
    commands = getattr(penroot.commands[verb], "commands", {"": penroot.commands[verb]})
    for command in commands.values():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                for option in parameter.opts:
                    assert re.search(rf"(^|[ ,]){option}\b", found, re.M), f"{verb} {option}"


@pytest.mark.parametrize("option", [*start.FLAGS, *start.VALUES, "--explain"])
def test_every_option_of_a_start_is_in_an_item(option: str) -> None:
    assert re.search(rf"^start (-\S, )?{option}\b", lines("start"), re.M)


@pytest.mark.parametrize("variable", [*SETTINGS, *UNUSED])
def test_every_variable_is_in_an_item(variable: str) -> None:
    assert re.search(rf"\b{variable}\b", TEXT)


def test_every_hook_and_small_tool_is_in_an_item() -> None:
    hooks = [*(ROOT / "hooks").glob("[0-9]*"), *(ROOT / "hooks/extra").glob("[0-9]*")]
    assert len(hooks) > 8
    for hook in hooks:
        assert re.search(rf"^{hook.stem}\b", TEXT, re.M), hook.name
    for makefile, variable in (("c_shims/helpers/Makefile", "NAMES"), ("Makefile", "TOOLS")):
        names = re.search(rf"^{variable}\s*:= (.*)$", (ROOT / makefile).read_text(), re.M)
        assert names
        for name in names[1].replace("$(LAYERS)", "aufs2ovlfs mksquashovlfs").split():
            assert re.search(rf"^penroot-{name}\b", TEXT, re.M), name


def section(title: str) -> str:
    """The items of a section of pyxis's list, and all that go beyond it."""
    return "\n".join((*(item.what for item in items("pyxis") if item.section == title), *BEYOND))


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_of_a_step_and_its_variable_are_in_an_item(option: Option) -> None:
    assert re.search(rf"(^|[ ,])--{option.name}(?![\w-])", section("Options"), re.M)
    assert not option.variable or re.search(rf"^{option.variable}$", section("Variables"), re.M)


@pytest.mark.parametrize("argument", plugin.SETTINGS)
def test_every_argument_of_the_plugin_is_in_an_item(argument: str) -> None:
    assert re.search(rf"(^|, ){argument}\b", section("plugstack.conf"), re.M)
