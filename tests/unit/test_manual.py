"""The manual pages document every verb, every option and every setting."""

from __future__ import annotations

import pathlib
import re

import click
import pytest

from enroot_py.base.errors import UsageError
from enroot_py.cli import manual, start
from enroot_py.cli.verbs import help_text, main, penroot
from enroot_py.config import yaml
from enroot_py.config.table import Setting, all_settings
from pyxis_py.admin import manual as of_plugin
from pyxis_py.admin.cli import commands
from pyxis_py.request.options import Option, all_options
from pyxis_py.request.settings import all_settings as arguments

OF_PENROOT = dict(manual.pages(penroot))
PAGES = {**OF_PENROOT, **dict(of_plugin.pages(commands))}


def plain(name: str) -> str:
    """Return a page without its markup."""
    text = PAGES[name].replace("\\-", "-").replace("\\&", "").replace("\\(aq", "'")
    return re.sub(r"\\f[BR]", "", text)


def test_help_has_no_truncated_summary() -> None:
    usage, *lines = help_text().splitlines()
    assert all(len(line) <= 80 and not line.endswith("...") for line in lines)
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options:", "Run:", "Images:", "Cache:", "Jobs:", "Set up:"]


@pytest.mark.parametrize("verb", ["images", "rmi", "kill", "build", "push", "save", "top", "shell"])
def test_verb_of_docker_gets_a_hint_with_a_command(verb: str) -> None:
    with pytest.raises(UsageError, match=f"No such command '{verb}'") as caught:
        main([verb])
    assert re.match(r"(\S+ (cache|list|start|import|stop|ps)|docker build|podman push) ", caught.value.hint)


@pytest.mark.parity("command lines of docker")
@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("run --rm -it ubuntu bash", "start --rw docker://ubuntu bash"),
        ("run -v /a:/b:ro -w /w -eA=1 x.sqsh", "start --rw --mount /a:/b:ro --workdir /w --env A=1 x.sqsh"),
        ("run -d --name n -u0 ghcr.io/a/b:1 c -d", "start --rw --detach --name n --root 'docker://ghcr.io#a/b:1' c -d"),
        ("run --gpus all --name n ubuntu", "start --rw --device nvidia.com/gpu=all docker://ubuntu"),
        ("run --mount type=bind,src=/a,dst=/b,ro u", "start --rw --mount /a:/b:ro docker://u"),
        ("run --network=none -u 7 u", "start --rw --net docker://u"),
        ("rm -f a b", "remove --force a b"),
        ("kill a", "stop --signal KILL a"),
        ("kill -s SIGINT a", "stop --signal INT a"),
        ("pull ubuntu:24.04", "import docker://ubuntu:24.04"),
        *(("run --unknown u", "start docker://IMAGE COMMAND"), ("kill -s HUP a", "stop --signal KILL NAME;")),
    ],
)
def test_docker_command_gets_a_hint_with_penroots(line: str, command: str) -> None:
    with pytest.raises(UsageError) as caught:
        main(line.split())
    hint = caught.value.hint.partition(" ")[2]
    assert hint == command or command in hint and command.endswith((";", "COMMAND"))


@pytest.mark.parity("manual pages: each verb has a page with all its options")
def test_every_verb_has_a_page_and_is_in_the_main_page() -> None:
    verbs = {verb for verb, command in penroot.commands.items() if not command.hidden}
    assert set(OF_PENROOT) == {"penroot.1", "penroot.yaml.5", *(f"penroot-{verb}.1" for verb in verbs)}
    for verb in verbs:
        assert f"penroot-{verb}(1)" in plain("penroot.1")


@pytest.mark.parity("manual pages: each verb has a page with all its options")
@pytest.mark.parametrize("verb", sorted(set(penroot.commands) - {"start", "batch", "manual"}))
def test_every_option_is_in_the_page_of_its_verb(verb: str) -> None:
    page = plain(f"penroot-{verb}.1")
    for parameter in penroot.commands[verb].params:
        if isinstance(parameter, click.Option):
            assert all(spelling in page for spelling in parameter.opts), parameter.name


@pytest.mark.parametrize("verb", ["start", "batch"])
def test_every_option_of_a_start_is_in_its_page(verb: str) -> None:
    page = plain(f"penroot-{verb}.1")
    for option in (*start.FLAGS, *start.VALUES, *start.feature_flags(), "--explain"):
        assert re.search(rf"^(-\S+, )*{option}\b", page, re.M), option
    assert f"penroot {verb} [options]" in page


@pytest.mark.parametrize("setting", all_settings().values(), ids=lambda setting: setting.name)
def test_every_setting_is_explained(setting: object) -> None:
    page = plain("penroot.yaml.5")
    assert f"{setting.name} (" in page  # type: ignore[attr-defined]
    assert setting.doc in page  # type: ignore[attr-defined]
    assert setting.variable in page  # type: ignore[attr-defined]


@pytest.mark.parity("manual pages: pyxis-py(1)")
@pytest.mark.parametrize("command", commands.commands.values(), ids=lambda command: command.name)
def test_every_command_of_the_plugin_is_in_its_page(command: click.Command) -> None:
    page = plain("pyxis-py.1")
    assert (f"pyxis-py {command.name} " in page) is not command.hidden
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert f"{command.name} {parameter.opts[0]}" in page, parameter.name


@pytest.mark.parity("manual pages: pyxis-py(1)")
@pytest.mark.parametrize("option", all_options(), ids=lambda option: option.name)
def test_every_option_of_a_step_is_explained(option: Option) -> None:
    page = plain("penroot-srun.7")
    for words in (f"--{option.name}{'=' if option.arginfo else ''}{option.arginfo}", option.usage, option.variable):
        assert words in page


@pytest.mark.parity("manual pages: pyxis-py(1)")
@pytest.mark.parametrize("setting", arguments().values(), ids=lambda setting: setting.name)
def test_every_argument_of_the_plugin_is_explained(setting: Setting) -> None:
    page = plain("pyxis-py.1")
    assert f"{setting.name}={setting.default}\n" in page
    assert setting.doc in page


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_well_formed(name: str) -> None:
    for line in PAGES[name].splitlines():
        assert not line.startswith("'")
        assert not line.startswith(".") or re.match(r"\.(TH|SH|TP|PP|nf|fi|br)( |$)", line), line
    assert PAGES[name].splitlines()[1] == ".SH NAME"


def test_pages_are_written_to_their_sections(tmp_path: pathlib.Path) -> None:
    written = manual.write(PAGES.items(), str(tmp_path))
    assert str(tmp_path / "man1/penroot-start.1") in written
    assert (tmp_path / "man5/penroot.yaml.5").read_text().startswith(".TH PENROOT.YAML 5")


def test_example_has_every_setting_at_its_default() -> None:
    text = re.sub(r"^#(?=\w)", "", manual.example(), flags=re.M)
    values = {variable: value for variable, _, value in yaml.parse("example", text.encode())}
    assert values == {variable: setting.default for variable, setting in all_settings().items()}
    assert yaml.parse("example", manual.example().encode()) == []
