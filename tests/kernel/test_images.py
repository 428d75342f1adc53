"""An ordinary user imports images from a real registry, and through a proxy that injects faults."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import random
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from enroot_py.base.errors import RefusedError
from enroot_py.config import settings
from enroot_py.registry import authorization, tags
from enroot_py.registry.reference import Reference, parse
from enroot_py.registry.repository import Repository
from enroot_py.runtime import etc
from tests import images
from tests.fakeregistry import Fault, Faulty, Login, faulty, tunnel
from tests.images import DOCKER, OCI, Image, Layer, directory, entry, hardlink, symlink
from tests.installation import LIBRARY, ROOT
from tests.kernel.conftest import User, require, small_filesystem
from tests.kernel.registry import Server, authority
from tests.waiting import until

BASE = [
    directory("etc"),
    entry("etc/passwd", b"root:x:0:0::/:/bin/sh\n"),
    entry("etc/gone", b"old"),
    entry("etc/environment", b"STALE=1\n"),
    directory("old"),
    entry("old/a", b"a"),
    directory("tmp", 0o1777),
    entry("bin/su", b"#!/bin/sh\n", mode=0o4755),
    hardlink("bin/su2", "bin/su"),
    symlink("lib", "usr/lib"),
    entry("usr/lib/libx.so", b"\x7fELF" * 5000, mode=0o644),
    entry("locked", b"secret", mode=0),
    directory("closed", 0o555),
    entry("closed/file", b"1"),
    entry("dev/null", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    entry("usr/share/dev/x", b"1"),
]
CHANGE = [
    entry("etc/.wh.gone"),
    directory("old"),
    entry("old/.wh..wh..opq"),
    entry("old/b", b"b"),
    entry("tmp/left", b"here"),  # the layer has no entry for the directory tmp
    entry("bin/new", b"x", mode=0o2755, pax_headers={"SCHILY.xattr.user.note": "yes"}),
]
SETTINGS = {
    "Env": ["PATH=/bin", "TWO=one\ntwo", "LATER=${HOME}", 'QUOTED="x"'],
    "Entrypoint": ["/bin/new", "it's"],
    "Cmd": ["a b"],
    "WorkingDir": "/work/dir",
    "Labels": {"a\nreboot": "$(reboot)\n`x`"},
    "Volumes": {"/data": {}},
}


def make(kinds: object = DOCKER, *compressions: str, **settings: object) -> Image:
    one, two = compressions or ("gzip", "gzip")
    return Image([Layer(images.tar(BASE), one), Layer(images.tar(CHANGE), two)], settings or SETTINGS, kinds)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def registry(registry: Server) -> Server:
    registry.pusher.image("test/one", "1", make())
    return registry


@pytest.fixture(autouse=True)
def nothing_is_left(user: User) -> Iterator[None]:
    """Check after each test that the store has no unfinished file, no set-ID or sticky bit, and no device."""
    yield
    temporary = user.home / "cache/tmp"
    assert not temporary.exists() or list(temporary.iterdir()) == []
    for path in (user.home / "cache").rglob("*"):
        state = path.lstat()
        assert not state.st_mode & 0o7000 or stat.S_ISLNK(state.st_mode), path
        assert not stat.S_ISBLK(state.st_mode), path
        assert not stat.S_ISCHR(state.st_mode) or state.st_rdev == 0, path


def listing(path: Path) -> dict[str, str]:
    """Return name -> "MODE OWNER SIZE" of each entry of a squashfs file. The name of a link ends in " -> TARGET"."""
    out = subprocess.run(["unsquashfs", "-lls", path], capture_output=True, text=True, check=True).stdout
    entries = {}
    for line in out.splitlines():
        mode, owner, size, _, _, name = line.split(None, 5)
        entries[name.removeprefix("squashfs-root").lstrip("/")] = f"{mode} {owner} {size}"
    return entries


def content(path: Path, name: str) -> bytes:
    return subprocess.run(["unsquashfs", "-cat", path, name], capture_output=True, check=True).stdout


def test_name_with_tag_is_a_reference_without_scheme(user: User, registry: Server) -> None:
    registry.pusher.image("test/tagged", "1", images.busybox())
    image = f"{registry.host}/test/tagged:1"
    created = user.penroot("create", "--name", "box", image)
    assert created.stderr.endswith("[INFO] created the container box: penroot start box\n")
    assert user.start(image, "echo", "up") == user.start("box", "echo", "up") == "up\n"
    assert json.loads(user.penroot("inspect", image).stdout) == json.loads(
        user.penroot("inspect", f"docker://{image}").stdout
    )


def test_docker_of_the_examples_runs_an_image(user: User, registry: Server) -> None:
    """examples/docker accepts options of ``docker run``, and refuses --privileged."""
    registry.pusher.image("test/tagged", "1", images.busybox())
    image = f"{registry.host}/test/tagged:1"
    docker = str(ROOT / "examples/docker")
    options = [
        "--rm",
        "-i",
        "--read-only=true",
        "-v",
        f"{user.home}:/work",
        "--workdir=/work",
        "-e",
        "A=a b",
        "--name",
        "x",
        "--user=0:0",
    ]
    done = user.run(docker, "run", *options, image, "sh", "-c", "pwd; echo $A; cat; exit 3", stdin="in\n", status=3)
    assert done.stdout == "/work\na b\nin\n"
    assert "docker: --privileged: not supported" in user.run(docker, "run", "--privileged", image, status=125).stderr


def test_container_takes_precedence_over_a_tag(user: User, rootfs: Path) -> None:
    rootfs.rename(rootfs.with_name("one:1"))
    assert user.start("one:1", "echo", "up") == "up\n"


@pytest.mark.parity("import docker://")
def test_import_writes_what_the_layers_say(user: User, registry: Server) -> None:
    user.penroot("import", f"docker://{registry.host}/test/one:1")
    image = user.home / "test+one+1.sqsh"
    entries = listing(image)
    top = {name.partition(" -> ")[0] for name in entries if "/" not in name.partition(" -> ")[0]} - {""}
    assert top == {"etc", "old", "tmp", "bin", "lib", "usr", "locked", "closed", "work"}
    assert "etc/gone" not in entries and "old/a" not in entries and "dev/null" not in entries
    assert content(image, "old/b") == b"b" and content(image, "usr/share/dev/x") == b"1"
    modes = {name: entries[name].split()[0] for name in ("tmp", "bin/su", "bin/su2", "bin/new", "locked", "closed")}
    assert modes == {
        "tmp": "drwxrwxrwt", "bin/su": "-rwsr-xr-x", "bin/su2": "-rwsr-xr-x", "bin/new": "-rwxr-sr-x",
        "locked": "----------", "closed": "dr-xr-xr-x"}  # fmt: skip
    assert {line.split()[1] for line in entries.values()} == {"root/root"}
    assert content(image, "etc/fstab").decode() == (
        "${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev\n"
    )
    rc = content(image, "etc/rc").decode()
    assert rc.startswith(f"# enroot-provenance: docker://{registry.host}#test/one:1\n# a reboot $(reboot) `x`\n\n")
    assert "STALE" not in content(image, "etc/environment").decode()


@pytest.mark.parametrize("form", ["tree", "squashfs"])
def test_scripts_of_a_loaded_container_are_read_and_edited(user: User, registry: Server, form: str) -> None:
    """Tools for enroot's containers read and edit etc/rc and similar files in the container's directory."""
    image = images.busybox(entry("etc/of-layer"), entry("etc/gone"))
    image.layers.append(Layer(images.tar([entry("etc/.wh.gone")])))
    registry.pusher.image("test/scripts", "1", image)
    user.penroot("load", "-n", "look", f"docker://{registry.host}/test/scripts:1", env={"ENROOT_STORE_FORM": form})
    tree = user.data / "look/etc"
    assert (tree / "rc").read_text().startswith("# enroot-provenance: docker://")
    assert (tree / "environment").read_text() == "PATH=/bin\n" and (tree / "fstab").exists()
    user.run("sh", "-c", f"echo FOO=bar >> {tree}/environment; sed -i s/.bin.sh/true/ {tree}/rc")
    script = "echo [$FOO]; ls /etc/of-layer; ls /etc/gone 2>&1; ls -ld /etc"
    out = user.run("penroot", "start", "look", "sh", "-c", script).stdout.splitlines()
    assert out[:2] == ["[bar]", "/etc/of-layer"] and "No such file" in out[2] and out[3].startswith("drwxr-xr-x")
    user.start("look")  # runs the edited command, true; sh would wait
    user.start("--rw", "look", "touch", "/etc/new")
    assert (tree / "new").exists()
    user.penroot("export", "-o", "out.sqsh", "look")
    assert {"etc/of-layer", "etc/new", "etc/rc"} <= set(listing(user.home / "out.sqsh"))
    user.penroot("remove", "-f", "look")
    assert not (user.data / "look").exists()


def test_store_has_what_a_start_needs(user: User, registry: Server) -> None:
    user.penroot("create", "--name", "box", f"docker://{registry.host}/test/one:1")
    image = user.home / "cache/images" / make().digest().removeprefix("sha256:")
    directory = image / "head/fs/etc"
    run = etc.read_rc((directory / "rc").read_text(), (directory / "rc.local").read_text())
    assert run is not None
    assert (run.workdir, run.entrypoint, run.command) == ("/work/dir", ("/bin/new", "it's"), ("a b",))
    variables = etc.read_environment((directory / "environment").read_text())
    assert [f"{key}={value}" for key, value in variables.items()] == SETTINGS["Env"]
    stack = (image / "stack").read_text().splitlines()
    assert stack[0] == f"images/{image.name}/head/fs" and len(stack) == 3
    assert (image / "manifest").read_bytes() == make().manifest()
    assert (image / "config").read_bytes() == make().config()


@pytest.mark.parity("gzip, zstd and plain layers may be in one manifest")
@pytest.mark.parametrize("kinds", [DOCKER, OCI], ids=["docker", "oci"])
@pytest.mark.parametrize("second", ["zstd", "none"])
def test_formats_and_compressions_give_the_same_tree(user: User, registry: Server, kinds: object, second: str) -> None:
    registry.pusher.image("test/formats", "x", make(kinds, "gzip", second))
    user.penroot("import", "-o", "x.sqsh", f"docker://{registry.host}/test/formats:x")
    user.penroot("import", "-o", "y.sqsh", f"docker://{registry.host}/test/one:1")
    x, y = listing(user.home / "x.sqsh"), listing(user.home / "y.sqsh")
    for entries in (x, y):
        del entries["etc/rc"]  # differs: it contains the image's name
    assert x == y


@pytest.mark.parity("SOURCE_DATE_EPOCH")
def test_same_bytes_again(user: User, registry: Server) -> None:
    """With SOURCE_DATE_EPOCH, two imports of an image write the same bytes."""
    for name in ("x", "y"):
        env = {"SOURCE_DATE_EPOCH": "1700000000", "ENROOT_CACHE_PATH": str(user.home / name)}
        user.penroot("import", "-o", f"{name}.sqsh", f"docker://{registry.host}/test/one:1", env=env)
        time.sleep(1 - time.time() % 1)  # wait for the next second of the clock
    assert (user.home / "x.sqsh").read_bytes() == (user.home / "y.sqsh").read_bytes()


def test_stored_tag_costs_one_request_and_digest_none(user: User, registry: Server) -> None:
    digest = registry.pusher.image("test/cost", "1", make(Env=["A=cost"]))
    with faulty(registry.host) as front:
        user.penroot("create", "-n", "a", f"docker://{front.host}/test/cost:1")
        front.seen.clear()
        user.penroot("create", "-n", "b", f"docker://{front.host}/test/cost:1")
        assert [(request.method, request.path) for request in front.seen] == [("HEAD", "/v2/test/cost/manifests/1")]
        front.seen.clear()
        user.penroot("create", "-n", "c", f"docker://{front.host}/test/cost@{digest}")
        assert front.seen == []


@pytest.mark.parity("layers are stored by digest")
def test_moved_tag_is_noticed_and_known_layers_are_kept(user: User, registry: Server) -> None:
    registry.pusher.image("test/moving", "1", make(Env=["A=1"]))
    with faulty(registry.host) as front:
        user.penroot("create", "-n", "a", f"docker://{front.host}/test/moving:1")
        new = make(Env=["A=2"])
        new.layers.append(Layer(images.tar([entry("third", b"3")])))
        registry.pusher.image("test/moving", "1", new)
        front.seen.clear()
        done = user.penroot("create", "-n", "b", f"docker://{front.host}/test/moving:1")
        assert "trying again" not in done.stderr
        blobs = {request.path.rpartition("/")[2] for request in front.seen if "/blobs/" in request.path}
        assert blobs == {images.digest(new.config()), images.digest(new.layers[2].blob)}


def test_stored_image_serves_while_the_registry_is_down(user: User, registry: Server) -> None:
    with faulty(registry.host) as front:
        uri = f"docker://{front.host}/test/one:1"
        user.penroot("create", "-n", "a", uri)
    done = user.penroot("create", "-n", "b", uri)
    assert "cannot reach the registry" in done.stderr and "using the stored image" in done.stderr
    assert "[HINT] check the name, the network" in done.stderr


@pytest.mark.parity("import --arch", "import --force")
def test_index_gives_the_image_of_this_machine(user: User, registry: Server) -> None:
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    mine, other, junk = make(OCI, Env=["A=mine"]), make(OCI, Env=["A=other"]), make(OCI, Env=["A=junk"])
    for image in (mine, other, junk):
        registry.pusher.image("test/multi", "", image)
    entries = [
        (junk, {"os": "unknown", "architecture": "unknown"}),
        (junk, {"os": "windows", "architecture": arch}),
        (other, {"os": "linux", "architecture": "riscv64"}),
        (mine, {"os": "linux", "architecture": arch}),
    ]
    inner = images.index(entries)
    registry.pusher.manifest("test/multi", images.digest(inner), inner)
    nested = {"mediaType": OCI["index"], "size": len(inner), "digest": images.digest(inner)}
    outer = json.dumps({"schemaVersion": 2, "mediaType": OCI["index"], "manifests": [nested]}).encode()
    digest = registry.pusher.manifest("test/multi", "1", outer)
    for name in ("test/multi:1", f"test/multi@{digest}"):
        user.penroot("import", "-f", "-o", "x.sqsh", f"docker://{registry.host}/{name}")
        assert content(user.home / "x.sqsh", "etc/environment") == b"A=mine\n"
    user.penroot("import", "-f", "-a", "riscv64", "-o", "x.sqsh", f"docker://{registry.host}/test/multi:1")
    assert content(user.home / "x.sqsh", "etc/environment") == b"A=other\n"
    done = user.penroot("import", "-a", "s390x", "-o", "y.sqsh", f"docker://{registry.host}/test/multi:1", status=1)
    assert "no image for linux/s390x" in done.stderr and "linux/riscv64" in done.stderr


def test_image_of_one_architecture_is_no_other(user: User, registry: Server) -> None:
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    uri = f"docker://{registry.host}/test/one:1"
    done = user.penroot("import", "-a", "s390x", "-o", "x.sqsh", uri, status=1)
    assert f"is for {arch} only" in done.stderr and not (user.home / "x.sqsh").exists()
    assert "this machine" not in user.penroot("import", "-a", arch, "-o", "x.sqsh", uri).stderr


def imported(user: User, registry: Server, image: Image) -> set[str]:
    """Return the names in the squashfs file ``x.sqsh`` that an import of an image creates."""
    registry.pusher.image("test/imported", "1", image)
    user.penroot("import", "-o", "x.sqsh", f"docker://{registry.host}/test/imported:1")
    return set(listing(user.home / "x.sqsh"))


@pytest.mark.parity("one layer may be listed twice in a manifest")
def test_layer_that_is_listed_twice(user: User, registry: Server) -> None:
    base = make(Env=["A=twice"])
    image = Image([base.layers[0], base.layers[1], base.layers[0]], base.settings)
    assert {"etc/gone", "old/a", "old/b"} <= imported(user, registry, image)


def test_opaque_root_hides_all_below(user: User, registry: Server) -> None:
    image = make(Env=["A=opaque"])
    image.layers.append(Layer(images.tar([entry(".wh..wh..opq"), entry("only", b"1")])))
    assert {name for name in imported(user, registry, image) if "/" not in name and name} == {"only", "etc"}


@pytest.mark.parity("an image may have no command")
def test_image_without_layers_and_without_command(user: User, registry: Server) -> None:
    assert {"etc/rc", "w"} <= imported(user, registry, Image([], {"WorkingDir": "/w"}))
    assert "exec  '/bin/sh'" in content(user.home / "x.sqsh", "etc/rc").decode()


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"config": {"WorkingDir": "/a" * 3000}}, "the WorkingDir has more than 256 directories"),
        ({"rootfs": None}, "0 diff_ids"),
        ({"os": "windows"}, "is for windows, this is Linux"),
        ({"config": {"Env": {"A": "1"}}}, "Env in the image config is not a list of strings"),
    ],
)
def test_invalid_config_is_reported_and_not_stored(
    user: User, registry: Server, config: dict[str, object], error: str
) -> None:
    image = make()
    data = json.dumps({**json.loads(image.config()), **config}).encode()
    image.config = lambda: data  # type: ignore[method-assign]
    registry.pusher.image("test/config", "1", image)
    for verb in ("import", "inspect") if "rootfs" in config else ("import",):
        done = user.penroot(verb, f"docker://{registry.host}/test/config:1", status=1)
        assert error in done.stderr and "Traceback" not in done.stderr
    user.penroot("import", "-o", "x.sqsh", f"docker://{registry.host}/test/one:1")


def test_127_layers_start_and_become_a_file(user: User, registry: Server) -> None:
    """127 is docker's maximum. So many lower directories can be mounted by a start, and also by mount(2)."""
    image = images.busybox()
    image.layers += [Layer(images.tar([entry(f"f{i}", b"x"), entry("last", b"%d" % i)])) for i in range(126)]
    registry.pusher.image("test/many", "127", image)
    uri = f"docker://{registry.host}/test/many:127"
    script = "cat /last; set -- /f*; echo $#"
    assert user.start(uri, "sh", "-c", script).split() == ["125126"]
    user.penroot("import", "-o", "x.sqsh", uri)
    assert content(user.home / "x.sqsh", "last") == b"125" and content(user.home / "x.sqsh", "f0") == b"x"
    by_mount = f"""
import os, sys
sys.path.insert(0, "{LIBRARY}")
from enroot_py.runtime import mounting, rootfs
stack = open(next(os.scandir("cache/images")).path + "/stack").read().split()
lower = tuple(os.path.abspath("cache/" + line) for line in stack)
assert len(lower) == 128 and sum(map(len, lower)) > 4096
os.mkdir("up"), os.mkdir("work"), os.mkdir("root")
overlay = rootfs.overlay_by_mount(lower, os.path.abspath("up"), os.path.abspath("work"), ["userxattr"])
mounting.attach_at(overlay, "root")
print(open("root/last").read(), sum(name.startswith("f") for name in os.listdir("root")))
open("root/new", "w").close()
assert os.path.exists("up/new")
"""
    assert user.run("unshare", "-Urm", "/usr/bin/python3", "-c", by_mount).stdout.split() == ["125", "126"]


