"""A registry, another user or a record on disk presents images as signed that do not meet the site's policy."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import images
from tests.attack.conftest import BOB
from tests.fakeregistry import Request, faulty
from tests.images import OCI, Image, digest, entry
from tests.kernel.conftest import PREFIX, User, require
from tests.kernel.registry import Server
from tests.kernel.test_signatures import ACCEPT, REJECT, SIGNER, signed_by, write
from tests.signing import ANNOTATION, PAYLOAD, Signer, payload, push, sign

EVIL = (entry("number", b"evil"), entry("bin/echo-evil", b"x"))


@pytest.fixture
def key(user: User) -> Path:
    path = SIGNER.write(user.home / "etc/keys/cosign.pub")
    write(user, signed_by(path))
    return path


def put(registry: Server, name: str, number: bytes, *, signed: bool = True) -> Image:
    image = images.busybox(entry("number", number), kinds=OCI)
    registry.pusher.image(f"test/{name}", "1", image)
    if signed:
        sign(registry.pusher, f"test/{name}", image.digest(), SIGNER, f"{registry.host}/test/{name}")
    return image


def refusal(user: User, target: str) -> str:
    """Run a start that the policy must refuse before a program of the image runs. Return the error."""
    done = user.penroot("start", target, "cat", "/number", status=1)
    assert done.stdout == "" and done.stderr.startswith("[ERROR] "), done.stderr
    assert len(done.stderr.splitlines()) == 2, done.stderr
    return done.stderr


@pytest.mark.parity("a signature for another tag")
@pytest.mark.security("S1")
@pytest.mark.usefixtures("key")
def test_a_signature_that_is_stripped(user: User, registry: Server) -> None:
    """A registry has lost a signature, or withholds it. From then on, the image is refused unless it is stored."""
    good = put(registry, "stripped", b"1")
    assert user.start(f"docker://{registry.host}/test/stripped:1", "cat", "/number") == "1"
    push(registry.pusher, "test/stripped", good.digest(), [])
    assert user.start(f"docker://{registry.host}/test/stripped:1", "cat", "/number") == "1"
    user.run("rm", "-rf", str(user.home / "cache"))
    assert "it has no signature" in refusal(user, f"docker://{registry.host}/test/stripped:1")
    assert not list((user.home / "cache/layers").iterdir())


@pytest.mark.parity("a signature for another tag")
@pytest.mark.security("S1")
@pytest.mark.usefixtures("key")
def test_the_signature_of_another_image(user: User, registry: Server) -> None:
    """The signature of another image of the repository has the tag of the evil image's signature."""
    good, evil = put(registry, "swapped", b"1"), put(registry, "swapped", b"evil", signed=False)
    data = payload(f"{registry.host}/test/swapped", good.digest())
    push(registry.pusher, "test/swapped", evil.digest(), [(data, SIGNER.sign(data))])
    assert f"its signature is for {good.digest()}" in refusal(user, f"docker://{registry.host}/test/swapped:1")
    changed = payload(f"{registry.host}/test/swapped", evil.digest())
    push(registry.pusher, "test/swapped", evil.digest(), [(changed, SIGNER.sign(data))])
    assert "none of 1 signature is by" in refusal(user, f"docker://{registry.host}/test/swapped:1")


@pytest.mark.parity("a signature for another tag")
@pytest.mark.security("S1")
@pytest.mark.usefixtures("key")
def test_an_image_that_was_signed_for_another_repository(user: User, registry: Server) -> None:
    """An old vulnerable image, for example, is pushed with its valid signature under another name."""
    old = put(registry, "old", b"1")
    registry.pusher.image("test/new", "1", old)
    data = payload(f"{registry.host}/test/old", old.digest())
    push(registry.pusher, "test/new", old.digest(), [(data, SIGNER.sign(data))])
    stderr = refusal(user, f"docker://{registry.host}/test/new:1")
    assert f"its signature is for {registry.host}/test/old, not for {registry.host}/test/new" in stderr
    # An image that is stored for one repository is refused for another.
    assert user.start(f"docker://{registry.host}/test/old:1", "cat", "/number") == "1"
    assert "its signature is for" in refusal(user, f"docker://{registry.host}/test/new@{old.digest()}")


