"""With ENROOT_EVENTS, penroot records a user's pulls, creations and starts. `penroot cache metrics` sums them up."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from tests import images
from tests.images import entry
from tests.kernel.conftest import PREFIX, User
from tests.kernel.registry import Server


@pytest.fixture(scope="module")
def registry(registry: Server) -> Server:
    registry.pusher.image("test/events", "1", images.busybox(entry("number", b"1")))
    return registry


@pytest.fixture
def file(user: User) -> pathlib.Path:
    """Make the user record events in a file, and return the file."""
    path = user.home / "events.jsonl"
    user.environ["ENROOT_EVENTS"] = str(path)
    return path


def records(file: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parity("ENROOT_EVENTS=FILE|DIRECTORY", "ENROOT_EVENTS (new)")
def test_a_pull_is_a_miss_and_then_a_hit(user: User, registry: Server, file: pathlib.Path) -> None:
    uri = f"docker://{registry.host}/test/events:1"
    for _ in range(2):
        user.start(uri, "true")
    first, start, second, again = records(file)
    assert [r["event"] for r in (first, start, second, again)] == ["pull", "start", "pull", "start"]
    assert (first["cache"], second["cache"]) == ("miss", "hit")
    assert first["bytes"] > 0 and first["layers"] > 0 and "bytes" not in second
    assert {"resolve", "fetch", "compose"} <= set(first["phases"])
    digest = user.penroot("digest", uri).stdout.strip()
    assert {r["digest"] for r in (first, start, second, again)} == {digest}
    assert {r["image"] for r in (first, start, second, again)} == {f"{registry.host}/test/events:1"}
    assert (start["uid"], start["result"]) == (user.uid, "ok")
    assert {"image", "rootfs", "mounts", "hooks"} == set(start["phases"])


@pytest.mark.parity("ENROOT_EVENTS=FILE|DIRECTORY")
def test_creations_and_containers(user: User, registry: Server, file: pathlib.Path, image: pathlib.Path) -> None:
    user.penroot("create", "--name", "unpacked", str(image))
    user.penroot("load", "--name", "stored", f"docker://{registry.host}/test/events:1")
    user.start("stored", "true")
    unpacked, pull, stored, start = records(file)
    assert (unpacked["event"], unpacked["container"], unpacked["image"]) == ("create", "unpacked", str(image))
    assert (pull["event"], stored["event"], stored["container"]) == ("pull", "create", "stored")
    assert stored["digest"] == pull["digest"]
    assert (start["event"], start["container"]) == ("start", "stored")


@pytest.mark.parity("failures, with their message")
def test_a_failure_is_recorded_with_its_message(user: User, file: pathlib.Path) -> None:
    user.penroot("start", "no-such", "true", status=1)
    (record,) = records(file)
    assert record["result"] == "error" and record["error"].startswith("no such container: no-such")


@pytest.mark.parity("neither an image nor another user can make or redirect a record")
def test_user_and_host_of_an_event_are_not_the_images(user: User, rootfs: pathlib.Path, file: pathlib.Path) -> None:
    """The container has its own passwd and host name, but the record has the host's."""
    (rootfs / "etc/passwd").write_text(f"mallory:x:{user.uid}:{user.uid}::/:/bin/sh\n")
    user.start("--root", "--uts", "--pid", "box", "true")
    (record,) = records(file)
    assert (record["uid"], record["user"]) == (user.uid, str(user.uid))


def test_a_container_does_not_get_the_file(user: User, rootfs: pathlib.Path, file: pathlib.Path) -> None:
    opened = user.start("box", "sh", "-c", "for fd in /proc/self/fd/*; do readlink $fd; done; true")
    assert opened.startswith("/dev/null\n")
    assert "events" not in opened


def test_explain_records_nothing(user: User, rootfs: pathlib.Path, file: pathlib.Path) -> None:
    user.start("--explain", "box", "true")
    assert not file.exists()


@pytest.mark.parity("nothing waits for a record")
def test_missing_daemon_is_a_warning(user: User, rootfs: pathlib.Path) -> None:
    user.environ["ENROOT_EVENTS"] = "journald"
    hide = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /run && exec "$@"', "sh")
    done = user.penroot("start", "box", "echo", "started", prefix=hide)
    assert done.stdout == "started\n"
    assert done.stderr.startswith("[WARN] events are not recorded: /run/systemd/journal/socket: No such file")


def test_invalid_place_for_events_is_an_error(user: User, rootfs: pathlib.Path) -> None:
    stderr = user.penroot("start", "box", "true", env={"ENROOT_EVENTS": "journal"}, status=1).stderr
    assert "ENROOT_EVENTS='journal' must be an absolute path or journald or syslog" in stderr
    stderr = user.penroot("cache", "metrics", "--output", "/proc/x", status=1).stderr
    assert stderr.startswith("[ERROR] cannot write /proc/x: ")


def samples(text: str) -> dict[str, float]:
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


