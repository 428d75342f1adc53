"""An ordinary user runs ``penroot lock``, which writes the digests of tags to a lock file, and uses the lock file."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re

import pytest

from tests import images
from tests.fakeregistry import faulty
from tests.images import Image, entry
from tests.installation import LIBRARY
from tests.kernel.conftest import PREFIX, User
from tests.kernel.registry import Server
from tests.slurm.test_pull import delete


def numbered(number: int) -> Image:
    return images.busybox(entry("number", b"%d\n" % number))


class Locks:
    """A user with a lock file, and a registry whose tags move."""

    def __init__(self, user: User, registry: Server) -> None:
        self.user, self.registry = user, registry
        self.path = user.home / "team.lock"

    def push(self, name: str, number: int) -> str:
        """Push the image with ``number`` as ``name``:1, and return its digest."""
        image = numbered(number)
        self.registry.pusher.image(name, "1", image)
        return image.digest()

    def write(self, text: str, path: pathlib.Path | None = None) -> None:
        (path or self.path).write_text(text)
        self.user.own(path or self.path)

    def lock(self, *words: str, status: int = 0) -> str:
        """Return the stdout of penroot lock, followed by its stderr if ``status`` is not 0."""
        done = self.user.penroot("lock", *words, status=status)
        return done.stdout + done.stderr if status else done.stdout

    def start(self, name: str, *words: str, status: int = 0, env: dict[str, str] | None = None) -> str:
        uri = f"docker://{self.registry.host}#{name}:1"
        done = self.user.penroot("start", *words, uri, "cat", "/number", status=status, env=env)
        return done.stderr if status else done.stdout


@pytest.fixture
def locks(user: User, registry: Server) -> Locks:
    return Locks(user, registry)


@pytest.mark.parity("lock: creates and updates a lock file")
def test_lock_file_is_created_and_updated(locks: Locks) -> None:
    host = locks.registry.host
    one, two = locks.push("lock/one", 1), locks.push("lock/two", 3)
    assert locks.lock("team.lock", f"{host}#lock/one:1") == f"{host}#lock/one:1 {one}\n"
    assert locks.path.read_text() == f"version 1\n{host}#lock/one:1 {one}\n"
    locks.write(f"# of the team\nversion 1\n\n# the first\n{host}#lock/one:1 {one}\n  {host}/lock/two:1\n")
    moved = locks.push("lock/one", 2)
    # The command locks the given image and all entries without a digest, and leaves other entries unchanged.
    assert locks.lock("team.lock", f"{host}#lock/two:1") == f"{host}/lock/two:1 {two}\n"
    text = f"# of the team\nversion 1\n\n# the first\n{host}#lock/one:1 {one}\n{host}/lock/two:1 {two}\n"
    assert locks.path.read_text() == text
    assert locks.lock("team.lock") == f"{host}#lock/one:1 {moved}, was {one}\n"
    assert locks.path.read_text() == text.replace(one, moved)
    assert "is up to date" in locks.user.penroot("lock", "team.lock").stderr


@pytest.mark.parity("lock: creates and updates a lock file")
def test_check_says_what_has_moved(locks: Locks) -> None:
    host = locks.registry.host
    old, other = locks.push("lock/moves", 1), locks.push("lock/stays", 3)
    locks.lock("team.lock", f"{host}#lock/moves:1", f"{host}#lock/stays:1")
    assert "no tag has moved" in locks.user.penroot("lock", "--check", "team.lock").stderr
    text = locks.path.read_text()
    new = locks.push("lock/moves", 2)
    out = locks.lock("--check", "team.lock", status=1)
    assert f"{host}#lock/moves:1 is {new}, but locked to {old}\n" in out and other not in out
    assert (
        f"[ERROR] {locks.path}: 1 of 2 tags moved or not locked\n[HINT] lock the current digests: penroot lock" in out
    )
    assert locks.path.read_text() == text
    assert "no tag has moved" in locks.user.penroot("lock", "--check", "team.lock", f"{host}#lock/stays:1").stderr
    assert "is not in this lock file" in locks.lock("--check", "team.lock", "ubuntu", status=1)


@pytest.mark.parity("lock: if one image fails, nothing is written")
def test_unreachable_registry_changes_nothing(locks: Locks) -> None:
    host = locks.registry.host
    locks.push("lock/there", 1)
    locks.lock("team.lock", f"{host}#lock/there:1")
    text = locks.path.read_text()
    locks.push("lock/there", 2)
    out = locks.lock("team.lock", f"{host}#lock/there:1", f"{host}#lock/none:1", status=1)
    assert f"{host} has no repository lock/none" in out
    assert locks.path.read_text() == text
    assert f"{host} has no repository lock/none" in locks.lock("new.lock", f"{host}#lock/none:1", status=1)
    assert not [name for name in os.listdir(locks.user.home) if "lock" in name and name != "team.lock"]


def test_simultaneous_locks_lose_no_entry(locks: Locks) -> None:
    images = [f"{locks.registry.host}#lock/many{number}:1" for number in range(8)]
    for number in range(8):
        locks.push(f"lock/many{number}", number)
    calls = " & ".join(f"{PREFIX}/bin/penroot lock team.lock {image}" for image in images)
    for _ in range(2):
        locks.path.unlink(missing_ok=True)
        locks.user.run("sh", "-c", f"{calls} & wait")
        locked = [line.split()[0] for line in locks.path.read_text().splitlines()[1:]]
        assert sorted(locked) == images


def test_waiting_for_another_process_is_reported(locks: Locks) -> None:
    image = f"{locks.registry.host}#lock/waits:1"
    digest = locks.push("lock/waits", 1)
    waits = f"{PREFIX}/bin/penroot lock team.lock {image} 2> stderr & until grep -q waiting stderr; do sleep 0.02; done"
    ends = f"until grep -q {digest} team.lock; do sleep 0.02; done"
    locks.user.run("sh", "-c", f"umask 077; flock --close .team.lock.lock sh -c '{waits}'; {ends}")
    stderr = (locks.user.home / "stderr").read_text()
    assert re.search(rf"\[INFO\] waiting for process \d+ \(.+\), which is changing {locks.path}\n", stderr)


def test_a_disk_that_fills_up_leaves_the_file_as_it_was(locks: Locks) -> None:
    """Only a part of the new lock file fits on the disk, so penroot keeps the old one."""
    image = f"{locks.registry.host}#lock/full:1"
    locks.push("lock/full", 1)
    text = "version 1\n" + "# of the team\n" * 1000
    locks.write(text)
    limited = ("sh", "-c", f"ulimit -f 8; exec {PREFIX}/bin/penroot lock team.lock {image}")
    assert f"cannot write {locks.path}: File too large" in locks.user.run(*limited, status=1).stderr
    assert locks.path.read_text() == text
    assert [name for name in os.listdir(locks.user.home) if "lock" in name] == ["team.lock"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("none.lock",), "there is no lock file {home}/none.lock"),
        (("--check", "none.lock"), "there is no lock file {home}/none.lock"),
        (("x.lock", "ubuntu@sha256:" + "a" * 64), "already has a digest"),
        (("x.lock", "oci:layout"), "oci:layout is no image of a registry"),
        (("x.lock", "Ubuntu"), "Ubuntu: bad image name"),
        (("x.lock", ""), "the value is empty"),
        (("nowhere/x.lock", "{image}"), "cannot write {home}/nowhere/x.lock: No such file or directory"),
    ],
)
def test_unlockable_references(locks: Locks, words: tuple[str, ...], error: str) -> None:
    locks.push("lock/any", 1)
    known = {"home": locks.user.home, "image": f"{locks.registry.host}#lock/any:1"}
    out = locks.lock(*(word.format(**known) for word in words), status=1)
    assert error.format(**known) in out and "Traceback" not in out
    assert not (locks.user.home / "x.lock").exists()


@pytest.mark.parity("lock: if one image fails, nothing is written")
def test_update_keeps_the_mode_and_a_link(locks: Locks) -> None:
    host = locks.registry.host
    locks.push("lock/mode", 1)
    real = locks.user.home / "real.lock"
    locks.write("version 1\n", real)
    real.chmod(0o664)
    locks.path.symlink_to("real.lock")
    locks.lock("team.lock", f"{host}#lock/mode:1")
    assert locks.path.is_symlink() and "lock/mode:1" in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o664


@pytest.mark.parity("start --lock", "import --lock", "create --lock", "load --lock", "ENROOT_LOCK")
def test_starts_and_imports_use_the_locked_digest(locks: Locks) -> None:
    locks.push("lock/start", 1)
    locks.lock("team.lock", f"{locks.registry.host}#lock/start:1")
    locks.push("lock/start", 2)
    assert locks.start("lock/start", "--lock", "team.lock") == "1\n"
    assert locks.start("lock/start", env={"ENROOT_LOCK": str(locks.path)}) == "1\n"
    assert locks.start("lock/start") == "2\n"
    assert locks.start("lock/start", "--lock=team.lock") == "1\n"  # although the store has a newer image for the tag
    uri = f"docker://{locks.registry.host}#lock/start:1"
    for words in (("import", "-o", "x.sqsh"), ("create", "-n", "one"), ("load", "-n", "two")):
        locks.user.penroot(*words, "--lock", "team.lock", uri)
    assert [locks.user.start(name, "cat", "/number") for name in ("x.sqsh", "one", "two")] == ["1\n"] * 3
    out = locks.start("lock/start", "--lock", "team.lock", "--explain")
    assert f"setting  ENROOT_LOCK={locks.path}  (--lock)\n" in out


def test_a_stored_image_costs_no_request(locks: Locks) -> None:
    locks.push("lock/stored", 1)
    with faulty(locks.registry.host) as proxy:
        locks.registry = Server(proxy.host, locks.registry.log)
        locks.lock("team.lock", f"{proxy.host}#lock/stored:1")
        assert locks.start("lock/stored", "--lock", "team.lock") == "1\n"
        before = len(proxy.seen)
        assert locks.start("lock/stored", "--lock", "team.lock") == "1\n"
        assert len(proxy.seen) == before


@pytest.mark.parity("an image that is missing in the lock file")
def test_image_missing_in_the_lock_file(locks: Locks) -> None:
    locks.push("lock/other", 1)
    locks.write("version 1\n")
    out = locks.start("lock/other", "--lock", "team.lock", status=1)
    host = locks.registry.host
    assert f"[ERROR] {locks.path}: {host}/lock/other:1 is not in this lock file\n" in out
    command = f"penroot lock {locks.path} {host}#lock/other:1"
    assert f"[HINT] add it: {command}\n" in out
    locks.user.run(*command.split())
    assert locks.start("lock/other", "--lock", "team.lock") == "1\n"


@pytest.mark.parity("an image that is missing in the lock file")
def test_a_digest_that_the_registry_no_longer_has(locks: Locks) -> None:
    old = locks.push("lock/gone", 1)
    locks.lock("team.lock", f"{locks.registry.host}#lock/gone:1")
    new = locks.push("lock/gone", 2)
    delete(locks.registry, "lock/gone", old)
    out = locks.start("lock/gone", "--lock", "team.lock", status=1)
    assert f"is {new} on " in out and f"but {locks.path}:2 locks it to {old}" in out
    assert f"penroot lock {locks.path} {locks.registry.host}#lock/gone:1" in out
    delete(locks.registry, "lock/gone", new)
    out = locks.start("lock/gone", "--lock", "team.lock", status=1)
    assert f"{locks.path}:2 locks it to {old}" in out


@pytest.mark.parity("typos in a lock file")
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ":1: this is no lock file of penroot"),
        ("[images]\n", ":1: this is no lock file of penroot"),
        ("# x\nversion 2\n", ":2: unknown 'version 2'"),
        ("version 1\nubuntu sha256:abc\n", ":2: sha256:abc is no digest"),
        ("version 1\n\nubuntu sha256:" + "A" * 64 + "\n", ":3: sha256:" + "A" * 64 + " is no digest"),
        ("version 1\nubuntu = x\n", ":2: unexpected words after IMAGE DIGEST: x"),
        ("version 1\n/x.sqsh\n", ":2: /x.sqsh is no image of a registry"),
        ("version 1\n./x.sqsh\n", ":2: ./x.sqsh is no image of a registry"),
        ("version 1\nubuntu\ndocker://ubuntu:latest\n", ":3: docker://ubuntu:latest is the same image as in line 2"),
        ("version 1\nubuntu@sha256:" + "a" * 64 + "\n", ":2: ubuntu@sha256:" + "a" * 64 + " already has a digest"),
        ("version 1\n# \udcff\n", ":2: this is not UTF-8"),
        ("version 1\n" + "#" * 50_000, " is larger than 48 KiB"),
        ("version 1\n{image}\n", ":2: {image} has no digest yet"),
    ],
)
def test_errors_name_their_line(locks: Locks, text: str, error: str) -> None:
    image = f"{locks.registry.host}#lock/slip:1"
    locks.path.write_bytes(text.replace("{image}", image).encode(errors="surrogateescape"))
    out = locks.start("lock/slip", "--lock", "team.lock", status=1)
    assert f"[ERROR] {locks.path}{error.replace('{image}', image)}" in out
    assert "[HINT]" in out and "Traceback" not in out
    assert ("recreate it: penroot lock" in out) == ("version 2" in text)


@pytest.mark.parity("a lock file that others could have written is refused")
@pytest.mark.security("H6")
def test_lock_file_that_others_can_write_is_not_trusted(locks: Locks) -> None:
    locks.push("lock/closed", 1)
    locks.lock("team.lock", f"{locks.registry.host}#lock/closed:1")
    locks.path.chmod(0o666)
    out = locks.start("lock/closed", "--lock", "team.lock", status=1)
    assert f"{locks.path} can be written by others (mode 666)" in out
    locks.path.chmod(0o664)  # the group of a team may write
    assert locks.start("lock/closed", "--lock", "team.lock") == "1\n"
    shared = locks.user.home / "shared"
    shared.mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shared.chmod, 0o700)
        shared.chmod(0o1777)
        foreign = shared / "x.lock"
        foreign.write_text(locks.path.read_text())
        os.chown(foreign, locks.user.uid + 1, locks.user.uid + 1)
        out = locks.start("lock/closed", "--lock", "shared/x.lock", status=1)
        assert f"the lock file {foreign} cannot be used: belongs to uid {locks.user.uid + 1}" in out
        (shared / "link.lock").symlink_to("/etc/shadow")
        out = locks.start("lock/closed", "--lock", "shared/link.lock", status=1)
        assert "cannot be used" in out and "root:" not in out


@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_special_file_is_refused_at_once(locks: Locks, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(locks.path)
        locks.user.own(locks.path)
    elif kind == "directory":
        locks.path.mkdir()
        locks.user.own(locks.path)
    else:
        locks.path.symlink_to("/dev/zero")
    out = locks.start("lock/none", "--lock", "team.lock", status=1)
    assert "Traceback" not in out and str(locks.path) in out


@pytest.mark.parity("a start without a lock file imports no module for lock files")
def test_a_start_without_a_lock_imports_nothing_of_it(locks: Locks) -> None:
    locks.push("lock/none", 1)
    uri = f"docker://{locks.registry.host}#lock/none:1"
    code = (
        f"from enroot_py.cli.start import main\ntry: main(['--explain', {uri!r}, 'true'])\nfinally: print(*sys.modules)"
    )
    program = f"import sys; sys.path.insert(0, '{LIBRARY}'); {code}"
    modules = locks.user.run("python3", "-IS", "-c", program).stdout.splitlines()[-1].split()
    assert "enroot_py.store.pull" in modules and "enroot_py.features.pins.lockfile" not in modules
