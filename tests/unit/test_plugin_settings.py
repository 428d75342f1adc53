"""Parse the plugin's arguments in plugstack.conf."""

from __future__ import annotations

import pytest

from enroot_py.base.errors import ConfigError
from pyxis_py.request.settings import SETTINGS, load


def test_values_are_parsed_and_the_last_one_counts() -> None:
    settings = load(())
    assert (settings.runtime_path, settings.container_scope, settings.importer) == ("/run/pyxis", "global", "")
    assert settings.sbatch_support is True and settings.execute_entrypoint is False
    with pytest.raises(AttributeError):
        settings.runtime_path = "/x"
    settings = load(["runtime_path=/a", "runtime_path=/b/", "container_scope=job", "sbatch_support=no"])
    assert (settings.runtime_path, settings.container_scope, settings.sbatch_support) == ("/b", "job", False)


@pytest.mark.parity("unknown arguments are an error")
@pytest.mark.parametrize("argument", ["runtime_pth=/x", "runtime_path", ""])
def test_unknown_arguments_are_refused_with_the_known_ones(argument: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([argument])
    assert repr(argument) in str(caught.value)
    assert all(name in caught.value.hint for name in SETTINGS)


BAD = (
    *("runtime_path=run", "container_scope=step", "sbatch_support=maybe", "importer=x", "swarm=", "runtime_path="),
    *("resolve_timeout=0", "resolve_timeout=1e3", "resolve_timeout=86400", "resolve_timeout="),
)


@pytest.mark.parity("resolve_timeout")
@pytest.mark.parametrize("argument", BAD)
def test_bad_values_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=argument):
        load([argument])


@pytest.mark.parity("use_enroot_load", "1, true, yes, y, t and on mean yes")
@pytest.mark.parametrize(
    "argument", ["use_enroot_load=1", "use_squashfuse=On", "use_squashfuse=T", "use_squashfuse=yes"]
)
def test_ineffective_arguments_are_accepted(argument: str) -> None:
    assert getattr(load([argument]), argument.partition("=")[0]) is True
    assert SETTINGS[argument.partition("=")[0]].doc.startswith("no effect")
