"""Event records: the content of a line, and the destinations that are used or refused."""

from __future__ import annotations

import json
import os
import pathlib
import re
import resource
import socket
from collections import defaultdict
from collections.abc import Iterator

import pytest

from enroot_py.base import operations
from enroot_py.base.errors import ImageError
from enroot_py.base.operations import Operation
from enroot_py.config.settings import Settings, load
from enroot_py.features.records import events, metrics
from enroot_py.features.records.metrics import METRICS
from tests.unit.test_fuzz import retyped

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def warned() -> Iterator[None]:
    """Let each test cause the warning that a process prints only once."""
    events._Sink._warned = False
    yield
    assert operations.event is None


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return the file for records."""
    return tmp_path / "events"


def events_to(destination: str) -> Settings:
    """Return settings that send records to ``destination``."""
    return load({"HOME": "/", "ENROOT_EVENTS": destination})


def lines(path: pathlib.Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parity("a schema that is documented")
def test_a_record_has_the_documented_keys_and_no_other(file: pathlib.Path) -> None:
    with Operation("pull", events_to(str(file)), image="reg/image:1", job=7, step="7.0"):
        operations.fact(digest="sha256:1", cache="miss", layers=2, bytes=10)
        operations.phase("resolve")
        operations.phase("fetch")
        operations.phase("fetch")
    (record,) = lines(file)
    assert set(record) == set(events.FIELDS) - {"error", "container"}
    assert (record["version"], record["event"], record["result"]) == (1, "pull", "ok")
    assert (record["uid"], record["node"]) == (os.getuid(), os.uname().nodename)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(record["time"]))
    phases, seconds = record["phases"], record["seconds"]
    assert isinstance(phases, dict) and isinstance(seconds, float)
    assert list(phases) == ["resolve", "fetch"] and 0 <= sum(phases.values()) <= seconds + 1e-5


def test_nothing_is_recorded_without_the_setting() -> None:
    with Operation("pull", events_to("")) as event:
        operations.phase("resolve")
        operations.fact(cache="hit")
    assert event is None


def test_an_error_is_recorded_and_goes_on(file: pathlib.Path) -> None:
    with pytest.raises(ImageError), Operation("start", events_to(str(file))):
        raise ImageError("the image is damaged\nin two lines")
    with pytest.raises(ZeroDivisionError), Operation("start", events_to(str(file))):
        raise ZeroDivisionError
    assert [(record["result"], record["error"]) for record in lines(file)] == [
        ("error", "the image is damaged"),
        ("error", "ZeroDivisionError"),
    ]


def test_records_of_start_and_pull_name_each_other(file: pathlib.Path) -> None:
    """The record of a start has the result of its pull, and the record of the pull has the step."""
    with Operation("step", events_to(str(file)), job=3, step="3.1"), Operation("pull", events_to(str(file)), image="a"):
        operations.fact(digest="sha256:2")
    pull, step = lines(file)
    assert (pull["job"], pull["step"], pull["cache"]) == (3, "3.1", "hit")
    assert (step["image"], step["digest"], step["cache"]) == ("a", "sha256:2", "hit")


@pytest.mark.parity("neither an image nor another user can make or redirect a record")
def test_words_from_elsewhere_cannot_make_a_line(file: pathlib.Path) -> None:
    hostile = 'x"}\n{"event": "pull", "uid": 0}\u2028\udcff\x1b[2J' + "y" * 5000
    with Operation("pull", events_to(str(file)), image=hostile):
        pass
    assert file.read_text().count("\n") == 1 and file.read_text().isascii()
    (record,) = lines(file)
    assert str(record["image"]).startswith('x"}\n{') and len(str(record["image"])) == 400


def test_the_job_of_a_command_line_is_that_of_its_environment(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a command takes its job and step from SLURM_JOB_ID and SLURM_STEP_ID."""
    for job, step in ("12", "0"), ("12", "batch"), ("x", "1"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_STEP_ID", step)
        with Operation("pull", events_to(str(file))):
            pass
    assert [(r.get("job"), r.get("step")) for r in lines(file)] == [(12, "12.0"), (12, None), (None, None)]


def test_in_a_directory_each_user_has_a_file(tmp_path: pathlib.Path) -> None:
    with Operation("pull", events_to(str(tmp_path))):
        pass
    assert len(lines(tmp_path / f"{os.geteuid()}.jsonl")) == 1
    assert (tmp_path / f"{os.geteuid()}.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parity("ENROOT_EVENTS=journald")
@pytest.mark.parametrize("daemon_name", ["journald", "syslog"])
def test_a_daemon_gets_a_line_in_its_own_form(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, daemon_name: str
) -> None:
    path = str(tmp_path / "socket")
    monkeypatch.setitem(events.SOCKETS, daemon_name, path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.bind(path)
        with Operation("pull", events_to(daemon_name), image="a"):
            pass
        message = daemon.recv(65536).decode()
    if daemon_name == "journald":
        fields = dict(line.split("=", 1) for line in message.splitlines())
        assert (fields["PRIORITY"], fields["SYSLOG_IDENTIFIER"]) == ("6", "penroot")
        text = fields["MESSAGE"]
    else:
        head, _, text = message.partition("]: ")
        assert re.fullmatch(rf"<14>[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d penroot\[{os.getpid()}", head)
    assert json.loads(text)["image"] == "a"


@pytest.mark.parity("nothing waits for a record")
def test_a_daemon_that_reads_nothing_is_not_waited_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "socket")
    monkeypatch.setitem(events.SOCKETS, "journald", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.bind(path)
        for _ in range(5000):  # more than a datagram queue holds
            with Operation("pull", events_to("journald")):
                pass
            if capsys.readouterr().err:
                return
    pytest.fail("no warning after 5000 records: the queue has no limit")


@pytest.mark.parametrize("kind", ["pipe", "link", "second name", "directory is missing"])
def test_foreign_file_is_not_written_to(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    file, other = tmp_path / "events", tmp_path / "other"
    other.write_text("precious\n")
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to(other)
    elif kind == "second name":
        file.hardlink_to(other)
    elif kind == "directory is missing":
        file = tmp_path / "no" / "events"
    with Operation("pull", events_to(str(file))):
        pass
    assert other.read_text() == "precious\n"
    stderr = capsys.readouterr().err
    assert stderr.count("[WARN] events are not recorded: ") == 1 and "ENROOT_EVENTS" in stderr
    words = {"pipe": "is not a regular file", "link": "is a symbolic link", "second name": "has several hard links"}
    assert words.get(kind, "No such file or directory") in stderr


def test_record_without_room_costs_a_warning(file: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has room for only a part of the record. The warning appears nevertheless."""
    file.write_text("x" * 900 + "\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with Operation("pull", events_to(str(file))):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"[WARN] events are not recorded: {file}: File too large" in capsys.readouterr().err


def test_names_of_phases() -> None:
    with Operation("step", events_to(""), timed=True) as event:
        assert event is not None
        operations.fact(cache="miss", bytes=1_200_000)
        event.add("image", 2.5)
        event.add("hooks", 0.25)
    assert re.fullmatch(r"\d\.\d\d s: image 2\.50 s \(1\.2 MB fetched\), hooks 0\.25 s", event.words())


@pytest.mark.parity("a schema that is documented")
@pytest.mark.parametrize(
    "rows",
    [
        {f"| `{key}` | {meaning} |" for key, meaning in {**events.FIELDS, **events.KINDS}.items()},
        {f"| `{name}` | {kind} | {meaning} |" for name, (kind, meaning) in METRICS.items()},
    ],
)
def test_the_documentation_has_every_row(rows: set[str]) -> None:
    assert rows <= set((ROOT / "docs/reference/events.md").read_text().splitlines())


def test_record_of_any_shape_breaks_no_metrics(tmp_path: pathlib.Path) -> None:
    record = {"event": "pull", "result": "ok", "cache": "hit", "seconds": 1, "bytes": 1, "phases": {"fetch": 1}}
    path = tmp_path / "events"
    path.write_bytes(b"\n".join(retyped(record)))
    totals: defaultdict[metrics.Sample, float] = defaultdict(float)
    for each in metrics._records(str(path)):
        metrics._count(each, totals)
    assert all(0 <= total < 1e15 for total in totals.values())


def test_long_job_number_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, known in (("7", {"job": 7}), ("9" * 5000, {}), ("9" * 10, {"job": 9999999999})):
        monkeypatch.setenv("SLURM_JOB_ID", number)
        monkeypatch.delenv("SLURM_STEP_ID", raising=False)
        assert events._job() == known