@pytest.mark.parity("the verified image is used")
@pytest.mark.security("S1")
@pytest.mark.usefixtures("key")
def test_a_tag_that_moves_between_check_and_use(user: User, registry: Server) -> None:
    """The verified image is unpacked, even if the tag has moved meanwhile."""
    good, evil = put(registry, "moved", b"1"), put(registry, "moved", b"evil", signed=False)
    data = payload(f"{registry.host}/test/moved", good.digest())
    push(registry.pusher, "test/moved", good.digest(), [(data, SIGNER.sign(data))])
    registry.pusher.image("test/moved", "1", good)
    with faulty(registry.host) as front:
        identity = {"type": "exactRepository", "dockerRepository": f"{registry.host}/test/moved"}
        write(user, signed_by(user.home / "etc/keys/cosign.pub", identity=identity))
        moved = False

        def move(path: str) -> None:
            nonlocal moved
            if path.endswith(".sig") and not moved:
                moved = True
                registry.pusher.image("test/moved", "1", evil)

        seen = front.seen
        front.seen = Watched(seen, move)
        assert user.start(f"docker://{front.host}/test/moved:1", "cat", "/number") == "1"
        assert moved
        assert "it has no signature" in refusal(user, f"docker://{front.host}/test/moved:1")


class Watched(list):  # type: ignore[type-arg]
    """A request list that calls a function for each request, before the answer."""

    def __init__(self, seen: list[Request], act: object) -> None:
        super().__init__(seen)
        self._act = act

    def append(self, request: Request) -> None:
        super().append(request)
        self._act(request.path)  # type: ignore[operator]


@pytest.mark.security("S2")
@pytest.mark.usefixtures("key")
def test_records_of_the_store_prove_nothing_by_themselves(user: User, registry: Server) -> None:
    """Signatures beside a stored image are verified like those from a registry, whoever wrote them."""
    good, evil = put(registry, "kept", b"1"), put(registry, "unkept", b"evil", signed=False)
    policy = user.home / "etc/policy.json"
    written = policy.read_text()
    policy.unlink()
    user.penroot("create", "--name", "evil", f"docker://{registry.host}/test/unkept:1")
    policy.write_text(written)
    assert user.start(f"docker://{registry.host}/test/kept:1", "cat", "/number") == "1"
    stored = user.home / "cache/images"
    (signature,) = (stored / good.digest()[7:] / "signatures").iterdir()
    record = json.loads(signature.read_text())
    forged = json.dumps({"manifests": [{"digest": good.digest()}, {"digest": evil.digest()}]}).encode()
    directory = stored / evil.digest()[7:] / "signatures"
    directory.mkdir()
    for index in (b"", good.manifest(), forged):
        record["index"] = base64.b64encode(index).decode()
        for name in (signature.name, digest(f"{registry.host}/test/unkept".encode())[7:]):
            (directory / name).write_text(json.dumps(record))
        user.own(user.home / "cache")
        assert "it has no signature" in refusal(user, "evil")
    # The container's record claims that the container is made of the signed image.
    mark = user.data / "evil/.penroot"
    mark.write_text(mark.read_text().replace("test/unkept", "test/kept"))
    assert "it has no signature" in refusal(user, "evil")
    # The store's record of the signed name claims that its last digest was the evil image's.
    for ref in (user.home / "cache/refs").iterdir():
        ref.write_text(ref.read_text().replace(good.digest(), evil.digest()))
    assert user.start(f"docker://{registry.host}/test/kept:1", "cat", "/number") == "1"
    assert "no signature" in refusal(user, f"docker://{registry.host}/test/kept@{evil.digest()}")


@pytest.mark.security("S5")
@pytest.mark.parametrize(
    "spelling",
    ["127.0.0.1:0{port}", "[::ffff:127.0.0.1]:{port}", "127.0.0.1.:{port}", "127.1:{port}", "2130706433:{port}"],
)
def test_registry_spelled_in_another_way(user: User, registry: Server, spelling: str) -> None:
    """A rule for a registry applies to each spelling of the registry."""
    put(registry, "spelled", b"evil", signed=False)
    other = spelling.format(port=registry.host.rpartition(":")[2])
    write(user, ACCEPT, docker={registry.host: REJECT})
    assert "is rejected by" in refusal(user, f"docker://{other}#test/spelled:1")
    write(user, ACCEPT, docker={other: REJECT})
    assert "is rejected by" in refusal(user, f"docker://{registry.host}#test/spelled:1")


