"""An ordinary user starts and stores images from OCI layouts, archives and container engines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests import images
from tests.fakeregistry import faulty
from tests.images import DOCKER, OCI, entry
from tests.kernel.conftest import User, require, small_filesystem
from tests.kernel.registry import Server

MORE = (entry("number", b"42"), entry("etc/motd", b"hello\n"))


@pytest.fixture(scope="module")
def registry(registry: Server) -> Server:
    registry.pusher.image("test/box", "1", images.busybox(*MORE, kinds=OCI))
    registry.pusher.image("test/box", "docker", images.busybox(*MORE, kinds=DOCKER))
    registry.pusher.image("test/box", "2", images.busybox(entry("number", b"2"), kinds=OCI))
    return registry


def skopeo(user: User, source: str, target: str) -> None:
    """Copy an image with skopeo, as the user."""
    require(shutil.which("skopeo"), "skopeo is not installed")
    user.run("skopeo", "--insecure-policy", "copy", "-q", "--src-tls-verify=false", source, target)


@pytest.fixture
def layout(user: User, registry: Server) -> Path:
    write_form(user, registry, "oci:")
    return user.home / "layout"


@pytest.fixture
def saved(user: User, registry: Server) -> Path:
    write_form(user, registry, "docker-archive:")
    return user.home / "saved.tar"


def write_form(user: User, registry: Server, form: str) -> str:
    """Write the image to the user's home in a form such as ``oci:``. Return its URI, which begins with the form."""
    if form.startswith("docker-archive"):
        path = user.home / "saved.tar"
        skopeo(user, f"docker://{registry.host}/test/box:docker", f"docker-archive:{path}:test/box:docker")
    elif form.startswith("oci-archive"):
        path = user.home / "archive.tar"
        skopeo(user, f"docker://{registry.host}/test/box:1", f"oci-archive:{path}:one")
    else:
        path = user.home / "layout"
        skopeo(user, f"docker://{registry.host}/test/box:1", f"oci:{path}:one")
    scheme, _, name = form.partition(":")
    return f"{scheme}:{path}" + (f":{name}" if name else "")


@pytest.mark.parametrize(
    "form", ["oci:", "oci:one", "oci-archive:", "oci-archive:one", "docker-archive:", "docker-archive:test/box:docker"]
)
def test_local_image_starts_and_is_kept(user: User, registry: Server, form: str) -> None:
    uri = write_form(user, registry, form)
    assert user.start(uri, "cat", "/number") == "42"
    layers = user.home / "cache/layers"
    before = {path.name: path.stat().st_mtime_ns for path in layers.iterdir()}
    assert user.start(uri, "cat", "/etc/motd") == "hello\n"
    assert {path.name: path.stat().st_mtime_ns for path in layers.iterdir()} == before
    assert ": none damaged" in user.penroot("cache", "verify").stderr


def test_all_forms_share_the_layers_of_the_registry(user: User, registry: Server) -> None:
    user.start(f"docker://{registry.host}/test/box:1", "true")
    for form in ("oci:", "oci-archive:", "docker-archive:"):
        user.start(write_form(user, registry, form), "true")
    assert len(list((user.home / "cache/layers").iterdir())) == 2


def test_create_load_and_import_take_every_form(user: User, layout: Path, saved: Path) -> None:
    user.penroot("create", f"oci:{layout}:one")
    assert user.start("layout+one", "cat", "/number") == "42"
    user.penroot("load", "--name", "two", "oci:layout")  # a path relative to the working directory
    assert user.start("two", "cat", "/number") == "42"
    user.penroot("import", f"docker-archive:{saved}")
    assert user.start("./saved.sqsh", "cat", "/number") == "42"


def test_image_in_a_layout_of_several_needs_a_name(user: User, registry: Server, layout: Path) -> None:
    skopeo(user, f"docker://{registry.host}/test/box:2", f"oci:{layout}:two")
    assert user.start(f"oci:{layout}:two", "cat", "/number") == "2"
    stderr = user.penroot("start", f"oci:{layout}", "true", status=1).stderr
    assert "more than one" in stderr and "one, two" in stderr
    stderr = user.penroot("start", f"oci:{layout}:three", "true", status=1).stderr
    assert "no such image" in stderr and "one, two" in stderr


@pytest.mark.parametrize("program", ["gzip", "zstd"])
def test_compressed_archive(user: User, saved: Path, program: str) -> None:
    user.run(program, "-q", str(saved))
    (packed,) = user.home.glob("saved.tar.*")
    assert user.start(f"docker-archive:{packed}", "cat", "/number") == "42"


