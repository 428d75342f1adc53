"""Use the store on a real file system, with several real processes."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from enroot_py.base.errors import ImageError
from enroot_py.registry.platforms import architecture
from enroot_py.registry.reference import parse
from enroot_py.store import layertree
from enroot_py.store import store as store_module
from enroot_py.store.store import Name, Store
from tests import images
from tests.waiting import until

ROOT = Path(__file__).parent.parent.parent
A = "sha256:" + "a" * 64
B = "sha256:" + "b" * 64


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"), create=True)


def put(store: Store, kind: str, digest: str) -> None:
    with store.build(kind, digest) as build:
        assert not build.done
        os.mkdir(build.path + "/fs")
        build.publish()


def digest(store: Store, reference: object, arch: str | None = None) -> str | None:
    known = store.known(reference, arch)
    return known.digest if known else None


def temporary(store: Store) -> list[str]:
    return os.listdir(store.root + "/tmp")


@pytest.mark.parity("ENROOT_CACHE_PATH", "layers are stored by digest")
@pytest.mark.parametrize("before", [0o700, 0o755])
def test_own_store_is_closed_to_others(store: Store, before: int) -> None:
    assert os.stat(store.root).st_mode & 0o7777 == 0o700
    os.chmod(store.root, before)
    Store(store.root, create=True)
    assert os.stat(store.root).st_mode & 0o7777 == 0o700


@pytest.mark.parity("a store of another user is refused")
def test_store_of_another_user_is_refused(store: Store) -> None:
    os.chmod(store.root, 0o772)
    with pytest.raises(ImageError, match="written by others"):
        Store(store.root)
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chmod(store.root, 0o700)
    os.chown(store.root, 12345, 12345)
    with pytest.raises(ImageError, match="not trusted"):
        Store(store.root)


def test_only_published_directories_are_found(store: Store) -> None:
    with pytest.raises(RuntimeError), store.build("layers", A) as build:
        os.makedirs(build.path + "/fs/d")
        raise RuntimeError
    assert store.layer_path(A) is None and temporary(store) == []
    put(store, "layers", A)
    assert store.layer_path(A) == f"{store.root}/layers/{'a' * 64}"
    assert store.layer_path(B) is None and temporary(store) == []
    with store.build("layers", A) as again:
        assert again.done


def test_image_needs_all_its_layers(store: Store) -> None:
    put(store, "layers", A)
    with store.build("images", B) as build:
        os.makedirs(build.path + "/head/fs")
        Path(build.path, "stack").write_text(f"images/{'b' * 64}/head/fs\nlayers/{'a' * 64}/fs\n")
        build.publish()
    image = store.image(B)
    assert image is not None
    assert image.lowerdirs == (f"{store.root}/images/{'b' * 64}/head/fs", f"{store.root}/layers/{'a' * 64}/fs")
    os.rename(f"{store.root}/layers/{'a' * 64}", f"{store.root}/gone")
    assert store.image(B) is None


def test_names_are_kept_for_each_architecture(store: Store) -> None:
    reference = parse("reg.io:5000/a/b:1")
    assert store.known(reference) is None
    store.name(reference, None, Name(A, B, "https://reg.io:5000"))
    store.name(reference, "riscv64", Name(B, B))
    known = store.known(reference)
    assert known is not None and (known.resolved_digest, known.base) == (B, "https://reg.io:5000")
    assert digest(store, reference, os.uname().machine) == A
    assert digest(store, reference, "riscv64") == B
    for other in ("reg.io:5000/a/b:2", "reg.io:5000/a-b:1"):
        assert store.known(parse(other)) is None
    one, two = (parse(f"reg.io/{'a' * 200}/b{n}:{'t' * 100}") for n in (1, 2))
    store.name(one, None, Name(A))
    store.name(two, None, Name(B))
    assert (digest(store, one), digest(store, two)) == (A, B)


@pytest.mark.parametrize("damaged", [b"", b"\n", b"sha256:00", b"\xff\0" * 40])
def test_name_that_a_crash_damaged_is_forgotten(store: Store, damaged: bytes) -> None:
    store.name("x", None, Name(A, B, "http://x"))
    (file,) = Path(store.root, "refs").iterdir()
    file.write_bytes(damaged)
    assert store.known("x") is None and store.names() == []


def test_architecture_has_its_oci_name() -> None:
    assert [architecture(n) for n in ("x86_64", "aarch64", "ppc64le", "arm64", "armv7l")] == [
        "amd64", "arm64", "ppc64le", "arm64", "arm"]  # fmt: skip


MAKER = """
import os, sys, time
from enroot_py.store.store import Store
store = Store(sys.argv[1], create=True)
with store.build("layers", sys.argv[2]) as build:
    if build.done:
        print("waited", flush=True)
    else:
        os.makedirs(build.path + "/fs/half/way")
        print("making", flush=True)
        time.sleep(float(sys.argv[3]))
        build.publish()
        print("made", flush=True)