def test_odd_names_keep_their_modes(user: User, registry: Server) -> None:
    names = ["a b", 'q"uote', "back\\slash", "#hash", "ünï", "*", "new\nline", " lead"]
    layer = Layer(images.tar([entry(name, b"1", mode=0o4711) for name in names]))
    registry.pusher.image("test/odd", "1", Image([layer], {}))
    user.penroot("import", "-o", "x.sqsh", f"docker://{registry.host}/test/odd:1")
    out = user.home / "out"
    subprocess.run(["unsquashfs", "-quiet", "-no-progress", "-dest", out, user.home / "x.sqsh"], check=True)
    modes = {name: stat.S_IMODE((out / name).stat().st_mode) for name in names}
    # penroot cannot tell mksquashfs the mode of a name with a newline, so this file has its mode in the unpacked tree.
    assert modes == {**dict.fromkeys(names, 0o4711), "new\nline": 0o711}


# -- failures


@pytest.mark.parity("import --output")
def test_output_that_exists_is_kept(user: User, registry: Server) -> None:
    uri = f"docker://{registry.host}/test/one:1"
    (user.home / "x.sqsh").write_text("mine")
    done = user.penroot("import", "-o", "x.sqsh", uri, status=1)
    assert "file already exists" in done.stderr and (user.home / "x.sqsh").read_text() == "mine"
    assert not (user.home / "cache").exists()  # reported before the work
    user.own(user.home / "x.sqsh")
    env = {"SOURCE_DATE_EPOCH": "1"}
    user.penroot("import", "--force", "-o", "x.sqsh", uri, env=env)
    assert "bin/su" in listing(user.home / "x.sqsh")
    assert "stdout: " in user.run("sh", "-c", f"penroot import -o - {uri} | cmp - x.sqsh", env=env).stderr
    for bad in (".", "none/x.sqsh"):
        user.penroot("import", "--force", "-o", bad, uri, status=1)


