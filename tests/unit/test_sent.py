"""srun sends a squashfs file of its host to the nodes: errors at submission, and the transfer into the stores."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from enroot_py.base.errors import PenrootError, UsageError
from enroot_py.config import settings
from enroot_py.features.swarm import sent, spool, step, store_file
from enroot_py.features.swarm.sent import SentFile
from enroot_py.store import inventory, layout, squashfs, verify
from enroot_py.store.prune import Bounds, prune
from enroot_py.store.store import Store
from pyxis_py.request import options
from pyxis_py.request import settings as plugin_settings
from pyxis_py.request.channel import Channel
from pyxis_py.request.job import REFUSED, Job
from pyxis_py.submit import submission
from tests.waiting import until

FORK = multiprocessing.get_context("fork")
SIZE = 5 * spool.PIECE + 12345


def image(path: Path, number: int = 1, size: int = SIZE) -> Path:
    """Write a file of random bytes behind the superblock of a squashfs file."""
    data = bytearray(random.Random(number).randbytes(size))
    data[:4], data[28:30], data[40:48] = b"hsqs", (4).to_bytes(2, "little"), size.to_bytes(8, "little")
    path.write_bytes(data)
    return path


def job(text: str, cwd: Path, *pairs: tuple[str, str], context: str = "srun") -> Job:
    fixed = [("verb", "check"), ("context", context), ("cwd", str(cwd)), ("environ", f"XDG_CACHE_HOME={cwd}")]
    return Job([*fixed, ("option", f"container-image={text}"), *pairs])


# -- submission of a job


@pytest.mark.parametrize(
    ("text", "path"),
    [
        *((f"bcast:{path}", path) for path in ("./x.sqsh", "/a/x y.sqsh", "x.sqsh", "12", "a/b")),
        *((text, "") for text in "bcast:5000#a/b bcast:5000/a/b docker://bcast:12 bcast ./bcast:x.sqsh".split()),
    ],
)
def test_bcast_prefix_selects_a_file(text: str, path: str) -> None:
    request = options.parse([("container-image", text)], {})
    assert request.sent == path
    assert request.is_reference("/") == (not path and text[0] != ".")


@pytest.mark.parametrize("path", ["/", ".", "a/..", "~/x.sqsh", "$HOME/x.sqsh", "/" + 5000 * "a"])
def test_bad_bcast_path_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="^--container-image=bcast:"):
        options.parse([("container-image", f"bcast:{path}")], {})


def refusal(*arguments: object, **keywords: str) -> PenrootError:
    with pytest.raises(PenrootError) as caught:
        submission.check(job(*arguments, **keywords))
    assert "\n" not in str(caught.value)
    return caught.value


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("no image")
    os.truncate(image(tmp_path / "cut"), SIZE - 1)
    for name, why in (
        *(("./x.sqsh", "No such file"), ("fifo", "not a regular file"), (str(tmp_path), "not a regular file")),
        *(("./text", "is not a squashfs file"), ("./cut", "truncated")),
    ):
        assert why in str(refusal(f"bcast:{name}", tmp_path))
    assert os.uname().nodename in refusal("bcast:./x.sqsh", tmp_path).hint
    assert "No such file" in str(refusal("bcast:./x.sqsh", tmp_path, context="salloc"))


def test_file_is_refused_if_srun_cannot_send_it(tmp_path: Path) -> None:
    image(tmp_path / "x.sqsh")
    off = refusal("bcast:x.sqsh", tmp_path, ("arg", "swarm=no"))
    assert "swarm=no in plugstack.conf" in str(off) and "sbcast" in off.hint
    batch = refusal("bcast:x.sqsh", tmp_path, context="sbatch")
    assert "a batch script starts without" in str(batch) and "first node" in batch.hint


def test_file_is_checked_at_submission(tmp_path: Path) -> None:
    path = image(tmp_path / "x.sqsh")
    assert opened(path).size == SIZE
    assert opened(path, ("arg", "importer=/bin/true")).size == SIZE
    assert submission.check(job("bcast:x.sqsh", tmp_path, context="salloc"))[1] is None


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the files that the process of srun would keep open until its end."""
    yield
    while OPENED:
        os.close(OPENED.pop())


OPENED: list[int] = []


def opened(path: Path, *pairs: tuple[str, str]) -> SentFile:
    file = submission.check(job(f"bcast:{path}", path.parent, *pairs))[1]
    assert isinstance(file, SentFile)
    OPENED.append(file.fd)
    return file


def test_opened_file_is_sent_after_a_rename(tmp_path: Path) -> None:
    path = image(tmp_path / "x.sqsh")
    file, digest = opened(path), f"sha256:{squashfs.checksum(str(path))}"
    os.rename(image(tmp_path / "y", 2), path)
    assert (file.digest(), file.changed()) == (digest, "")
    second = opened(path)
    before = second.digest()
    image(path, 3)
    os.utime(path, ns=(1, 1))
    assert second.changed()
    assert second.digest() == f"sha256:{squashfs.checksum(str(path))}" != before
    assert not second.changed()


