"""A node prints a message if it waits for its swarm (nodes that send an image to each other), or cannot join it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from enroot_py.base import log
from enroot_py.base.errors import ConfigError, ImageError, RegistryError
from enroot_py.features.swarm import client, reach, reader
from enroot_py.features.swarm.blob_cache import BlobCache
from enroot_py.features.swarm.file import FileSource
from enroot_py.features.swarm.invitation import Invitation, Swarm
from enroot_py.features.swarm.messages import Documents
from enroot_py.features.swarm.ports import listener
from enroot_py.features.swarm.reader import Reader
from enroot_py.features.swarm.source import SwarmSource
from enroot_py.features.swarm.spool import PIECE, Spool
from enroot_py.features.swarm.tracker_process import TrackerProcess
from pyxis_py.request import settings
from pyxis_py.request.job import Job
from pyxis_py.submit import submission
from tests.kernel.test_swarm_sockets import CONTEXT, KEY, Host, ending


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(log, "sink", lambda level, text: lines.append(f"{level} {text}"))
    for module in (client, reader):
        monkeypatch.setattr(module, "_NOTICE_AFTER_S", 0.1)
    return lines


def test_first_blob_without_bytes_reports_a_quiet_swarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: list[str]
) -> None:
    monkeypatch.setattr(reader, "_STUCK_S", 0.5)
    spool = Spool([100, 100, 100], [1, 2], str(tmp_path))
    spool.peer_pipe, end = os.pipe()
    blobs = [Reader(spool, number, lambda at: (_ for _ in ()).throw(EOFError(at))) for number in (1, 2)]
    for blob in blobs:
        with pytest.raises(EOFError):
            blob.read(10)
    os.close(end)
    assert printed == ["INFO waiting for other nodes: no byte of the image for 0 s"]


@pytest.mark.parametrize("given_up", [False, True])
def test_reader_sleeps_until_bytes_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_up: bool) -> None:
    """New bytes wake the reader up. With checks every _LOOK_S, which is a day here, the test would take too long."""
    monkeypatch.setattr(reader, "_LOOK_S", 1e5)
    spool = Spool([2 * PIECE], [0], str(tmp_path))
    spool.set_trees(1)
    spool.peer_pipe, end = os.pipe()
    if os.fork() == 0:
        with ending():
            for piece in range(1 if given_up else 2):
                time.sleep(0.2)
                spool.write(0, memoryview(bytes([piece]) * PIECE), piece * PIECE)
                spool.piece_written(0, piece)
            time.sleep(0.2)
            spool.give_up("no route", "")
    blob, used = Reader(spool, 0, lambda at: (_ for _ in ()).throw(EOFError(at))), time.process_time()
    assert blob.read(2 * PIECE) == bytes(PIECE)
    if given_up:
        with pytest.raises(RegistryError, match="no route"):
            blob.read(1)
    else:
        assert blob.read(PIECE) == b"\1" * PIECE and blob.read(1) == b""
    assert time.process_time() < used + 0.1
    os.wait()
    os.close(end)


def test_node_reports_that_it_waits_for_the_tracker(tmp_path: Path, printed: list[str]) -> None:
    class Slow(Host):
        def documents(self) -> tuple[Documents, Sequence[int]]:
            time.sleep(1)
            return super().documents()

    swarm = Swarm(KEY, CONTEXT, 1)
    sock = listener()
    port = sock.getsockname()[1]
    lifeline, life = os.pipe()
    if os.fork() == 0:
        with ending():
            os.close(life)
            TrackerProcess(swarm, Slow([b"x"]), sock).serve(lifeline)
    os.close(lifeline)
    invitation = Invitation("127.0.0.1", port, 0, swarm, 0)
    SwarmSource(invitation, "sha256:" + "0" * 64, None, BlobCache(str(tmp_path), 0)).join()  # type: ignore[arg-type]
    os.close(life)
    os.wait()
    assert printed == ["INFO waiting for the tracker 127.0.0.1, which asks the registry for the image"]


@pytest.fixture
def without_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)


@pytest.mark.usefixtures("without_cryptography")
def test_node_reports_a_missing_library_once(tmp_path: Path, printed: list[str]) -> None:
    invitation = Invitation("127.0.0.1", 9, 0, Swarm(KEY, CONTEXT, 1), 0)
    SwarmSource(invitation, "sha256:" + "0" * 64, None, BlobCache(str(tmp_path), 0)).join()  # type: ignore[arg-type]
    needs = "swarm needs the Python library cryptography, which is not installed"
    assert printed == [f"INFO {needs}: this node does without a swarm", "HINT make dev"]


@pytest.mark.usefixtures("without_cryptography", "printed")
def test_node_cannot_receive_a_file_without_the_library() -> None:
    invitation = Invitation("127.0.0.1", 9, 0, Swarm(KEY, CONTEXT, 1), 0)
    with pytest.raises(ImageError, match="swarm needs the Python library cryptography") as caught:
        FileSource(invitation, "sha256:" + "0" * 64, "bcast:x.sqsh", "/x").size()
    assert caught.value.hint == "make dev"


def submitted(image: str) -> Job:
    return Job([("verb", "check"), ("context", "srun"), ("cwd", "/"), ("option", f"container-image={image}")])


@pytest.mark.usefixtures("without_cryptography")
def test_srun_without_the_library_offers_nothing(printed: list[str]) -> None:
    assert not getattr(submission.check(submitted("debian"))[1], "shares", None)
    assert not printed


@pytest.mark.usefixtures("without_cryptography")
def test_srun_without_the_library_sends_no_file() -> None:
    with pytest.raises(ConfigError, match=r"x\.sqsh: swarm needs the Python library cryptography") as caught:
        submission.check(submitted("bcast:x.sqsh"))
    assert caught.value.hint == "make dev"


@pytest.mark.usefixtures("without_cryptography")
def test_check_reports_the_missing_library() -> None:
    [finding] = reach.libraries(settings.load(()))
    assert finding.verdict == "warn" and finding.fix == "make dev"
    assert "cryptography, which is not installed: each node asks the registry" in finding.what
    assert not list(reach.libraries(settings.load(("swarm=no",))))