def test_archive_with_compressed_layers_and_with_links(user: User, saved: Path) -> None:
    """podman --compress writes compressed layers to archives, and old versions of docker write links."""
    work = user.home / "work"
    with tarfile.open(saved) as archive:
        archive.extractall(work)
    (described,) = json.loads((work / "manifest.json").read_text())
    one, two = described["Layers"]
    subprocess.run(["gzip", "-n", work / one], check=True)
    (work / "old").mkdir()
    (work / "old/layer.tar").symlink_to(f"../{two}")
    described["Layers"] = [f"{one}.gz", "old/layer.tar"]
    (work / "manifest.json").write_text(json.dumps([described]))
    subprocess.run(["tar", "-C", work, "-cf", user.home / "odd.tar", "."], check=True)
    assert user.start(f"docker-archive:{user.home}/odd.tar", "cat", "/number") == "42"


def test_damage_of_local_images_is_named(user: User, layout: Path, saved: Path) -> None:
    blob = max((layout / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    blob.write_bytes(blob.read_bytes()[:-9])
    assert blob.name in user.penroot("start", f"oci:{layout}", "true", status=1).stderr
    (user.home / "short.tar").write_bytes(saved.read_bytes()[:100_000])
    assert "short.tar" in user.penroot("start", f"docker-archive:{user.home}/short.tar", "true", status=1).stderr
    (user.home / "text").write_text("no archive")
    assert "not a tar archive" in user.penroot("start", f"oci-archive:{user.home}/text", "true", status=1).stderr
    with open(user.home / "loop.tar", "wb") as f:  # Python's tarfile recurses for each of these headers
        f.write(tarfile.TarInfo("x" * 101).tobuf(tarfile.GNU_FORMAT)[:1024] * 3000)
    assert "not a tar archive" in user.penroot("start", f"docker-archive:{user.home}/loop.tar", "true", status=1).stderr
    blob.unlink()
    os.mkfifo(blob)
    user.own(blob)
    assert f"{blob}: not a regular file" in user.penroot("start", f"oci:{layout}", "true", status=1).stderr
    assert "is not an OCI layout" in user.penroot("start", f"oci:{user.home}/none", "true", status=1).stderr
    assert not (user.home / "cache/tmp").exists() or list((user.home / "cache/tmp").iterdir()) == []


ENGINE = """\
#!/bin/sh
# Fake docker and podman: image inspect, pull and save for images of a registry. The file asked records the calls.
echo "$@" >> "$HOME/asked"
image=$(eval echo "\\${$#}")
case "$1" in
image)  test -e "$HOME/has" || { echo "Error: No such image: $image" >&2; exit 1; }
        skopeo inspect --config --raw --tls-verify=false "docker://REGISTRY/$image" | sha256sum | sed 's/^/sha256:/; s/ .*//';;
pull)   skopeo inspect --raw --tls-verify=false "docker://REGISTRY/$image" > /dev/null && touch "$HOME/has";;
save)   skopeo --insecure-policy copy -q --src-tls-verify=false "docker://REGISTRY/$image" "docker-archive:$HOME/out:$image" &&
        cat "$HOME/out" && rm "$HOME/out";;
*)      exit 2;;
esac
"""  # noqa: E501


@pytest.fixture
def engines(user: User, registry: Server) -> Path:
    """Put a fake docker and podman on the user's PATH. Return the file in which they record their arguments."""
    for name in ("docker", "podman"):
        user.write(f"bin/{name}", ENGINE.replace("REGISTRY", registry.host), 0o755)
    user.environ["PATH"] = f"{user.home}/bin:{user.environ['PATH']}"
    return user.home / "asked"


@pytest.mark.parity("import dockerd:// and podman://")
@pytest.mark.parametrize("scheme", ["dockerd", "podman"])
def test_image_of_an_engine(user: User, engines: Path, scheme: str) -> None:
    uri = f"{scheme}://test/box:docker"
    assert user.start(uri, "cat", "/number") == "42"
    assert [line.split()[0] for line in engines.read_text().splitlines()] == ["image", "pull", "image", "save"]
    engines.unlink()
    assert user.start(uri, "cat", "/number") == "42"
    assert [line.split()[0] for line in engines.read_text().splitlines()] == [
        "image"
    ]  # the image is stored, so the engine does not save it again
    user.penroot("import", uri)
    assert (user.home / "test+box+docker.sqsh").exists()


def test_image_that_the_engine_cannot_get(user: User, engines: Path) -> None:
    stderr = user.penroot("start", "dockerd://test/none", "true", status=1).stderr
    assert "docker" in stderr and "none" in stderr and "Traceback" not in stderr


@pytest.mark.parity("digest URI", "digest --arch")
def test_digest_is_what_the_registry_has(user: User, registry: Server, layout: Path) -> None:
    manifest = images.busybox(*MORE, kinds=OCI).digest()
    assert user.penroot("digest", f"docker://{registry.host}/test/box:1").stdout == manifest + "\n"
    assert user.penroot("digest", f"oci:{layout}").stdout == manifest + "\n"
    assert "box.sqsh is a file" in user.penroot("digest", "box.sqsh", status=1).stderr
    arm, intel = images.busybox(kinds=OCI, architecture="arm64"), images.busybox(*MORE, kinds=OCI)
    for image in (arm, intel):
        registry.pusher.image("test/multi", "", image)
    both = images.index([(image, {"os": "linux", "architecture": image.architecture}) for image in (arm, intel)])
    registry.pusher.manifest("test/multi", "1", both)
    uri = f"docker://{registry.host}/test/multi:1"
    assert user.penroot("digest", "-a", "arm64", uri).stdout == arm.digest() + "\n"
    assert user.penroot("digest", "-a", "x86_64", uri).stdout == intel.digest() + "\n"


def test_inspect_prints_no_control_characters(user: User, registry: Server) -> None:
    image = images.busybox(kinds=OCI)
    image.settings["Labels"] = labels = {"é": "ü", "steers": "\x9b2J\x1b[2J\x7f\u202e\U000e0041"}
    registry.pusher.image("test/steers", "1", image)
    out = user.penroot("inspect", f"docker://{registry.host}/test/steers:1").stdout
    assert json.loads(out)["config"]["Labels"] == labels and '"é": "ü"' in out
    assert all(line.isprintable() for line in out.split("\n"))


@pytest.mark.parity("inspect --arch", "ENROOT_CACHE_PATH")
def test_inspect_unpacks_nothing(user: User, registry: Server) -> None:
    image = images.busybox(*MORE, kinds=OCI)
    uri = f"docker://{registry.host}/test/box:1"
    shown = json.loads(user.penroot("inspect", uri).stdout)
    assert shown["digest"] == image.digest() and shown["platform"] == "linux/amd64"
    assert [layer["digest"] for layer in shown["layers"]] == [images.digest(layer.blob) for layer in image.layers]
    assert shown["size"] == sum(len(layer.blob) for layer in image.layers)
    assert shown["config"] == image.settings
    assert not os.path.exists(user.home / "cache/layers") or not os.listdir(user.home / "cache/layers")
    user.penroot("load", "-n", "box", uri)
    assert json.loads(user.penroot("inspect", "box").stdout)["digest"] == image.digest()
    user.penroot("import", "-o", "box.sqsh", uri)
    shown = json.loads(user.penroot("inspect", "./box.sqsh").stdout)
    assert shown["provenance"] == f"docker://{registry.host}#test/box:1"
    assert shown["config"]["Env"] == ["PATH=/bin"] and shown["config"]["Cmd"] == ["/bin/sh"]


# -- blobs that nodes share


def nodes(user: User, uri: str, count: int = 4) -> list[str]:
    """Start an image on ``count`` nodes at the same time, each with an empty store. Return the stderr of each start."""
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    user.environ["ENROOT_SHARED_BLOBS"] = f"{user.home}/all"
    stores = ({"ENROOT_CACHE_PATH": f"{user.home}/node{n}"} for n in range(count))
    running = [user.begin("penroot", "start", uri, "cat", "/number", env=store, **pipes) for store in stores]
    messages = []
    for process in running:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "7"), err
        messages.append(err)
    return messages


@pytest.fixture
def shared(registry: Server) -> tuple[str, list[str]]:
    """Push an image with new blobs. Return its URI and the digests of its blobs."""
    fill = entry("fill", os.urandom(3_000_000))
    image = images.busybox(entry("number", b"7"), fill, entry("id", os.urandom(8)))
    image.layers.append(images.Layer(images.tar([entry("more", os.urandom(2_000_000))])))
    registry.pusher.image("test/shared", "1", image)
    blobs = [*(layer.blob for layer in image.layers), image.config()]
    return f"docker://{registry.host}/test/shared:1", [images.digest(blob) for blob in blobs]


@pytest.mark.parity("ENROOT_SHARED_BLOBS")
def test_four_nodes_fetch_each_blob_once(user: User, registry: Server, shared: tuple[str, list[str]]) -> None:
    uri, blobs = shared
    with faulty(registry.host) as front:
        nodes(user, uri.replace(registry.host, front.host))
    assert [front.asked(blob) for blob in blobs] == [1] * 4
    kept = sorted(path.name for path in (user.home / "all/sha256").iterdir())
    assert kept == sorted(blob.removeprefix("sha256:") for blob in blobs)
    assert list((user.home / "all/tmp").iterdir()) == []


@pytest.mark.clusters("Images that many jobs fetch, and a file system that all nodes see")
def test_lock_of_a_dead_node_expires(user: User, shared: tuple[str, list[str]]) -> None:
    uri, blobs = shared
    (user.home / "all/sha256").mkdir(parents=True)
    (user.home / "all/tmp").mkdir()
    for blob in blobs:
        lock = user.home / "all/sha256" / (blob.removeprefix("sha256:") + ".lock")
        lock.write_text("gone 12345678 99\n")
        os.utime(lock, (0, 0))
    user.own(user.home / "all")
    assert any("process 99 on gone has not renewed its lock" in stderr for stderr in nodes(user, uri))


@pytest.mark.parametrize("damage", ["short", "wrong"])
def test_damaged_shared_blob_is_not_used(user: User, shared: tuple[str, list[str]], damage: str) -> None:
    uri, blobs = shared
    nodes(user, uri, 1)
    path = user.home / "all/sha256" / blobs[-1].removeprefix("sha256:")
    data = path.read_bytes()
    path.write_bytes(data[:-1] if damage == "short" else data[:-9] + b"x" + data[-8:])
    shutil.rmtree(user.home / "node0")
    nodes(user, uri, 1)
    assert path.read_bytes() == data


def test_unwritable_shared_directory_is_an_error(user: User, shared: tuple[str, list[str]]) -> None:
    stderr = user.penroot("start", shared[0], "true", status=1, env={"ENROOT_SHARED_BLOBS": "/proc/none"}).stderr
    assert "/proc/none" in stderr and "ENROOT_SHARED_BLOBS" in stderr


def test_image_starts_if_the_shared_directory_is_full(user: User, shared: tuple[str, list[str]]) -> None:
    with small_filesystem(user.home / "small", "size=1m,mode=777") as small:
        for option, warning in (("rw", "cannot share"), ("ro", "for this node alone")):
            subprocess.run(["mount", "-o", f"remount,{option}", small], check=True)
            env = {"ENROOT_SHARED_BLOBS": str(small), "ENROOT_CACHE_PATH": f"{user.home}/{option}"}
            done = user.penroot("start", shared[0], "cat", "/number", env=env)
            assert done.stdout == "7" and warning in done.stderr
            assert list((small / "tmp").iterdir()) == [] and list(small.glob("sha256/*.lock")) == []


def test_full_shared_directory_gets_no_partial_file(user: User, shared: tuple[str, list[str]]) -> None:
    with small_filesystem(user.home / "small", "size=64k,mode=777") as small:
        with pytest.raises(OSError, match="No space left"):
            (small / "filler").write_bytes(bytes(1 << 20))
        done = user.penroot("start", shared[0], "cat", "/number", env={"ENROOT_SHARED_BLOBS": str(small)})
        assert done.stdout == "7" and "No space left" in done.stderr
        assert list((small / "tmp").iterdir()) == [] and list((small / "sha256").iterdir()) == []


def test_image_of_more_layers_than_overlayfs_stacks(user: User) -> None:
    image = images.busybox()
    for number in range(600):
        more = [entry(f"f{number % 300}", b"%d\n" % number), entry(f"d{number % 7}/e{number}", mode=0o4755)]
        more += [entry(f".wh.f{number - 301}")] if number > 300 and number % 50 == 1 else []
        image.layers.append(images.Layer(images.tar(more), "none"))
    blobs = [image.config(), image.manifest(), *(layer.blob for layer in image.layers)]
    images.write_layout(user.home / "many", blobs, images.index([(image, {"os": "linux", "architecture": "amd64"})]))
    user.own(user.home / "many")
    script = "cat f2 f299; set -- f*; echo $#; set -- d3/*; echo $#; ls f50 || ls f250 || ls f51"
    words = user.start(f"oci:{user.home}/many", "sh", "-c", script).split()
    assert words == ["302", "599", "294", "86", "f51"]
    before = {path.name for path in (user.home / "cache/layers").iterdir()}
    assert len(before) == 602
    user.penroot("cache", "verify")
    user.penroot("create", "--name", "many", f"oci:{user.home}/many")
    user.penroot("cache", "prune")
    assert len(list((user.home / "cache/layers").iterdir())) == 200  # the merged layers are stored once
    assert user.start("--rw", "many", "sh", "-c", "echo 1 >f2; cat f2 f3").split() == ["1", "303"]
