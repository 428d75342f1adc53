"""Prune and verify the store while containers use it. An ordinary user runs the command line."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import images
from tests.images import Image, entry
from tests.kernel.conftest import UID, User, ordinary_user, require
from tests.kernel.registry import Server


def numbered(number: int) -> Image:
    return images.busybox(entry("number", b"%d" % number), entry("fill", os.urandom(100_000)))


@pytest.fixture(scope="module")
def registry(registry: Server) -> Server:
    for number in range(4):
        registry.pusher.image("test/cache", str(number), numbered(number))
    return registry


def uri(registry: Server, number: int) -> str:
    return f"docker://{registry.host}/test/cache:{number}"


def stored(user: User) -> set[str]:
    """Return the tags of the images in the store."""
    images = json.loads(user.penroot("cache", "list", "--json").stdout)
    return {name.rpartition(":")[2] for image in images for name in image["names"]}


@pytest.mark.parity("cache list --json, prune --keep --older -n --dry-run")
def test_list_is_a_table_with_short_digests(user: User, registry: Server) -> None:
    user.start(uri(registry, 0), "true")
    (image,) = json.loads(user.penroot("cache", "list", "--json").stdout)
    titles, row = user.penroot("cache", "list").stdout.splitlines()
    assert titles.split() == ["NAME", "DIGEST", "SIZE", "LAST", "USED"]
    assert row.split()[:2] == [image["names"][0], image["digest"].removeprefix("sha256:")[:12]]


def set_last_use(user: User, registry: Server, number: int, hours: int) -> None:
    """Set the last use of an image to ``hours`` ago."""
    name = next(f for f in (user.home / "cache/refs").iterdir() if f.name.endswith(f"3A{number}%2Bamd64"))
    digest = name.read_text().split("\n")[0].removeprefix("sha256:")
    at = time.time() - hours * 3600
    os.utime(user.home / "cache/images" / digest, (at, at))


@contextlib.contextmanager
def running(user: User, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a container that waits until its stdin is closed, and then prints /number."""
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with user.running("penroot", "start", *arguments, "sh", "-c", "echo up; cat; cat /number", **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process
        process.communicate("")


def temporary_files(user: User) -> list[Path]:
    return list((user.home / "cache/tmp").iterdir())


def test_cache_verbs_accept_a_store_that_does_not_exist(user: User) -> None:
    for verb in ("list", "verify", "prune"):
        user.penroot("cache", verb)
    assert not (user.home / "cache").exists()


@pytest.mark.parity("cache list --json, prune --keep --older -n --dry-run")
def test_prune_keeps_images_of_processes_and_containers(user: User, registry: Server) -> None:
    for number in (0, 1, 2):
        user.start(uri(registry, number), "true")
    user.penroot("create", "--name", "kept", uri(registry, 1))
    with running(user, uri(registry, 0)) as process:
        stderr = user.penroot("cache", "prune").stderr
        assert stored(user) == {"0", "1"}, stderr
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert any(f"process {pid}\n" in stderr for pid in (process.pid, *children)) and "data/kept" in stderr
        assert process.communicate("")[0].endswith("0")  # the container reads the file only now, after the prune
    assert user.start("kept", "cat", "/number") == "1"
    user.penroot("cache", "prune")
    assert stored(user) == {"1"}
    user.penroot("remove", "-f", "kept")
    user.penroot("cache", "prune")
    assert stored(user) == set() and temporary_files(user) == []
    assert list((user.home / "cache/layers").iterdir()) == [] == list((user.home / "cache/refs").iterdir())


@pytest.mark.parity("cache prune IMAGE")
def test_one_image_is_pruned_by_name_or_digest(user: User, registry: Server) -> None:
    for number in (0, 1, 2, 3):
        user.start(uri(registry, number), "true")
    images = {
        image["names"][0]: image["digest"] for image in json.loads(user.penroot("cache", "list", "--json").stdout)
    }
    first, second = list(images)[:2]  # the images of the last two starts
    assert images[first] in user.penroot("cache", "prune", first).stdout
    user.penroot("cache", "prune", images[second].partition(":")[2][:12])
    remaining = {image["digest"] for image in json.loads(user.penroot("cache", "list", "--json").stdout)}
    assert remaining == set(images.values()) - {images[first], images[second]}
    for wrong in (first, "sha256:00", "nosuch:1", ""):
        assert "cache list" in user.penroot("cache", "prune", wrong, status=1).stderr, wrong
    user.penroot("cache", "prune", uri(registry, 0))
    assert stored(user) == {"1"}


def test_image_in_use_is_not_pruned_by_name(user: User, registry: Server) -> None:
    user.start(uri(registry, 1), "true")
    with running(user, uri(registry, 0)):
        done = user.penroot("cache", "prune", uri(registry, 0), status=1)
        assert "kept sha256:" in done.stderr and "not every image was removed" in done.stderr
    assert stored(user) == {"0", "1"}


def test_running_container_whose_record_is_gone_keeps_its_image(user: User, registry: Server) -> None:
    user.penroot("create", "--name", "box", uri(registry, 3))
    with running(user, "box") as process:
        user.run(
            "sh", "-c", f"chmod -R u+rwX {user.data}/box; rm -rf {user.data}/box"
        )  # containers that other tools made have no record either
        user.penroot("cache", "prune")
        assert stored(user) == {"3"}
        assert process.communicate("")[0].endswith("3")


def test_containers_in_another_data_path_count(user: User, registry: Server) -> None:
    user.penroot("create", "--name", "far", uri(registry, 2), env={"ENROOT_DATA_PATH": str(user.home / "else")})
    user.penroot("cache", "prune")
    assert stored(user) == {"2"}


def test_container_in_a_store_whose_path_is_long(user: User, registry: Server) -> None:
    user.environ["ENROOT_CACHE_PATH"] = "/".join([str(user.home), *(["d" * 60] * 4)])
    user.start(uri(registry, 1), "true")
    with running(user, uri(registry, 0)):
        stderr = user.penroot("cache", "prune").stderr
        assert stored(user) == {"0"}, stderr
    stderr = user.penroot("cache", "prune").stderr
    assert stored(user) == set(), stderr


def test_image_in_use_from_another_store_is_kept_there(user: User, registry: Server) -> None:
    require(os.geteuid() == 0, "needs root to become another user")
    user.start(uri(registry, 0), "true")
    with ordinary_user(UID + 1) as other, running(other, uri(registry, 0)):
        user.penroot("cache", "prune")
        assert stored(user) == set()
        other.penroot("cache", "prune")
        assert stored(other) == {"0"}


@pytest.mark.clusters("Homes on NFS, a local disk in each node")
@pytest.mark.parity("ENROOT_CACHE_LIMIT")
def test_limit_removes_the_least_recently_used_image(user: User, registry: Server) -> None:
    for number in (0, 1, 2):
        user.start(uri(registry, number), "true")
    for number, hours in ((0, 5), (1, 50), (2, 20)):
        set_last_use(user, registry, number, hours)
    user.start(uri(registry, 1), "true")  # records the use
    base = sum(len(layer.tar) for layer in numbered(0).layers[:1])
    change = sum(len(layer.tar) for layer in numbered(0).layers[1:])
    user.penroot("cache", "prune", "--keep", str(base + 2 * change))
    assert stored(user) == {"0", "1"}
    user.start(uri(registry, 3), "true", env={"ENROOT_CACHE_LIMIT": str(base + 2 * change)})
    assert stored(user) == {"1", "3"}
    assert user.start(uri(registry, 2), "cat", "/number") == "2"


@pytest.mark.parity("cache list --json, prune --keep --older -n --dry-run")
def test_dry_run_and_older_keep_a_new_image(user: User, registry: Server) -> None:
    user.start(uri(registry, 0), "true")
    user.penroot("cache", "prune", "-n")
    user.penroot("cache", "prune", "--older", "1")
    assert stored(user) == {"0"}
    set_last_use(user, registry, 0, 30)
    user.penroot("cache", "prune", "--older", "1")
    assert stored(user) == set()


def test_starts_while_pruning_never_see_an_empty_image(user: User, registry: Server) -> None:
    """Each start finds its image or fetches it again. No start reads a removed layer, and verify finds no damage."""
    user.start(uri(registry, 0), "true")
    start, verify = f'penroot start "{uri(registry, 0)}" cat /number || exit 1; echo', "penroot cache verify && echo 0"
    scripts = [f"for i in 1 2 3 4 5 6 7 8; do {each} || exit 1; done 2> /dev/null" for each in (start, start, verify)]
    starts = [user.begin("sh", "-c", script, stdout=subprocess.PIPE) for script in scripts]
    while any(process.poll() is None for process in starts):
        user.penroot("cache", "prune")
    for process in starts:
        assert process.communicate()[0].split() == ["0"] * 8
        assert process.returncode == 0
    assert temporary_files(user) == []


def test_killed_prune_leaves_whole_images_or_none(user: User, registry: Server, rng: random.Random) -> None:
    for _ in range(4):
        for number in (0, 1, 2):
            user.start(uri(registry, number), "true")
        process = user.begin("penroot", "cache", "prune", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.05, 0.25))
        process.send_signal(signal.SIGKILL)
        process.wait()
        user.penroot("cache", "verify")
        for number in (0, 1, 2):
            assert user.start(uri(registry, number), "cat", "/number") == str(number)
    user.penroot("cache", "prune")
    assert temporary_files(user) == []