@pytest.mark.security("S5")
@pytest.mark.parametrize("forged", ["squashfs", "uri"])
def test_record_names_another_image_than_the_admitted(
    user: User, registry: Server, key: Path, image: Path, forged: str
) -> None:
    """The policy admits the image or path in a container's record, but the start would use another image."""
    put(registry, "mixed", b"1")
    put(registry, "mixed-evil", b"evil", signed=False)
    policy = user.home / "etc/policy.json"
    policy.unlink()
    for name in ("mixed", "mixed-evil"):
        user.penroot("create", "--name", name, f"docker://{registry.host}/test/{name}:1")
    write(user, signed_by(key), squashfs={"/sw": ACCEPT})
    assert user.start("mixed", "cat", "/number") == "1"
    if forged == "squashfs":
        mark = user.data / "mixed/.penroot"
        mark.write_text(mark.read_text() + f"squashfs {image}\n")
        assert "lacks the signature that is required" in refusal(user, "mixed")
        write(user, signed_by(key), squashfs={str(image): ACCEPT})
        user.start("mixed", "true")
    else:
        mark = user.data / "mixed-evil/.penroot"
        for uri in ("/sw/good.sqsh", "bcast:good.sqsh"):
            write(user, REJECT, squashfs={"": ACCEPT})
            lines = [f"uri {uri}" if line.startswith("uri ") else line for line in mark.read_text().splitlines()]
            mark.write_text("\n".join(lines) + "\n")
            assert "create the container again" in refusal(user, "mixed-evil")


@pytest.mark.security("S2")
def test_another_users_store_and_blobs(user: User, bob: User, registry: Server, key: Path) -> None:
    """Bob has an unsigned image in his store and in the shared blobs. The victim's starts refuse both."""
    del key
    put(registry, "bobs", b"evil", signed=False)
    image = f"docker://{registry.host}/test/bobs:1"
    assert bob.start(image, "cat", "/number") == "evil"
    cache = bob.home / "cache"
    subprocess.run(["chmod", "-R", "a+rX", cache], check=True)
    done = user.penroot("start", image, "true", env={"ENROOT_CACHE_PATH": str(cache)}, status=1)
    assert f"belongs to uid {BOB}" in done.stderr
    shared = user.home / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (bob.home / "bobs").mkdir()
    bob.own(bob.home / "bobs")
    env = {"ENROOT_SHARED_BLOBS": str(shared), "ENROOT_CACHE_PATH": str(bob.home / "bobs")}
    bob.start(image, "true", env=env)
    assert list((shared / "sha256").iterdir())
    done = user.penroot("start", image, "true", env={"ENROOT_SHARED_BLOBS": str(shared)}, status=1)
    assert "it has no signature" in done.stderr


@pytest.mark.security("S2")
def test_a_store_that_root_fills_for_all(user: User, scratch: Path, registry: Server) -> None:
    """Users verify the images that root has stored, and cannot change them; no start asks the registry."""
    require(shutil.which("squashfuse") or shutil.which("squashfuse_ll"), "squashfuse is not installed")
    good = put(registry, "roots", b"1")
    evil = put(registry, "rootless", b"evil", signed=False)
    etc = scratch / "etc"
    identity = {"type": "exactRepository", "dockerRepository": f"{registry.host}/test/roots"}
    rule = signed_by(SIGNER.write(etc / "cosign.pub"), identity=identity)
    theirs = {"ENROOT_CACHE_PATH": str(scratch / "store"), "ENROOT_SYSCONF_PATH": str(etc)}
    env = {**user.environ, **theirs, "HOME": "/root", "TMPDIR": str(scratch), "ENROOT_STORE_FORM": "squashfs"}
    env |= {f"ENROOT_{name}_PATH": f"{scratch}/{name}" for name in ("DATA", "RUNTIME")}
    with faulty(registry.host) as front:
        for name, requirement in (("rootless", ACCEPT), ("roots", rule)):
            (etc / "policy.json").write_text(json.dumps({"default": [requirement]}))
            words = [f"{PREFIX}/bin/penroot", "create", "--name", name, f"docker://{front.host}/test/{name}:1"]
            subprocess.run(words, env=env, check=True)
        subprocess.run(["chmod", "-R", "a+rX", scratch / "store"], check=True)
        front.seen.clear()
        pinned = f"docker://{front.host}/test/roots@{good.digest()}"
        assert user.start(pinned, "cat", "/number", env=theirs) == "1"
        assert front.seen == []
        pinned = f"docker://{front.host}/test/rootless@{evil.digest()}"
        assert "it has no signature" in user.penroot("start", pinned, "true", env=theirs, status=1).stderr


