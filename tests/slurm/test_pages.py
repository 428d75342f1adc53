"""Run all commands of pages in docs/, in order. Each prints the output that the page shows below the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import ROOT, recording
from tests.docs.console import examples, run
from tests.installation import LIBRARY
from tests.slurm import debian as debian_image
from tests.slurm.lab import Lab
from tests.slurm.steps import assert_nothing_left


@pytest.fixture(scope="module")
def debian(lab: Lab) -> None:
    debian_image.push(lab)


# Names in the pages, and their replacements in the lab.
REPLACEMENTS = {
    "/usr/lib/penroot": LIBRARY,
    "/local/": "/var/tmp/",
    "/scratch": "/media",
    "registry.example.org": "registry.lab",
}
CALLERS = {"$": {"user": "alice"}, "#": {"user": "root", "node": "n1"}}


def follow(lab: Lab, page: str) -> None:
    """Run all commands of a page. Lines about a job that waits for its node are ignored."""
    for example in examples(ROOT / "docs" / page):
        command = example.command
        for there, here in REPLACEMENTS.items():
            command = command.replace(there, here)
        printed = run(lab, command, **CALLERS[example.prompt])
        for there, here in REPLACEMENTS.items():
            printed = printed.replace(here, there)
        assert example.fits(printed), f"{page}: {example.prompt} {example.command}\n{printed}"


@pytest.fixture
def home(lab: Lab) -> Iterator[None]:
    yield
    lab.run("rm -rf first .edf")
    lab.run("penroot remove -f box", check=False)
    assert_nothing_left(lab)


@pytest.mark.parity("a first hour for a user and for an admin")
def test_first_hour_for_users(lab: Lab, debian: None, home: None) -> None:
    follow(lab, "tutorials/user.md")


@pytest.fixture
def site(lab: Lab) -> Iterator[None]:
    """Restore the configuration of Slurm and of penroot after the test."""
    plugin = Path(lab.root, "etc/slurm/plugstack.conf.d/pyxis.conf")
    line = plugin.read_text().strip()
    yield
    lab.install_plugin(line)
    for name in ("penroot.yaml", "registries.conf", "environ.d", "mounts.d"):
        lab.run(["rm", "-rf", f"/etc/enroot/{name}"], user="root")
    for node in lab.nodes:
        # The lab has no /run/user, so the parsed penroot.yaml is in /tmp/penroot-UID.
        kept = ("/var/tmp/enroot", "/var/log/penroot", "/tmp/penroot-2001", "/tmp/penroot-0")
        lab.run(["rm", "-rf", *kept], user="root", node=node)
        assert_nothing_left(lab, node)


@pytest.mark.clusters("Homes on NFS, a local disk in each node")
@pytest.mark.parity("a first hour for a user and for an admin")
def test_first_hour_for_admins(lab: Lab, debian: None, site: None) -> None:
    follow(lab, "tutorials/admin.md")


def test_troubleshooting(lab: Lab, debian: None) -> None:
    follow(lab, "reference/troubleshooting.md")
    assert_nothing_left(lab)


@pytest.mark.parametrize("page", ["install-packages", "build-image", "disk-space", "background", "variables"])
def test_how_to_guide(lab: Lab, debian: None, home: None, page: str) -> None:
    follow(lab, f"howto/{page}.md")


def test_recording_shows_what_the_commands_print(lab: Lab, debian: None) -> None:
    """If this fails, record again: .venv/bin/python -m tests.docs.recording."""
    assert [command for command, _ in recording.recorded()] == list(recording.COMMANDS)
    recording.run(lab, recording.COMMANDS[0])  # its output is not compared: it is longer if the image is not stored yet
    for command, lines in recording.recorded()[1:]:
        printed = [recording.steady(line) for line in recording.run(lab, command)]
        assert sorted(printed) == sorted(map(recording.steady, lines)), command