def test_store_without_permission_is_reported(user: User, registry: Server) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can close a directory to us")
    closed = user.home / "closed"
    closed.mkdir(mode=0o700)
    env = {"ENROOT_CACHE_PATH": str(closed)}
    for _ in range(2):
        done = user.penroot("import", "-o", "x.sqsh", f"docker://{registry.host}/test/one:1", status=1, env=env)
        assert f"[ERROR] cannot read the store {closed}: Permission denied" in done.stderr
        assert "set ENROOT_CACHE_PATH" in done.stderr
        closed.chmod(0o755)  # the subdirectories still have no permission
        (closed / "refs").mkdir(mode=0o700, exist_ok=True)


@pytest.mark.parity("a full disk ends an import with an error that names the directory")
def test_disk_full_leaves_no_image(user: User, registry: Server) -> None:
    layer = Layer(images.tar([entry("big", os.urandom(3_000_000))]))
    registry.pusher.image("test/big", "1", Image([layer], {}))
    uri = f"docker://{registry.host}/test/big:1"
    with small_filesystem(user.home / "small", "size=2m,mode=1777") as small:
        done = user.penroot("import", "-o", f"{small}/x.sqsh", uri, status=1)
        assert f"cannot write {small}/x.sqsh: No space left on device" in done.stderr
        assert f"the file system of {small} is full (df" in done.stderr
        assert list(small.iterdir()) == []
        message = f"cannot write the image {registry.host}/test/big:1 to the store {small}/cache"
        for form, error in ("tree", f"cannot store /big in {small}/cache/tmp"), ("squashfs", message):
            env = {"ENROOT_CACHE_PATH": f"{small}/cache", "ENROOT_STORE_FORM": form}
            done = user.penroot("import", "-o", "x.sqsh", uri, status=1, env=env)
            assert f"{error}: No space left" in done.stderr
            assert "set ENROOT_CACHE_PATH" in done.stderr
        assert not (user.home / "x.sqsh").exists()
        assert list((small / "cache/tmp").iterdir()) == [] and list((small / "cache/layers").iterdir()) == []


def test_lack_of_inodes_is_not_called_a_full_disk(user: User, registry: Server) -> None:
    uri, setting = f"docker://{registry.host}/test/one:1", "ENROOT_CACHE_PATH"
    with small_filesystem(user.home / "few", "nr_inodes=20,mode=1777") as few:
        stderr = user.penroot("start", uri, status=1, env={setting: f"{few}/cache"}).stderr
        assert "has space, but no inode left (df -i)" in stderr
        assert f"or set {setting} to another place" in stderr
        assert list((few / "cache/tmp").iterdir()) == []


def test_unknown_tag_repository_and_digest_are_named(user: User, registry: Server) -> None:
    done = user.penroot("import", f"docker://{registry.host}/test/one:nope", status=1)
    assert "has no tag nope" in done.stderr and "available tags: 1" in done.stderr
    done = user.penroot("import", f"docker://{registry.host}/test/nope:1", status=1)
    assert "has no repository test/nope" in done.stderr
    absent = "sha256:" + "0" * 64
    done = user.penroot("import", f"docker://{registry.host}/test/one@{absent}", status=1)
    assert f"has no image {absent}" in done.stderr


def test_registry_that_is_down_fails_at_once(user: User) -> None:
    require(shutil.which("strace"), "strace is not installed")
    prefix = ("strace", "-f", "-qq", "-o", str(user.home / "trace"), "-e", "trace=connect")
    done = user.penroot("import", "docker://127.0.0.1:9/x:1", prefix=prefix, status=1)
    assert (user.home / "trace").read_text().count("htons(9)") <= 2  # one attempt with HTTPS and one with HTTP
    assert "cannot reach the registry 127.0.0.1:9: Connection refused" in done.stderr
    done = user.penroot("import", "docker://no.such.host.invalid/x:1", status=1)
    assert "no.such.host.invalid" in done.stderr and "ENROOT_ALLOW_HTTP" in done.stderr


@pytest.mark.parity("TAG@DIGEST: the digest takes precedence over the tag, and is verified")
def test_wrong_pin_is_refused(user: User, registry: Server) -> None:
    """The registry answers the request for a digest with another manifest."""
    digest = registry.pusher.image("test/pin", "1", make(Env=["A=pin"]))
    with faulty(registry.host, Fault(f"/manifests/{digest}", 9, change=lambda body: body + b" ")) as front:
        done = user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/pin@{digest}", status=1)
    assert "sent a manifest with the digest" in done.stderr
    assert not (user.home / "x.sqsh").exists()