@pytest.mark.parity("penroot cache metrics", "cache metrics --output")
def test_metrics(user: User, registry: Server, file: pathlib.Path) -> None:
    uri = f"docker://{registry.host}/test/events:1"
    for _ in range(3):
        user.start(uri, "true")
    user.penroot("start", "no-such", "true", status=1)
    with file.open("a") as f:  # lines that are not records or have impossible values
        f.write('no json\n[1]\n{"event": "x\\"y", "result": "ok"}\n{"event": "start"}\n')
        f.write('{"event": "pull", "result": "ok", "cache": "a\\nb", "seconds": NaN, "bytes": -5, "phases": [1]}\n')
        f.write('{"event": "pull", "result": "ok", "cache": "hit", "seconds": "1", "phases": {"evil\\"": 1}}\n')
    path = user.home / "penroot.prom"
    user.penroot("cache", "metrics", "--output", str(path))
    metrics = samples(path.read_text())
    me = f'user="{user.uid}"'
    assert metrics[f"penroot_store_images{{{me}}}"] == 1
    assert metrics[f"penroot_store_bytes{{{me}}}"] > 0
    assert metrics[f'penroot_events_total{{{me},event="start",result="ok"}}'] == 3
    assert metrics[f'penroot_events_total{{{me},event="start",result="error"}}'] == 1
    assert metrics[f'penroot_pulls_total{{{me},cache="hit"}}'] == 3
    assert metrics[f'penroot_pulls_total{{{me},cache="miss"}}'] == 1
    assert metrics[f"penroot_pulled_bytes_total{{{me}}}"] == records_bytes(file)
    assert "evil" not in path.read_text() and path.stat().st_mode & 0o777 == 0o644
    assert samples(user.penroot("cache", "metrics").stdout) == metrics


LONG_NUMBERS = ["9" * 400, "-" + "9" * 400, "9" * 5000, "9" * 20000, "1." + "0" * 500]
LONG_NUMBERS += "1e400 true -1 1e999999".split()


@pytest.mark.parametrize("number", LONG_NUMBERS, ids=range(len(LONG_NUMBERS)))
def test_number_without_measure_breaks_no_metrics(user: User, file: pathlib.Path, number: str) -> None:
    """A record with a huge or impossible number once made every later call of ``cache metrics`` fail."""
    record = (
        '{{"event": "pull", "result": "ok", "cache": "hit", "seconds": {0}, "bytes": {0}, "phases": {{"fetch": {0}}}}}'
    )
    file.write_text(record.format(number) + '\n{"event": "start", "result": "ok", "seconds": 2}\n')
    user.own(file)
    metrics = samples(user.penroot("cache", "metrics").stdout)
    me = f'user="{user.uid}"'
    assert metrics[f'penroot_seconds_total{{{me},event="start"}}'] == 2
    assert all(value < 1e15 for value in metrics.values())


def records_bytes(file: pathlib.Path) -> int:
    """Return the number of fetched bytes in the first record, which is the only pull with a transfer."""
    return int(json.loads(file.read_text().splitlines()[0])["bytes"])


@pytest.mark.parity("penroot cache metrics")
def test_metrics_are_in_prometheus_format(user: User, rootfs: pathlib.Path, file: pathlib.Path) -> None:
    """Each metric has one TYPE line, before its samples."""
    user.start("box", "true")
    typed: set[str] = set()
    for line in user.penroot("cache", "metrics").stdout.splitlines():
        if line.startswith("# TYPE "):
            name = line.split()[2]
            assert name not in typed and line.split()[3] in ("gauge", "counter")
            typed.add(name)
        elif not line.startswith("# HELP "):
            match = re.fullmatch(r'(\w+)\{\w+="[^"\n]*"(,\w+="[^"\n]*")*\} [0-9.e+-]+', line)
            assert match and match[1] in typed, line


@pytest.mark.parity("the examples of docs/reference/events.md")
def test_the_examples_of_the_documentation(user: User, rootfs: pathlib.Path, file: pathlib.Path) -> None:
    """The record in the documentation has the keys of real records. The documented command writes metrics."""
    text = (pathlib.Path(__file__).parents[2] / "docs/reference/events.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", text, re.S)
    (command,) = re.findall(r"```console\n\$ (.*)\n```", text)
    user.start("box", "true")
    (record,) = records(file)
    shown = json.loads(example)
    assert set(record) <= set(shown) | {"container"} and set(record["phases"]) <= set(shown["phases"])
    directory = user.home / "node_exporter"
    directory.mkdir()
    user.own(directory)
    replacements = {"penroot cache": f"{PREFIX}/bin/penroot cache", "/var/lib/node_exporter": str(directory)}
    for words, instead in {**replacements, "$(id -un)": "$(id -u)"}.items():  # the user has no name in the tests
        command = command.replace(words, instead)
    user.run("sh", "-c", command)
    assert 'event="start",result="ok"} 1' in (directory / f"penroot-{user.uid}.prom").read_text()