def test_digest_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = image(tmp_path / "x.sqsh")
    digest = opened(path).digest()
    assert not (tmp_path / "enroot/swarms").exists(), "the digest of a file changed just now must not be stored"
    monkeypatch.setattr(sent, "_SETTLED_S", -1.0)
    assert opened(path).digest() == digest
    (note,) = (tmp_path / "enroot/swarms").iterdir()
    assert note.read_text() == digest
    note.write_text(other := "sha256:" + "0" * 64)
    assert opened(path).digest() == other
    os.utime(path, ns=(1, path.stat().st_mtime_ns))
    assert opened(path).digest() == digest


# -- transfer


class Srun:
    """The helper process of srun, and its answer for the nodes."""

    def __init__(self, file: SentFile, nodes: int, **more: str) -> None:
        ours, theirs = socket.socketpair()
        self.process = FORK.Process(target=self._serve, args=(file, ours, theirs))
        self.process.start()
        theirs.close()
        self.socket, self.nodes = ours, nodes
        channel = Channel(ours)
        channel.send([("verb", "offer"), ("jobid", "7"), ("stepid", "0"), ("nodes", str(nodes)), *more.items()])
        self._answer = channel.receive()
        self.errors = []
        while self._answer[0][0] == "log":
            self.errors.append(self._answer[0][1])
            self._answer = channel.receive()

    @staticmethod
    def _serve(file: SentFile, ours: socket.socket, theirs: socket.socket) -> None:
        ours.close()
        file.serve(Channel(theirs))

    @property
    def answer(self) -> dict[str, str]:
        return dict(self._answer)

    def end(self) -> None:
        self.socket.close()
        self.process.join(60)
        assert self.process.exitcode == 0


@contextlib.contextmanager
def srun(file: SentFile, nodes: int, **more: str) -> Iterator[Srun]:
    process = Srun(file, nodes, **more)
    try:
        yield process
    finally:
        process.end()


def settings_of(store: Path) -> settings.Settings:
    return settings.load({"ENROOT_CACHE_PATH": str(store), "HOME": "/"})


class Node:
    """The helper of a node, in a process with its own store."""

    def __init__(self, srun: Srun, number: int, store: Path, *, stays: bool = False) -> None:
        """Start the process. With ``stays``, it runs until leave() is called."""
        self.store, self._stays = store, stays
        environ = {
            "SLURM_NODEID": str(number),
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "SLURM_NNODES": str(srun.nodes),
            "SLURM_PYXIS_RESOLVED": srun.answer["resolved"],
        }
        pairs = [("environ", f"{name}={value}") for name, value in environ.items()]
        numbers = [("verb", "step"), ("jobid", "7"), ("stepid", "0"), ("swarm", srun.answer.get("swarm", ""))]
        self._job = Job([*numbers, *pairs])
        self._result_reader, result_writer = FORK.Pipe()
        self.process = FORK.Process(target=self._receive, args=(result_writer, srun))
        self.process.start()
        result_writer.close()

    def _receive(self, result_writer: Connection, srun: Srun) -> None:
        srun.socket.close()  # if this copy stayed open, the helper of srun would not notice the end of srun
        self._result_reader.close()
        try:
            invitation = step.invitation(self._job, plugin_settings.load(()))
            assert invitation
            name, _, digest = self._job.environ["SLURM_PYXIS_RESOLVED"].rpartition(" ")
            result_writer.send(store_file.receive(name, digest, invitation, settings_of(self.store)).file)
        except PenrootError as e:
            result_writer.send(e)
        if self._stays:
            result_writer.poll(None)

    @property
    def result(self) -> str | PenrootError:
        """Return the path of the received file, or the error."""
        assert self._result_reader.poll(60)
        result: str | PenrootError = self._result_reader.recv()
        if not self._stays:
            self.leave()
        return result

    def leave(self) -> None:
        self._result_reader.close()
        self.process.join(60)
        assert self.process.exitcode == 0


def unfinished(store: Path) -> list[str]:
    """Return the names of the unfinished images in a store."""
    return sorted(path.name for path in (store / "tmp").iterdir())


@pytest.mark.parametrize("nodes", [1, 3])
def test_nodes_get_the_file(tmp_path: Path, nodes: int) -> None:
    path = image(tmp_path / "x.sqsh")
    with srun(opened(path), nodes) as process:
        all_nodes = [Node(process, number, tmp_path / f"n{number}") for number in range(nodes)]
        for node in all_nodes:
            file = node.result
            assert isinstance(file, str)
            assert Path(file).read_bytes() == path.read_bytes()
            assert file == f"{node.store}/images/{squashfs.checksum(str(path))}/{layout.SQUASHFS}"
            assert unfinished(node.store) == []


def test_node_with_the_file_uploads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun's host sends only a byte per second, so the other nodes get the file from the node that has it."""
    path = image(tmp_path / "x.sqsh")
    with srun(opened(path), 1) as process:
        assert isinstance(Node(process, 0, tmp_path / "n0").result, str)
    monkeypatch.setattr(sent, "SEED_RATE", 1)
    with srun(opened(path), 3) as process:
        owner = Node(process, 0, tmp_path / "n0", stays=True)
        assert isinstance(owner.result, str)
        others = [Node(process, number, tmp_path / f"n{number}") for number in (1, 2)]
        assert all(isinstance(node.result, str) for node in others)
        owner.leave()