@pytest.mark.parity("a corrupt blob is reported")
@pytest.mark.parametrize(
    "change", [lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:], lambda b: b + b"more", lambda b: b"\0" * len(b)]
)
def test_spoilt_layer_is_refused_and_not_kept(user: User, registry: Server, change: object) -> None:
    image = make()
    digest = images.digest(image.layers[0].blob)
    with faulty(registry.host, Fault(f"/blobs/{digest}", 9, change=change)) as front:  # type: ignore[arg-type]
        done = user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/one:1", status=1)
        assert digest in done.stderr and "Traceback" not in done.stderr
        assert not list((user.home / "cache/images").iterdir())
        stored = {p.name for p in (user.home / "cache/layers").iterdir()}
        assert images.digest(image.layers[0].tar).removeprefix("sha256:") not in stored
        front.faults.clear()
        user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/one:1")


def test_layer_cannot_be_planted_under_another_name(user: User, registry: Server) -> None:
    good = make()
    bad = Image([Layer(images.tar([entry("evil")]))], {}, diff_ids=[images.digest(good.layers[0].tar)])
    registry.pusher.image("test/evil", "1", bad)
    done = user.penroot("import", "-o", "x.sqsh", f"docker://{registry.host}/test/evil:1", status=1)
    assert "wrong or hostile" in done.stderr
    user.penroot("import", "-o", "x.sqsh", f"docker://{registry.host}/test/one:1")
    assert "evil" not in listing(user.home / "x.sqsh")


@pytest.mark.parametrize(
    "diff_ids", [["x"], [], ["sha256:" + "0" * 64] * 3, ["sha256:../../../../x", "sha256:" + "0" * 64]]
)
def test_diff_ids_that_do_not_fit(user: User, registry: Server, diff_ids: list[str]) -> None:
    """The import fails if the diff_ids in the image config are not the digests of its two layers."""
    image = make()
    image.diff_ids = diff_ids or ["x"] * 3
    registry.pusher.image("test/fit", "1", image)
    done = user.penroot("import", "-o", "x.sqsh", f"docker://{registry.host}/test/fit:1", status=1)
    assert "[ERROR]" in done.stderr and "Traceback" not in done.stderr


# -- transfers


class Transfer:
    """An image in the registry with one large layer."""

    def __init__(self, registry: Server) -> None:
        self.image = Image([Layer(images.tar([entry("data", os.urandom(4_000_000))]), "none")], {})
        self.blob = f"/blobs/{images.digest(self.image.layers[0].blob)}"
        self.size = len(self.image.layers[0].blob)
        self.registry = registry
        registry.pusher.image("test/transfer", "1", self.image)

    @contextlib.contextmanager
    def faulty(self, times: int = 1, **fault: float) -> Iterator[tuple[Faulty, str]]:
        """Yield a proxy that damages the layer with ``fault``, and the image's URI there."""
        with faulty(self.registry.host, Fault(self.blob, times, **fault)) as front:  # type: ignore[arg-type]
            self.front = front
            yield front, f"docker://{front.host}/test/transfer:1"


@pytest.fixture(scope="module")
def big(registry: Server) -> Transfer:
    return Transfer(registry)


@pytest.mark.parity("503, 429, a dropped connection and a stalled connection are retried")
def test_dropped_transfer_is_resumed(user: User, big: Transfer) -> None:
    with big.faulty(drop_at=0.9) as (front, uri):
        user.penroot("import", "-o", "x.sqsh", uri)
        ranges = [request.range for request in front.seen if big.blob in request.path]
        assert ranges[0] == "" and ranges[1].startswith("bytes=")
        assert front.sent(big.blob) <= 1.1 * big.size
    user.run("rm", "-r", "cache")
    with big.faulty(drop_at=0.9) as (front, uri):
        front.ranges = False  # the server ignores ranges, so the transfer restarts
        user.penroot("import", "-f", "-o", "x.sqsh", uri)
        assert front.sent(big.blob) > 1.8 * big.size


def test_redirected_blobs_are_fetched_from_there(user: User, registry: Server, big: Transfer) -> None:
    with faulty(registry.host, bind="127.0.0.2") as other, faulty(registry.host) as front:
        location = f"http://{other.host}/v2/test/transfer{big.blob}"
        front.faults.append(Fault(big.blob, 99, status=307, headers={"Location": location}))
        other.faults.append(Fault(big.blob, 1, drop_at=0.5))
        user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/transfer:1")
        assert front.sent(big.blob) == 0
        assert big.size <= other.sent(big.blob) <= 1.1 * big.size


def test_other_host_that_is_down_is_named(user: User, registry: Server) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.2", 0))  # no other server listens there
        host = "{}:{}".format(*bound.getsockname())
        with faulty(registry.host, Fault("/blobs/", 99, 307, {"Location": f"http://{host}/x"})) as front:
            env = {"ENROOT_TRANSFER_RETRIES": "0"}
            done = user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/one:1", env=env, status=1)
            assert f"{host}: Connection refused" in done.stderr


@pytest.mark.parity("503, 429, a dropped connection and a stalled connection are retried", "ENROOT_TRANSFER_RETRIES")
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("path", ["/manifests/", "/blobs/"])
def test_busy_registry_gets_a_second_request(
    user: User, registry: Server, big: Transfer, status: int, path: str
) -> None:
    with faulty(registry.host, Fault(path, 1, status=status, headers={"Retry-After": "1"})) as front:
        began = time.monotonic()
        user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/transfer:1")
        assert time.monotonic() - began >= 1


@pytest.mark.parity("ENROOT_TRANSFER_RETRIES")
def test_registry_that_stays_busy_is_given_up(user: User, registry: Server) -> None:
    with faulty(registry.host, Fault("/blobs/", 99, status=503)) as front:
        env = {"ENROOT_TRANSFER_RETRIES": "1"}
        done = user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/one:1", env=env, status=1)
        assert "503" in done.stderr and "2 tries" in done.stderr
    with faulty(registry.host, Fault("/blobs/", 99, status=429, headers={"Retry-After": "9999"})) as front:
        done = user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/one:1", status=1)
        assert "9999 s" in done.stderr


@pytest.mark.parametrize(
    ("status", "headers", "error"),
    [
        (307, {"Location": "http://[::1/"}, "redirects to the bad address"),
        (200, {"Content-Length": "5, 6"}, "Content-Length"),
        (401, {"WWW-Authenticate": 'Bearer realm="http://[::1/"'}, "bad token server"),
    ],
)
def test_invalid_replies_are_reported(
    user: User, registry: Server, status: int, headers: dict[str, str], error: str
) -> None:
    with faulty(registry.host, Fault("/manifests/", 99, status, headers)) as front:
        env = {"ENROOT_TRANSFER_RETRIES": "0"}
        done = user.penroot("digest", f"docker://{front.host}/test/one:1", env=env, status=1)
        assert error in done.stderr and "Traceback" not in done.stderr


def test_words_of_a_registry_do_not_steer_the_terminal(user: User, registry: Server) -> None:
    tags = Fault("/tags/", 1, headers={}, change=lambda body: b'{"tags": ["\\u001b[2Jred"]}')
    with faulty(registry.host, tags) as front:
        done = user.penroot("digest", f"docker://{front.host}/test/one:none", status=1)
        assert "\\x1b[2Jred" in done.stderr and "\x1b" not in done.stderr


def test_document_that_a_proxy_compresses(user: User, registry: Server) -> None:
    """A manifest with Content-Encoding: gzip is read."""
    fault = Fault("/manifests/", 1, headers={"Content-Encoding": "gzip"}, change=gzip.compress)
    with faulty(registry.host, fault) as front:
        user.penroot("digest", f"docker://{front.host}/test/one:1")


def test_invalid_digest_in_a_header_is_ignored(user: User, registry: Server) -> None:
    """The proxy changes only Docker-Content-Digest, in replies to HEAD and to GET."""
    bad = Fault("/manifests/", 99, headers={"Docker-Content-Digest": "latest"}, change=lambda body: body)
    with faulty(registry.host, bad) as front:
        configuration = settings.load({**user.environ, "ENROOT_TRANSFER_RETRIES": "0"})
        reference = parse(f"{front.host}/test/one:1")
        assert isinstance(reference, Reference) and tags.resolve(reference, configuration) == ""
        for name in ("one", "two"):
            user.penroot("create", "-n", name, f"docker://{front.host}/test/one:1")


@pytest.mark.parametrize("status", [400, 401, 405])
def test_registry_without_head(user: User, registry: Server, status: int) -> None:
    """If the registry refuses HEAD, penroot gets the digest of a tag with GET."""
    with faulty(registry.host) as front:
        user.penroot("create", "-n", "one", f"docker://{front.host}/test/one:1")
        front.faults.append(Fault("/manifests/", 2, status=status))
        stderr = user.penroot("create", "-n", "two", f"docker://{front.host}/test/one:1").stderr
        # On a busy machine, penroot may use the stored image before the registry has answered.
        assert front.faults[0].times == 0 or "does not answer within 2 s" in stderr