@pytest.mark.parity("a store of another user is refused", "cache list --json, prune --keep --older -n --dry-run")
def test_verify_finds_changes_and_repair_fetches_the_image(user: User, registry: Server) -> None:
    user.start(uri(registry, 1), "true")
    user.penroot("create", "--name", "box", uri(registry, 1))
    stderr = user.penroot("cache", "verify").stderr
    assert stderr.startswith("[INFO] checked 1 image and 2 layers, ")
    assert stderr.endswith(" MB: none damaged\n")
    layers = [path / "fs" for path in (user.home / "cache/layers").iterdir()]
    (top,) = (path for path in layers if (path / "number").exists())
    (base,) = (path for path in layers if path != top)
    before = (top / "number").stat()
    (top / "number").write_bytes(b"7")
    os.utime(top / "number", ns=(before.st_atime_ns, before.st_mtime_ns))
    (base / "bin/more").symlink_to("busybox")
    (base / "bin/id").unlink()
    (base / "etc").chmod(0o700)
    (base.parent / "index").write_text((base.parent / "index").read_text() + "file 4755 0 0 bin/busybox\n")
    (image,) = (user.home / "cache/images").iterdir()
    (image / "stack").write_text("")
    stderr = user.penroot("cache", "verify", status=1).stderr
    for line in (
        "/number was changed: content", "/bin/more was added", "/bin/id is gone", "/etc was changed: mode",
        "its index was changed", "its stack was changed", "cache verify --repair",
    ):  # fmt: skip
        assert line in stderr
    user.penroot("cache", "verify", "--repair")
    assert ": none damaged" in user.penroot("cache", "verify").stderr
    assert user.start("box", "cat", "/number") == "1"


@pytest.mark.clusters("NFS or Lustre, and no local disk")
def test_store_without_locks_is_reported(user: User, registry: Server) -> None:
    """Lustre has no locks unless it is mounted with the option flock."""
    require(shutil.which("strace"), "strace is not installed")
    prefix = ("strace", "-f", "-qq", "-o", str(user.home / "trace"), "-e", "inject=flock:error=ENOSYS")
    stderr = user.penroot("start", uri(registry, 1), "true", prefix=prefix, status=1).stderr
    assert "cannot lock" in stderr and "-o flock" in stderr and "Traceback" not in stderr
    assert list((user.home / "cache/tmp").iterdir()) == []


def test_repair_keeps_layers_that_are_in_use(user: User, registry: Server) -> None:
    with running(user, uri(registry, 1)):
        (top,) = (user.home / "cache/layers").glob("*/fs/number")
        top.write_bytes(b"7")
        stderr = user.penroot("cache", "verify", "--repair", status=1).stderr
        assert "uses it" in stderr and top.exists()