@pytest.mark.security("S3")
def test_no_variable_takes_the_policy_of_the_site_away(user: User, registry: Server) -> None:
    """Run in a mount namespace in which /etc/enroot has a policy, as on a node."""
    put(registry, "unsigned", b"evil", signed=False)
    lower = user.home / "lower/enroot"
    lower.mkdir(parents=True)
    (lower / "policy.json").write_text(json.dumps({"default": [REJECT]}))
    write(user, ACCEPT)
    own = user.home / "own"
    own.mkdir()
    (own / "policy.json").write_text(json.dumps({"default": [ACCEPT]}))
    user.own(own)
    mount = f'mount -t overlay -o lowerdir={lower.parent}:/etc none /etc && exec "$@"'
    namespace = ("unshare", "--mount", "sh", "-c", mount, "sh")
    image = f"docker://{registry.host}/test/unsigned:1"
    for env in (
        {},
        {"ENROOT_SYSCONF_PATH": str(own)},
        {"ENROOT_SYSCONF_PATH": "/none", "ENROOT_CONFIG_PATH": str(own)},
        {"ENROOT_SYSCONF_PATH": "", "HOME": "/none", "XDG_CONFIG_HOME": str(own)},
    ):
        done = user.penroot("start", image, "cat", "/number", status=1, env=env, prefix=namespace)
        assert "is rejected by /etc/enroot/policy.json: default[0] (default)" in done.stderr and done.stdout == ""
    lower.chmod(0o700)  # the user cannot see whether there is a policy
    for env in ({}, {"ENROOT_SYSCONF_PATH": str(own)}):
        done = user.penroot("start", image, "cat", "/number", status=1, env=env, prefix=namespace)
        assert "/etc/enroot/" in done.stderr and "Permission denied" in done.stderr and done.stdout == ""


@pytest.mark.parity("typos in a policy")
@pytest.mark.security("S3")
@pytest.mark.parametrize("what", ["key", "directory of keys", "policy", "directory", "owner"])
def test_policy_that_others_can_write_is_refused(user: User, registry: Server, key: Path, what: str) -> None:
    put(registry, "written", b"1")
    path = user.home / "etc/policy.json"
    spoilt = {"key": key, "directory of keys": key.parent, "policy": path, "directory": path.parent, "owner": key}[what]
    if what == "owner":
        os.chown(key, BOB, BOB)
    else:
        spoilt.chmod(0o777 if spoilt.is_dir() else 0o666)
    stderr = refusal(user, f"docker://{registry.host}/test/written:1")
    assert str(spoilt) in stderr and ("written by others" in stderr or f"uid {BOB}" in stderr)


@pytest.mark.parametrize("links", [1, 2])
def test_a_link_through_a_place_that_others_can_write(user: User, registry: Server, key: Path, links: int) -> None:
    """Others could redirect the link to any file of root's: to another key, or to a revoked one."""
    put(registry, "linked", b"1")
    place = user.home / "etc/elsewhere"
    place.mkdir()
    beyond = user.home / "etc/beyond"
    beyond.mkdir()
    real = beyond / "key" if links == 2 else place / "key"
    os.rename(key, real)
    if links == 2:
        (place / "key").symlink_to(real)
    key.symlink_to("../elsewhere/key")
    assert user.start(f"docker://{registry.host}/test/linked:1", "cat", "/number") == "1"
    place.chmod(0o777)
    stderr = refusal(user, f"docker://{registry.host}/test/linked:1")
    assert str(place) in os.path.normpath(stderr.split()[1]) and "written by others" in stderr


@pytest.mark.security("S3")
def test_policy_of_root_accepts_no_key_of_the_user(user: User, registry: Server, key: Path) -> None:
    """A policy of root's names a key file that the user can replace."""
    put(registry, "replaced", b"1")
    user.own(key)
    assert f"belongs to uid {user.uid}, not to root" in refusal(user, f"docker://{registry.host}/test/replaced:1")


@pytest.mark.security("S4")
@pytest.mark.usefixtures("key")
def test_signatures_without_end(user: User, registry: Server) -> None:
    """A registry sends hundreds of signatures, or one of a terabyte: a start checks some, and does not hang."""
    image = put(registry, "flooded", b"1", signed=False)
    other = Signer("ed25519")
    many = []
    for number in range(300):
        data = payload(f"{registry.host}/test/flooded", image.digest(), number=number)
        many.append((data, other.sign(data)))
    push(registry.pusher, "test/flooded", image.digest(), many)
    with faulty(registry.host) as front:
        stderr = user.penroot("start", f"docker://{front.host}/test/flooded:1", "true", status=1).stderr
        assert "[WARN] ignoring all but the last 50 of 300 signatures" in stderr
        assert "none of 50 signatures is by" in stderr
        assert front.asked("/blobs/") == 50
    huge = {
        "mediaType": PAYLOAD,
        "size": 1 << 40,
        "digest": digest(b"{}"),
        "annotations": {ANNOTATION: base64.b64encode(b"x").decode()},
    }
    config = {"mediaType": OCI["config"], "size": 2, "digest": digest(b"{}")}
    manifest = {"schemaVersion": 2, "mediaType": OCI["manifest"], "config": config, "layers": [huge]}
    tag = image.digest().replace(":", "-") + ".sig"
    registry.pusher.manifest("test/flooded", tag, json.dumps(manifest).encode())
    assert "it has no signature" in refusal(user, f"docker://{registry.host}/test/flooded:1")