@pytest.mark.parity("503, 429, a dropped connection and a stalled connection are retried", "ENROOT_STALL_TIMEOUT")
@pytest.mark.parametrize(
    ("fault", "setting", "message"),
    [
        ({"stall_at": 0.5}, "STALL_TIMEOUT", "no data within ENROOT_STALL_TIMEOUT"),
        ({"trickle": True}, "STALL_TIMEOUT", "bytes within ENROOT_STALL_TIMEOUT"),
        ({"trickle": True}, "TRANSFER_TIMEOUT", "took longer"),
    ],
    ids=["stalls", "trickles", "is long"],
)
def test_slow_transfer_is_resumed_or_given_up(
    user: User, big: Transfer, fault: dict[str, float], setting: str, message: str
) -> None:
    stalls = "stall_at" in fault
    with big.faulty(**fault) as (_, uri):
        env = {f"ENROOT_{setting}": "1", **({} if stalls else {"ENROOT_TRANSFER_RETRIES": "0"})}
        assert message in user.penroot("import", "-o", "x.sqsh", uri, env=env, status=0 if stalls else 1).stderr


@pytest.mark.parity("503, 429, a dropped connection and a stalled connection are retried")
def test_transfer_that_resumes_at_a_wrong_byte_restarts(user: User, registry: Server, big: Transfer) -> None:
    elsewhere = {"Content-Range": "bytes 0-9/10"}
    faults = Fault(big.blob, 1, drop_at=0.5), Fault(big.blob, 1, headers=elsewhere, change=lambda body: body)
    with faulty(registry.host, *faults) as front:
        env = {"ENROOT_TRANSFER_RETRIES": "2"}
        done = user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/transfer:1", env=env)
        assert "the connection ended early" in done.stderr and "resumed at byte 0" in done.stderr
        assert [bool(request.range) for request in front.seen if big.blob in request.path] == [False, True, False]


@pytest.mark.parity("ENROOT_CONNECT_TIMEOUT")
def test_registry_that_never_answers_is_given_up(user: User) -> None:
    with faulty("127.0.0.1:9") as front:
        front.faults.append(Fault("/", 99, stall_at=0.5, status=0))
        front.faults[0].change = lambda body: body
        env = {"ENROOT_STALL_TIMEOUT": "1", "ENROOT_TRANSFER_RETRIES": "0", "ENROOT_CONNECT_TIMEOUT": "1"}
        user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/x:1", env=env, status=1)


@pytest.mark.parametrize("needs_login", [False, True])
def test_redirect_to_another_host_does_not_get_our_login(user: User, registry: Server, needs_login: bool) -> None:
    credentials(user, "127.0.0.1", "me", "secret")
    with (
        faulty(registry.host, bind="127.0.0.2", login=Login({"me": "secret"}) if needs_login else None) as other,
        faulty(registry.host, login=Login({"me": "secret"}, basic=True)) as front,
    ):
        config = images.digest(make().config())
        front.faults.append(
            Fault("/blobs/", 99, status=307, headers={"Location": f"http://{other.host}/v2/test/one/blobs/{config}"})
        )
        # The proxy redirects every blob to the config. The import fails, but the test checks only the redirect.
        done = user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/one:1", status=1)
        assert ("asks for a separate login" in done.stderr) == needs_login
        assert other.seen and {request.authorization for request in other.seen} == {""}
        assert any(request.authorization.startswith("Basic ") for request in front.seen)


# -- logins


def credentials(user: User, host: str, name: str, password: str) -> None:
    user.write(".config/enroot/.credentials", f"machine {host} login {name} password {password}\n", 0o600)


@pytest.mark.parity("basic and bearer authentication work")
@pytest.mark.parametrize("basic", [True, False], ids=["basic", "token"])
def test_login_from_the_credentials_file(user: User, registry: Server, basic: bool) -> None:
    credentials(user, "127.0.0.1", "me", "secret")
    with faulty(registry.host, login=Login({"me": "secret"}, basic)) as front:
        user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/one:1")
        user.penroot("import", "-o", "y.sqsh", f"docker://me@{front.host}/test/one:1")


@pytest.mark.parity("a wrong password or a missing login is named with its file")
@pytest.mark.parametrize("basic", [True, False], ids=["basic", "token"])
def test_refused_login_names_its_source_without_secret(user: User, registry: Server, basic: bool) -> None:
    credentials(user, "127.0.0.1", "me", "hunter2")
    with faulty(registry.host, login=Login({"me": "secret"}, basic)) as front:
        uri = f"docker://{front.host}/test/one:1"
        done = user.penroot("import", "-o", "x.sqsh", uri, status=1, env={"PENROOT_DEBUG": "1"})
        assert "401" in done.stderr and "'me'" in done.stderr and ".config/enroot/.credentials" in done.stderr
        assert "hunter2" not in done.stderr
        (user.home / ".config/enroot/.credentials").unlink()
        done = user.penroot("import", "-o", "x.sqsh", uri, status=1)
        assert "401" in done.stderr and "no login" in done.stderr and ".docker/config.json" in done.stderr
        done = user.penroot("import", "-o", "x.sqsh", uri.replace("//", "//you@"), status=1)
        assert "no password of 'you'" in done.stderr


@pytest.mark.parity("basic and bearer authentication work")
def test_anonymous_token(user: User, registry: Server) -> None:
    """The registry gives a token to users without a login."""
    with faulty(registry.host, login=Login({"": ""})) as front:
        user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/one:1")


EXPIRED = (400, 401, 403)


@pytest.mark.parametrize("status", EXPIRED)
def test_token_that_ends_with_any_status_is_renewed(user: User, registry: Server, big: Transfer, status: int) -> None:
    """The token expires after one, two or three requests of a pull, and while a dropped transfer is resumed."""
    credentials(user, "127.0.0.1", "me", "secret")
    for uses in (1, 2, 3):
        fault = Fault(big.blob, drop_at=0.5)
        with faulty(registry.host, fault, login=Login({"me": "secret"}, uses=uses, ended=status)) as front:
            user.penroot("import", "-o", f"{uses}.sqsh", f"docker://{front.host}/test/transfer:1")
            assert front.login is not None and len(front.login.tokens) >= 2
        user.penroot("cache", "prune")


def test_token_that_ends_without_a_challenge_is_renewed(user: User, registry: Server, big: Transfer) -> None:
    credentials(user, "127.0.0.1", "me", "secret")
    fault = Fault(big.blob, 1, 401)
    with faulty(registry.host, fault, login=Login({"me": "secret"})) as front:
        user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/transfer:1")
        assert front.login is not None and len(front.login.tokens) == 2


@pytest.mark.parametrize("status", EXPIRED)
def test_token_that_ends_before_the_tag_list_is_renewed(user: User, registry: Server, status: int) -> None:
    credentials(user, "127.0.0.1", "me", "secret")
    with faulty(registry.host, login=Login({"me": "secret"}, uses=1, ended=status)) as front:
        stderr = user.penroot("digest", f"docker://{front.host}/test/one:missing", status=1).stderr
        assert "has no tag missing" in stderr and "available tags: 1" in stderr
        assert front.login is not None and len(front.login.tokens) == 2


@pytest.mark.parametrize("status", EXPIRED)
@pytest.mark.parametrize("basic", [True, False], ids=["basic", "token"])
def test_login_that_expires_is_named_with_its_file(
    user: User, registry: Server, big: Transfer, basic: bool, status: int
) -> None:
    credentials(user, "127.0.0.1", "me", "secret")
    login = Login({"me": "secret"}, basic, uses=1, ended=status, ends=True)
    with faulty(registry.host, login=login) as front:
        stderr = user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/transfer:1", status=1).stderr
        assert f"the login of 'me' from {user.home}/.config/enroot/.credentials has expired" in stderr
        assert f"penroot login {front.host}" in stderr and "secret" not in stderr and len(stderr.splitlines()) == 2


def test_expired_password_of_the_command_line_has_a_fix(user: User, registry: Server, big: Transfer) -> None:
    with faulty(registry.host, login=Login({"me": "secret"}, True, uses=1, ends=True)) as front:
        uri = f"docker://me:secret@{front.host}#test/transfer:1"
        stderr = user.penroot("import", "-o", "x.sqsh", uri, status=1).stderr
        assert "the login of 'me' from the command line has expired" in stderr
        assert "[HINT] give the current password" in stderr and "secret" not in stderr


@pytest.mark.parametrize("status", EXPIRED)
def test_denial_of_a_fresh_token_is_no_expiry(user: User, registry: Server, status: int) -> None:
    credentials(user, "127.0.0.1", "me", "secret")
    with faulty(registry.host, Fault("/manifests/", 9, status), login=Login({"me": "secret"})) as front:
        stderr = user.penroot("digest", f"docker://{front.host}/test/one:1", status=1).stderr
        assert "expired" not in stderr and f"{status} from {front.host}" in stderr