"""


def maker(store: Store, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKER, store.root, A, str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_waiter_for_a_maker_ignores_later_users(store: Store) -> None:
    """A step keeps a shared lock on its image while its container runs. A second step must not wait for that lock."""
    with store.build("layers", A) as build:
        waiting = maker(store, 0)
        inode = os.stat(build.path).st_ino
        until(lambda: f":{inode} " in waiters(), "another process waits")
        os.mkdir(f"{build.path}/fs")
        build.publish()
        assert build._fd is not None
        fcntl.flock(build._fd, fcntl.LOCK_SH)
        assert waiting.communicate(timeout=250)[0] == "waited\n"


def waiters() -> str:
    """Return the lines of /proc/locks about processes that wait for a lock: proc_locks(5)."""
    return "".join(line for line in Path("/proc/locks").read_text().splitlines(keepends=True) if "->" in line)


RACE = """
import os, sys
from enroot_py.store.store import Store
store = Store(sys.argv[1], create=True)
for number in range(200):
    with store.build("layers", f"sha256:{number:064x}") as build:
        if not build.done:
            os.mkdir(build.path + "/fs")
            build.publish()
            print("made")
"""


def test_published_image_is_not_made_again(store: Store) -> None:
    command = [sys.executable, "-c", RACE, store.root]
    racers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert sum(racer.communicate(timeout=250)[0].count("made") for racer in racers) == 200


@pytest.mark.parity("a suspended or stopped process does not block other imports of its user")
def test_stopped_maker_is_not_waited_for(store: Store) -> None:
    """The second maker publishes its own copy, and the first maker discards its copy when it resumes."""
    first = maker(store, 0.5)
    assert first.stdout is not None and first.stdout.readline() == "making\n"
    first.send_signal(signal.SIGSTOP)
    second = maker(store, 0)
    try:
        assert second.communicate(timeout=120)[0].split() == ["making", "made"]
    finally:
        second.kill()
        first.send_signal(signal.SIGCONT)
        assert first.communicate(timeout=120)[0] == "made\n"
    assert first.returncode == 0
    assert store.layer_path(A) is not None
    assert temporary(store) == []


def test_maker_without_progress_is_not_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_STALLED_S", 1)
    first = maker(store, 600)
    try:
        assert first.stdout is not None and first.stdout.readline() == "making\n"
        with store.build("layers", A) as build:
            assert not build.done and build.path != f"{store.root}/tmp/layers-{'a' * 64}"
            os.mkdir(build.path + "/fs")
            build.publish()
    finally:
        first.kill()
        first.communicate()
    assert store.layer_path(A) is not None
    store.sweep()
    assert temporary(store) == []


def test_published_image_is_free_while_its_maker_is_stopped(store: Store) -> None:
    with store.build("images", A) as build:
        Path(build.path, "image.sqsh").touch()
        build.publish()
        image = store.image(A)
        assert image is not None and image.hold()
        image.release()


def killed_maker(store: Store) -> None:
    """Start a maker and kill it, so that its temporary directory remains."""
    dead = maker(store, 600)
    assert dead.stdout is not None and dead.stdout.readline() == "making\n"
    dead.kill()
    dead.communicate()


def test_sweep_removes_only_files_of_ended_makers(store: Store) -> None:
    killed_maker(store)
    os.makedirs(f"{store.root}/tmp/layers-living")
    alive = os.open(f"{store.root}/tmp/layers-living", os.O_RDONLY)
    fcntl.flock(alive, fcntl.LOCK_EX)
    store.sweep()
    assert temporary(store) == ["layers-living"]
    os.close(alive)
    store.sweep()
    assert temporary(store) == []


def test_leftovers_of_a_killed_maker_are_not_used(store: Store) -> None:
    killed_maker(store)
    with store.build("layers", A) as build:
        assert os.listdir(build.path) == []
        layertree.unpack(io.BytesIO(images.tar([images.entry("f")])), build.path)
        build.publish()
    assert os.listdir(f"{store.layer_path(A)}/fs") == ["f"]


def test_directory_removed_before_its_lock_is_made_again(store: Store, soak: bool) -> None:
    sweeper = os.fork()
    if sweeper == 0:
        try:
            while True:
                store.sweep()
        finally:
            os._exit(1)  # the sweeper has failed
    try:
        for _ in range(5000 if soak else 500):
            with store.build("layers", A) as build:
                assert os.listdir(build.path) == []
    finally:
        os.kill(sweeper, signal.SIGTERM)
        _, status = os.waitpid(sweeper, 0)
    assert status == signal.SIGTERM
