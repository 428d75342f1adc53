"""Run the command lines in tests/parity/lines, and compare penroot's results with the recorded results of enroot.

Each difference must have its reason in reference/enroot.md.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.kernel.conftest import require
from tests.parity.differential import Transcript, documented, outcomes, registry, transcripts


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Future[list[str]]]]:
    """Run the files in parallel. Each test waits only for the result of its file, so the time limit is for one file."""
    require(shutil.which("mksquashfs") and shutil.which("squashfuse"), "squashfs-tools, squashfuse are not installed")
    with registry() as host, ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {transcript.path.stem: pool.submit(outcomes, transcript, None, host) for transcript in transcripts()}


@pytest.mark.parity(
    "start NAME", "start --root", "start --conf", "start --rc SCRIPT", "start --uts", "ENROOT_ROOTFS_WRITABLE"
)
@pytest.mark.parity(
    "batch CONFIG",
    "batch: the first line of CONFIG may make CONFIG a program",
    "ENROOT_ROOTFS",
    "rc() of a script of --conf runs in place of /etc/rc",
)
@pytest.mark.parity("create IMAGE", "create --force", "remove --force", "list", "list -f", "ENROOT_FORCE_OVERRIDE")
@pytest.mark.parity(
    "fstab: x-create=dir",
    "fstab: ${VAR}",
    "--mount: accepts ':' between the fields of an fstab line",
    "ENROOT_CONFIG_PATH",
)
@pytest.mark.parity(
    "environ.d: ${VAR} is replaced by the caller's value",
    "hooks.d/*.sh",
    "a user namespace maps one user, to itself or to root",
)
@pytest.mark.parity("penroot exits with the status of the command in the container", "NAME.run --conf", "NAME.run --rc")
@pytest.mark.parametrize("transcript", transcripts(), ids=lambda transcript: transcript.path.stem)
def test_lines(transcript: Transcript, results: dict[str, Future[list[str]]]) -> None:
    for line, out in zip(transcript.lines, results[transcript.path.stem].result(), strict=True):
        assert out == line.expected, f"{transcript.path.name}:{line.number}: $ {line.command}"


def test_each_difference_from_enroot_has_its_reason() -> None:
    lines = [line for transcript in transcripts() for line in transcript.lines]
    assert len(lines) > 400
    for line in lines:
        assert not line.why or line.enroot != line.ours, line.command
        assert not line.why or documented(line.why), f"reference/enroot.md does not have {line.why!r}: {line.command}"