@pytest.mark.parametrize("status", EXPIRED)
@pytest.mark.parametrize("has_login", [True, False], ids=["login", "no login"])
def test_token_of_srun_that_ends_is_renewed_on_a_node(
    registry: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, has_login: bool
) -> None:
    """A node has its token from srun, so the registry has not told the node where to get another one."""
    environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if has_login:
        path = tmp_path / ".config/enroot/.credentials"
        path.parent.mkdir(parents=True)
        path.write_text("machine 127.0.0.1 login me password secret\n")
    login = Login({"me": "secret"}, uses=2, ended=status, tokens={"lent": 1})
    with faulty(registry.host, login=login) as front:
        reference = parse(f"{front.host}/test/one:1")
        assert isinstance(reference, Reference)
        authorization.know(json.dumps([[front.host, "test/one", "", "Bearer lent"]]))
        repository = Repository(reference, settings.load(environ))
        manifest = repository.manifest()
        if has_login:
            assert repository.config(manifest)
        else:
            with pytest.raises(RefusedError, match="srun's token for test/one has expired") as caught:
                repository.config(manifest)
            assert f"penroot login {front.host}" in caught.value.hint


def write_setting(user: User, name: str, text: str) -> None:
    """Write a file of the system's configuration."""
    user.write(f"etc/{name}", text)


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ssl.SSLContext]]:
    directory = Path(tempfile.mkdtemp(prefix="penroot-ca-", dir="/var/tmp"))
    directory.chmod(0o755)
    yield authority(directory)
    shutil.rmtree(directory)


def test_registry_with_an_unknown_certificate_is_refused(
    user: User, registry: Server, trust: tuple[Path, ssl.SSLContext]
) -> None:
    with faulty(registry.host, tls=trust[1]) as front:
        uri = f"docker://{front.host}/test/one:1"
        done = user.penroot("import", "-o", "x.sqsh", uri, status=1, env={"ENROOT_ALLOW_HTTP": "yes"})
        assert "is not trusted" in done.stderr and "registries.conf" in done.stderr and front.seen == []


def test_certificate_for_another_name_is_reported(
    user: User, registry: Server, trust: tuple[Path, ssl.SSLContext]
) -> None:
    with faulty(registry.host, tls=trust[1]) as front:
        uri = f"docker://localhost:{front.host.rpartition(':')[2]}/test/one:1"
        stderr = user.penroot("digest", uri, status=1, env={"SSL_CERT_FILE": str(trust[0])}).stderr
        assert "mismatch" in stderr and "use a name of the registry that is in its certificate" in stderr


def test_closed_home_is_ignored(user: User, registry: Server) -> None:
    # If root starts a process for a user, for example by srun --uid, HOME can be root's.
    closed = user.home / "closed"
    closed.mkdir(mode=0)
    uri = f"docker://{registry.host}/test/one:1"
    user.penroot("import", "-o", "x.sqsh", uri, env={"HOME": str(closed)})
    write_setting(user, "registries.conf", "")
    (user.home / "etc/registries.conf").chmod(0)
    assert "registries.conf: Permission denied" in user.penroot("digest", uri, status=1).stderr


@pytest.mark.clusters("Login nodes or nodes that reach no registry")
@pytest.mark.parity("SSL_CERT_DIR")
@pytest.mark.parametrize("source", ["registries.conf", "enroot.conf", "environment"])
def test_authority_of_the_site(user: User, registry: Server, trust: tuple[Path, ssl.SSLContext], source: str) -> None:
    """A site can name its certificate authority in each of these sources."""
    environ = {}
    with faulty(registry.host, tls=trust[1]) as front:
        if source == "registries.conf":
            write_setting(user, source, f"# ours\n127.0.0.1  ca={trust[0]}  # the test's\n")
        elif source == "enroot.conf":
            write_setting(user, source, f"SSL_CERT_FILE {trust[0]}\n")
        else:
            environ["SSL_CERT_FILE"] = str(trust[0])
        user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/one:1", env=environ)
        assert front.seen


@pytest.mark.clusters("Login nodes or nodes that reach no registry")
@pytest.mark.parity("ENROOT_ALLOW_HTTP")
def test_plain_http_needs_a_rule_for_the_registry(user: User, registry: Server) -> None:
    with faulty(registry.host, bind="0.0.0.0") as front:  # this address does not count as local: see is_local()
        uri = f"docker://{front.host}/test/one:1"
        stderr = user.penroot("import", "-o", "x.sqsh", uri, status=1).stderr
        assert "registries.conf" in stderr and front.seen == []
        write_setting(user, "registries.conf", "0.0.0.0 http\n")
        user.penroot("import", "-o", "x.sqsh", uri)
        write_setting(user, "registries.conf", "0.0.0.0 insecure\n")
        assert "registries.conf:1: unknown rule 'insecure'" in user.penroot("digest", uri, status=1).stderr


def test_mirrors_come_first(user: User, registry: Server) -> None:
    """penroot asks the mirrors of a registry first, and skips a mirror that lacks the image."""
    registry.pusher.image("hub/test/mirrored", "1", make())
    with faulty(registry.host) as empty, faulty(registry.host) as full:
        write_setting(user, "registries.conf", f"reg.test mirror={empty.host}/none mirror={full.host}/hub\n")
        uri = "docker://reg.test/test/mirrored:1"
        done = user.penroot("create", "-n", "box", uri)
        assert "none/test/mirrored" in done.stderr and empty.sent("/blobs/") == 0 and full.sent("/blobs/") > 0
        sent = full.sent("/blobs/")
        user.penroot("create", "-n", "two", uri)
        assert full.sent("/blobs/") == sent


@pytest.mark.clusters("Login nodes or nodes that reach no registry")
@pytest.mark.parity("all_proxy")
@pytest.mark.parametrize("source", ["enroot.conf", "environment"])
def test_proxy(user: User, registry: Server, source: str) -> None:
    """Only the proxy can resolve the name of the registry."""
    with faulty(registry.host) as proxy:
        address = f"http://{proxy.host}"
        environ = {"ENROOT_ALLOW_HTTP": "yes"}
        if source == "enroot.conf":
            write_setting(user, source, f"http_proxy {address}\n")
        else:
            environ["HTTP_PROXY"] = address
        uri = "docker://reg.invalid:5000/test/one:1"
        user.penroot("import", "-o", "x.sqsh", uri, env=environ)
        assert proxy.seen and all(request.path.startswith("http://reg.invalid:5000/v2/") for request in proxy.seen)
        stderr = user.penroot("digest", uri, status=1, env={**environ, "no_proxy": "reg.invalid"}).stderr
        assert "cannot reach the registry reg.invalid:5000" in stderr


@pytest.mark.parametrize("login", [("", ""), ("me@site", "s3cret")], ids=["open", "with a password"])
def test_proxy_for_https_is_a_tunnel(
    user: User, registry: Server, trust: tuple[Path, ssl.SSLContext], login: tuple[str, str]
) -> None:
    """The proxy's tunnel leads to a server with the registry's certificate. The registry's address has no server."""
    with faulty(registry.host, tls=trust[1]) as front, tunnel(front.host, *login) as (address, proxy):
        env = {"HTTPS_PROXY": address, "SSL_CERT_FILE": str(trust[0])}
        user.penroot("create", "-n", "box", "docker://127.0.0.1:1#test/one:1", env=env)
        assert {request.path for request in proxy.seen} == {"127.0.0.1:1"}
        assert front.seen
        if login[0]:
            env["HTTPS_PROXY"] = address.replace(login[1], "wrong")
            stderr = user.penroot("digest", "docker://127.0.0.1:1#test/one:1", env=env, status=1).stderr
            assert "407" in stderr and "wrong" not in stderr


def test_login_from_a_credential_helper(user: User, registry: Server) -> None:
    helper = """#!/bin/sh
test "$1" = get && host=$(cat) || exit 2
case $host in
    127.0.0.1*) echo '{"ServerURL":"x","Username":"me","Secret":"secret"}';;
    *) echo credentials not found in native keychain; exit 1;;
esac
"""
    user.write("bin/docker-credential-test", helper, 0o755)
    environ = {"PATH": f"{user.home}/bin:{user.environ['PATH']}"}
    with faulty(registry.host, login=Login({"me": "secret"})) as front:
        uri = f"docker://{front.host}/test/one:1"
        for config in ({"credsStore": "test", "auths": {front.host: {}}}, {"credHelpers": {"127.0.0.1": "test"}}):
            user.write(".docker/config.json", json.dumps(config))
            user.penroot("digest", uri, env=environ)
        done = user.penroot("digest", uri, status=1)
        assert "docker-credential-test is not in PATH" in done.stderr and "401" in done.stderr


