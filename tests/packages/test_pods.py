"""The Dockerfiles of examples/pods: run their commands in a Debian with Slurm instead of Slinky's images."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.packages.conftest import PLUGINS, PROJECT, machine

PODS = PROJECT / "examples/pods"


def lines(dockerfile: str) -> dict[str, list[str]]:
    """Return the arguments of each instruction by its keyword. A backslash continues a line."""
    text = re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        found.setdefault(word, []).append(" ".join(rest.split()))
    return found


@pytest.mark.parametrize("name", ["Dockerfile.slurmd", "Dockerfile.login"])
def test_commands_of_a_dockerfile(name: str, packages: Path) -> None:
    """Tests have no docker and no Slinky image, but apt(8), the packages and the checks are the same."""
    said = lines((PODS / name).read_text())
    assert said.keys() == {"ARG", "FROM", "COPY", "RUN"}
    (run,) = said["RUN"]
    mount, _, script = run.partition(" ")
    assert mount == "--mount=type=bind,from=packages,target=/packages"
    copied, settings = (words.split() for words in said["COPY"])
    with machine("trixie", f"pod-{name[11:]}", slurm=True) as debian:
        (debian.path / "packages").mkdir()
        assert copied.pop() == "/"
        for pattern in copied:
            (package,) = packages.glob(pattern)
            shutil.copy(package, debian.path / "packages")
        debian.run(script)
        shutil.rmtree(debian.path / "packages")
        shutil.copy(PODS / settings[0], debian.path / settings[1][1:])
        plugin = debian.path / "usr/lib/penroot/spank_pyxis.so"
        assert str(plugin.readlink()) == f"plugins/{PLUGINS['trixie']}/spank_pyxis.so"
        shown = debian.run("penroot info").stdout
        given = re.findall(r"^ENROOT_\w+", (PODS / settings[0]).read_text(), re.MULTILINE)
        assert given
        for variable in given:
            assert re.search(rf"{variable}=.* \(/etc/enroot/enroot\.conf:\d+\)", shown), variable
        assert not list((debian.path / "var/lib/apt/lists").iterdir())