def test_node_with_the_file_needs_no_tracker(tmp_path: Path) -> None:
    path, store = image(tmp_path / "x.sqsh"), tmp_path / "n0"
    with srun(opened(path), 1) as process:
        first = Node(process, 0, store).result
    with srun(opened(path), 1) as process:
        process.end()  # end the tracker
        assert Node(process, 0, store).result == first


def test_received_file_is_an_image_of_the_store(tmp_path: Path) -> None:
    path, store_directory = image(tmp_path / "x.sqsh"), tmp_path / "n0"
    with srun(opened(path), 1) as process:
        assert isinstance(Node(process, 0, store_directory).result, str)
    store = Store(str(store_directory))
    (stored,) = inventory.images(store)
    assert (stored.size, stored.names) == (SIZE, (f"bcast:{path}",))
    assert list(verify.damage(store)) == []
    with open(f"{stored.path}/{layout.SQUASHFS}", "r+b") as file:
        file.write(b"damaged")
    (damaged_path, problem), *_ = verify.damage(store)
    assert (damaged_path, problem) == (stored.path, "its image.sqsh was changed")
    assert verify.repair(store, {damaged_path}) == []  # repair() can only fetch images from registries
    with srun(opened(path), 1) as process:
        assert isinstance(Node(process, 0, store_directory).result, str)
    assert len(prune(store, settings_of(store_directory), Bounds()).images) == 1
    assert inventory.images(store) == []


def test_two_steps_of_a_node_share_the_file(tmp_path: Path) -> None:
    path = image(tmp_path / "x.sqsh")
    with srun(opened(path), 1) as one, srun(opened(path), 1) as other:
        nodes = [Node(process, 0, tmp_path / "n0") for process in (one, other)]
        assert len({str(node.result) for node in nodes}) == 1


def failed(node: Node) -> PenrootError:
    error = node.result
    assert isinstance(error, PenrootError), error
    assert unfinished(node.store) == []
    assert "\n" not in str(error)
    return error


def test_changed_file_is_reported_by_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent, "SEED_RATE", 2 * spool.PIECE)  # bytes per second
    path = image(tmp_path / "x.sqsh")
    with srun(opened(path), 2) as process:
        nodes = [Node(process, number, tmp_path / f"n{number}") for number in range(2)]
        wait_for_first_bytes(nodes)
        image(path, 2)
        errors = sorted(str(failed(node)) for node in nodes)
    assert errors == ["", f"bcast:{path}: the file was changed while it was sent"]


def wait_for_first_bytes(nodes: list[Node]) -> None:
    def has_bytes(node: Node) -> bool:
        return any(file.read_bytes()[:4] == b"hsqs" for file in node.store.glob("tmp/*/image.sqsh"))

    until(lambda: all(map(has_bytes, nodes)), "the first bytes")


def test_file_with_a_wrong_digest_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file changes, but its size and time stay the same, which is possible on a network file system."""
    path = image(tmp_path / "x.sqsh")
    file = opened(path)
    file.digest()
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    image(path, 2)
    os.utime(path, ns=times)
    with srun(file, 1) as process:
        error = failed(Node(process, 0, tmp_path / "n0"))
    assert "has the digest" in str(error) and "try again" in error.hint


def test_end_of_srun_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent, "SEED_RATE", 2 * spool.PIECE)
    monkeypatch.setattr("enroot_py.features.swarm.file.FileSource.RETRY_WAITS_S", (0.1,))
    with srun(opened(image(tmp_path / "x.sqsh")), 1) as process:
        node = Node(process, 0, tmp_path / "n0")
        wait_for_first_bytes([node])
    assert "has stopped sending at byte" in str(failed(node))


def test_unreachable_host_of_srun_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enroot_py.features.swarm.file.FileSource.RETRY_WAITS_S", (0.1,))
    with srun(opened(image(tmp_path / "x.sqsh")), 1) as process:
        process.end()
        error = failed(Node(process, 0, tmp_path / "n0"))
    assert "does not reach srun's host, 127.0.0.1 port " in str(error) and "SrunPortRange" in error.hint


def test_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with srun(opened(image(tmp_path / "x.sqsh")), 1) as process:
        error = failed(Node(process, 0, tmp_path / "n0"))
    assert "No space left" in str(error) and "remove some files" in error.hint


def test_used_port_range_is_reported(tmp_path: Path) -> None:
    listener = socket.create_server(("", 0))
    port = listener.getsockname()[1]
    with srun(opened(image(tmp_path / "x.sqsh")), 1, firstport=str(port), lastport=str(port)) as process:
        assert process.answer["resolved"].endswith(f" {REFUSED}")
        assert "srun cannot listen" in process.errors[0] and "SrunPortRange" in process.errors[1]
    listener.close()