@pytest.mark.parity(".credentials: a password may be $VARIABLE or $(command)")
def test_login_from_a_command_of_the_credentials_file(user: User, registry: Server) -> None:
    credentials(user, "127.0.0.1", "me", "$(cat $HOME/secret; true)")
    (user.home / "secret").write_text("secret\n")
    with faulty(registry.host, login=Login({"me": "secret"})) as front:
        uri = f"docker://{front.host}/test/one:1"
        user.penroot("digest", uri)
        (user.home / ".config/enroot/.credentials").chmod(0o666)
        assert "others can write" in user.penroot("digest", uri, status=1).stderr


# -- output


def test_progress_on_a_terminal_is_one_line_that_disappears(user: User, big: Transfer) -> None:
    primary, terminal = pty.openpty()
    with big.faulty(stall_at=0.5) as (_, uri):
        env = {"ENROOT_STALL_TIMEOUT": "2"}
        process = user.begin("penroot", "create", "-n", "box", uri, env=env, stdout=subprocess.DEVNULL, stderr=terminal)
        os.close(terminal)
        output = b""
        with contextlib.suppress(OSError):  # EIO: no process has the terminal open
            while data := os.read(primary, 65536):
                output += data
        os.close(primary)
        assert process.wait() == 0
    text = output.decode()
    assert text.count("\r\x1b[K") > 5 and " MB/s" in text and "  [###" in text
    # The text of each line of the terminal after the last time that the line was erased
    lines = [line.rpartition("\x1b[K")[2] for line in text.replace("\r\n", "\n").split("\n")]
    assert not any("MB/s" in line for line in lines), lines
    assert any("trying again" in line for line in lines) and lines[-1] == ""


@pytest.mark.parametrize(
    ("env", "tag"),
    [({}, "\x1b[31m[ERROR]\x1b[0m "), ({"NO_COLOR": "1"}, "[ERROR] "), ({"TERM": "dumb"}, "[ERROR] ")],
)
def test_errors_on_a_terminal_are_red(user: User, env: dict[str, str], tag: str) -> None:
    primary, terminal = pty.openpty()
    process = user.begin("penroot", "start", "nothing", env=env, stdout=subprocess.DEVNULL, stderr=terminal)
    process.wait()
    os.close(terminal)
    assert os.read(primary, 65536).decode().startswith(f"{tag}no such container: nothing")
    os.close(primary)


def test_progress_without_a_terminal_is_an_occasional_line(user: User, big: Transfer) -> None:
    with big.faulty(stall_at=0.5) as (_, uri):
        began = time.monotonic()
        done = user.penroot("create", "-n", "box", uri, env={"ENROOT_STALL_TIMEOUT": "6"})
        max_lines = (time.monotonic() - began) / 5
    assert (
        1 <= [" MB/s" in line for line in done.stderr.splitlines()].count(True) <= max_lines and "\r" not in done.stderr
    )


# -- concurrent and killed imports


def test_eight_first_uses_fetch_each_blob_once(user: User, registry: Server) -> None:
    image = make(Env=["A=eight"])
    image.layers.append(Layer(images.tar([entry("eight", os.urandom(500_000))])))
    registry.pusher.image("test/eight", "1", image)
    with faulty(registry.host) as front:
        many = [popen(user, "create", "-n", f"c{i}", f"docker://{front.host}/test/eight:1") for i in range(8)]
        for process in many:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
        blobs = [request.path for request in front.seen if "/blobs/" in request.path]
        assert sorted(blobs) == sorted(set(blobs)) and len(blobs) == 4


def popen(user: User, *arguments: str) -> subprocess.Popen[str]:
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return user.begin("penroot", *arguments, start_new_session=True, **pipes)


@contextlib.contextmanager
def stopped(user: User) -> Iterator[None]:
    """Stop all processes of this user during the block, as Slurm suspends a job."""
    subprocess.run(["pkill", "-STOP", "-u", str(user.uid)], check=True)
    try:
        yield
    finally:
        subprocess.run(["pkill", "-CONT", "-u", str(user.uid)], check=False)


def wait_for_work(user: User, big: Transfer) -> None:
    """Wait until a process has requested the layer and unpacks it. Later requests for the layer meet no fault."""
    glob = (user.home / "cache/tmp").glob
    until(lambda: big.front.asked(big.blob) and list(glob("layers-*/fs")), "a layer is being unpacked")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_import_leaves_nothing(user: User, registry: Server, big: Transfer, number: signal.Signals) -> None:
    with big.faulty(9, stall_at=0.5) as (_, uri):
        process = popen(user, "import", "-o", "x.sqsh", uri)
        wait_for_work(user, big)
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=120)
        assert process.returncode != 0
        assert "Traceback" not in errors
    assert not list((user.home / "cache/tmp").glob("layers-*"))
    user.penroot(
        "import", "-o", "x.sqsh", f"docker://{registry.host}/test/transfer:1"
    )  # the next import works, and removes leftovers


def test_second_import_takes_over_from_a_killed_one(user: User, big: Transfer) -> None:
    with big.faulty(stall_at=0.5) as (_, uri):
        first = popen(user, "create", "-n", "a", uri)
        wait_for_work(user, big)
        second = popen(user, "create", "-n", "b", uri)
        time.sleep(0.3)
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
        _, errors = second.communicate(timeout=120)
        assert second.returncode == 0, errors


@pytest.mark.parity("a suspended or stopped process does not block other imports of its user")
@pytest.mark.security("L6")
def test_suspended_import_holds_up_no_other(user: User, big: Transfer) -> None:
    """A job is suspended in the middle of an import, and another import of the same image goes on."""
    with big.faulty(stall_at=0.5) as (front, uri):
        first = popen(user, "create", "-n", "a", uri)
        wait_for_work(user, big)
        with stopped(user):
            second = popen(user, "create", "-n", "b", uri)
            try:
                _, errors = second.communicate(timeout=60)
            finally:
                second.kill()
        assert second.returncode == 0, errors
        assert f"waiting for process {first.pid} (penroot, stopped), which is making images/" in errors
        front.over.set()  # end the stall
        _, errors = first.communicate(timeout=120)
        assert first.returncode == 0, errors


@pytest.mark.parity("import -o FILE in several processes")
@pytest.mark.parametrize("options", [(), ("--force",), ("--ensure",)], ids=["plain", "force", "ensure"])
def test_only_one_of_six_imports_writes_the_file(
    user: User, registry: Server, big: Transfer, options: tuple[str, ...]
) -> None:
    uri = f"docker://{registry.host}/test/transfer:1"
    user.penroot("load", uri)
    if options:
        (user.home / "x.sqsh").write_text("old")
        user.own(user.home / "x.sqsh")
    many = [popen(user, "import", *options, "-o", "x.sqsh", uri) for _ in range(6)]
    done = [process.communicate(timeout=120)[1] for process in many]
    assert [process.returncode for process in many] == [0] * 6, done
    written = [errors for errors in done if f" MB, {big.image.digest()}" in errors]
    assert len(written) == 1, done
    assert sum("imported by another process" in errors or "up to date" in errors for errors in done) == 5
    assert [path.name for path in user.home.iterdir() if path.name.startswith(".x")] == []
    assert content(user.home / "x.sqsh", "etc/rc.local").decode().endswith(f"# penroot-image: {big.image.digest()}\n")


@pytest.mark.parity("import -o FILE: the next process takes over from a killed one")
def test_import_that_waits_takes_over_from_a_killed_one(user: User, big: Transfer) -> None:
    with big.faulty(stall_at=0.5) as (_, uri):
        first = popen(user, "import", "-o", "x.sqsh", uri)
        wait_for_work(user, big)
        second = popen(user, "import", "-o", "x.sqsh", uri)
        assert second.stderr is not None
        line = second.stderr.readline()
        assert f"waiting for process {first.pid} (penroot" in line and f"making {user.home}/x.sqsh" in line
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
        _, errors = second.communicate(timeout=120)
        assert second.returncode == 0, errors
    assert [path.name for path in user.home.iterdir() if path.name.startswith(".x")] == []


@pytest.mark.parity("import -o FILE: the next process takes over from a killed one")
def test_import_does_not_wait_for_a_suspended_one(user: User, big: Transfer) -> None:
    """When the suspended import resumes, it discards its unfinished file and keeps the other import's file."""
    with big.faulty(stall_at=0.5) as (front, uri):
        first = popen(user, "import", "-o", "x.sqsh", uri)
        wait_for_work(user, big)
        with stopped(user):
            done = user.penroot("import", "-o", "x.sqsh", uri)
        assert f"process {first.pid} (penroot, stopped) makes no progress making {user.home}/x.sqsh" in done.stderr
        front.over.set()  # end the stall
        _, errors = first.communicate(timeout=120)
        assert first.returncode == 0 and "imported by another process" in errors, errors


def test_simultaneous_import_of_another_image_is_refused(user: User, registry: Server, big: Transfer) -> None:
    with big.faulty(stall_at=0.5) as (front, uri):
        first = popen(user, "import", "-o", "x.sqsh", f"docker://{registry.host}/test/one:1")
        second = popen(user, "import", "-o", "x.sqsh", uri)
        until(
            lambda: front.asked(big.blob) or second.poll() is not None,
            "the second import has requested the layer or has ended",
        )
        front.over.set()  # end the stall
        errors = first.communicate(timeout=120)[1] + second.communicate(timeout=120)[1]
    assert sorted((first.returncode, second.returncode)) == [0, 1], errors
    assert "file already exists" in errors


@pytest.mark.parity("import --ensure")
def test_ensure_reports_what_was_wrong(user: User, registry: Server) -> None:
    image = images.busybox(entry("ensure", b"1"))
    registry.pusher.image("test/ensure", "1", image)
    uri = f"docker://{registry.host}/test/ensure:1"
    path = user.home / "x.sqsh"

    def ensure() -> str:
        return user.penroot("import", "--ensure", "-o", "x.sqsh", uri).stderr

    def is_good() -> bool:
        return user.start(str(path), "cat", "/ensure") in ("1", "2")

    assert f"{path} is missing: importing" in ensure() and is_good()
    before = path.stat()
    assert f"{path}: up to date, {image.digest()}" in ensure()
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_ino == before.st_ino
    whole = path.read_bytes()
    for damage, words in {
        whole[: len(whole) // 2]: "is truncated",
        whole[:-4096]: "has no image record",
        whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]: "is damaged: checksum mismatch",
        b"no image": "is not a squashfs file",
    }.items():
        path.write_bytes(damage)
        assert f"{path} {words}" in ensure() and is_good()
    registry.pusher.image("test/ensure", "1", images.busybox(entry("ensure", b"2")))
    assert f"{path} is {image.digest()}, not sha256:" in ensure()
    assert user.start(str(path), "cat", "/ensure") == "2"
    user.penroot("import", "--ensure", "-o", "-", uri, status=1)


@pytest.mark.security("U11")
@pytest.mark.parametrize("option", ["--ensure", "--force"])
def test_import_does_not_take_a_file_of_a_stranger(user: User, registry: Server, option: str) -> None:
    uri = f"docker://{registry.host}/test/one:1"
    user.penroot("import", "-o", "x.sqsh", uri)
    directory = user.home / "open"
    directory.mkdir()
    directory.chmod(0o1777)
    forged = directory / "x.sqsh"
    shutil.copy(user.home / "x.sqsh", forged)  # a forged file can contain the record of the right image
    os.chown(forged, user.uid + 1, user.uid + 1)
    done = user.penroot("import", option, "-o", str(forged), uri, status=1)
    assert "up to date" not in done.stderr and "another process" not in done.stderr
    if option == "--ensure":
        assert f"{forged} belongs to uid {user.uid + 1}" in done.stderr


def test_import_follows_a_link_as_the_kernel_does(user: User, registry: Server) -> None:
    for name in ("a/b", "c/b", "c/d"):
        (user.home / name).mkdir(parents=True)
    (user.home / "a/link").symlink_to("../c/d")
    (user.home / "c/d/x.sqsh").symlink_to("../b/y.sqsh")
    (user.home / "a/b/y.sqsh").write_text("another file")
    user.own(user.home)
    user.penroot("import", "--force", "-o", "a/link/x.sqsh", f"docker://{registry.host}/test/one:1")
    assert (user.home / "a/b/y.sqsh").read_text() == "another file"
    assert (user.home / "c/b/y.sqsh").is_file() and (user.home / "c/d/x.sqsh").is_symlink()


@pytest.mark.parity("import --ensure")
def test_ensure_keeps_a_whole_file_while_the_registry_is_down(user: User, registry: Server) -> None:
    uri = f"docker://{registry.host}/test/one:1"
    user.penroot("import", "-o", "x.sqsh", uri)
    with faulty(registry.host, Fault("/manifests/", 99, status=503)) as front:
        down = f"docker://{front.host}/test/one:1"
        env = {"ENROOT_TRANSFER_RETRIES": "0"}
        done = user.penroot("import", "--ensure", "-o", "x.sqsh", down, env=env)
        assert f"keeping {user.home}/x.sqsh" in done.stderr
        user.penroot("import", "--ensure", "-o", "y.sqsh", down, env=env, status=1)


@pytest.mark.parity("PENROOT_IMAGE_DIGEST in the container")
def test_image_digest_is_recorded(user: User, registry: Server) -> None:
    image = images.busybox(entry("recorded", b"1"))
    registry.pusher.image("test/recorded", "1", image)
    uri = f"docker://{registry.host}/test/recorded:1"
    user.penroot("import", "-o", "x.sqsh", uri)
    shown = json.loads(user.penroot("inspect", "x.sqsh").stdout)
    assert shown["digest"] == image.digest()
    user.penroot("create", "x.sqsh")
    assert json.loads(user.penroot("inspect", "x").stdout)["digest"] == image.digest()
    user.penroot("load", "-n", "y", uri)
    for name in (uri, "x.sqsh", "x", "y"):
        assert user.start(name, "sh", "-c", "echo $PENROOT_IMAGE_DIGEST") == image.digest() + "\n"
    user.penroot("export", "-o", "changed.sqsh", "x")
    assert "digest" not in json.loads(user.penroot("inspect", "changed.sqsh").stdout)


@pytest.mark.parametrize("max_processes", [1, 2, 3, 4, 6])
def test_few_processes_left_is_one_line(user: User, registry: Server, max_processes: int) -> None:
    """RLIMIT_NPROC counts all processes of a user. This user runs no other processes."""
    uri = f"docker://{registry.host}/test/one:1"
    stored = f"docker://{registry.host}/test/stored:1"
    registry.pusher.image("test/stored", "1", images.busybox(entry("few", b"1")))
    user.penroot("import", "-o", "few.sqsh", stored)
    user.run("cp", "-a", "cache", "kept")
    for words in (
        ("import", "-o", "x.sqsh", uri),
        ("load", "-n", "x", uri),
        ("start", uri, "/bin/new"),
        ("import", "-f", "-o", "y.sqsh", stored),
        ("create", "-f", "-n", "y", "few.sqsh"),
        ("start", "-r", stored, "cat", "/few"),
    ):
        # Zombies of the last command count towards the limit until they are reaped. Beyond the limit, execve(2) fails.
        until(
            lambda: subprocess.run(["pgrep", "-u", str(user.uid)], stdout=subprocess.DEVNULL).returncode, "no process"
        )
        done = user.penroot(*words, prefix=("prlimit", f"--nproc={max_processes}"), status=None)
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr, (words, done.stderr)
        errors = [line for line in done.stderr.splitlines() if line.startswith("[ERROR]")]
        if done.returncode and "/bin/new" not in done.stderr:
            assert len(errors) == 1 and "ulimit -u" in done.stderr, (words, done.stderr)
        subprocess.run(["rm", "-rf", user.home / "cache"], check=True)
        user.run("cp", "-a", "kept", "cache")


@pytest.mark.soak
def test_importer_killed_at_random_moments(user: User, registry: Server, rng: random.Random, soak: bool) -> None:
    """Another start of the image takes over. The store then has no leftovers, and all its images verify."""
    fill = [Layer(images.tar([entry(f"f{i}", rng.randbytes(1_500_000))])) for i in range(4)]
    image = images.busybox(entry("number", b"7"))
    image.layers += fill
    registry.pusher.image("test/killed", "1", image)
    uri = f"docker://{registry.host}/test/killed:1"
    for _ in range(50 if soak else 5):
        first, second = (popen(user, "start", uri, "cat", "/number") for _ in range(2))
        time.sleep(rng.uniform(0.05, 0.5))
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
        out, errors = second.communicate(timeout=120)
        assert (second.returncode, out) == (0, "7"), errors
        user.penroot("cache", "verify")
        user.penroot("cache", "prune")
        assert list((user.home / "cache/tmp").iterdir()) == []
        assert list((user.home / "cache/layers").iterdir()) == []


# -- imported files


def test_unpacked_import_is_usable_and_has_no_special_bits(user: User, registry: Server) -> None:
    user.penroot("import", "-o", "x.sqsh", f"docker://{registry.host}/test/one:1")
    user.penroot("create", "-n", "box", "x.sqsh")
    box = user.data / "box"
    assert stat.S_IMODE((box / "bin/su").stat().st_mode) == 0o755
    assert stat.S_IMODE((box / "closed").stat().st_mode) == 0o755
    assert os.getxattr(box / "bin/new", "user.note") == b"yes"
    user.penroot("remove", "-f", "box")
    assert not box.exists()
