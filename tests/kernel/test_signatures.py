"""An ordinary user starts images of a real registry under policies that require signatures."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import images
from tests.fakeregistry import faulty
from tests.images import OCI, entry
from tests.installation import LIBRARY
from tests.kernel.conftest import PREFIX, User, require
from tests.kernel.registry import Server
from tests.signing import (
    ARTIFACT,
    EMAIL,
    OIDC,
    Authority,
    Signer,
    bundle,
    encrypted,
    hashedrekord,
    logged,
    payload,
    push,
    push_bundles,
    sign,
    statement,
)

SIGNER, OTHER = Signer(), Signer()
REPOSITORY = {"type": "matchRepository"}


@pytest.fixture(scope="module")
def registry(registry: Server) -> Server:
    for name, number in (("good", b"1"), ("plain", b"2"), ("other", b"3")):
        image = images.busybox(entry("number", number), kinds=OCI)
        registry.pusher.image(f"test/{name}", "1", image)
        if name != "plain":
            signer = SIGNER if name == "good" else OTHER
            sign(registry.pusher, f"test/{name}", image.digest(), signer, f"{registry.host}/test/{name}")
    return registry


def signed_by(*keys: Path, identity: dict[str, str] | None = REPOSITORY) -> dict[str, Any]:
    named = {"keyPath": str(keys[0])} if len(keys) == 1 else {"keyPaths": [str(key) for key in keys]}
    return {"type": "sigstoreSigned", **named, **({"signedIdentity": identity} if identity else {})}


def write(user: User, default: object, **transports: object) -> Path:
    """Write the system's policy.json. ``default`` and the value of each scope are one requirement or a list."""

    def as_list(requirements: object) -> object:
        return requirements if isinstance(requirements, list) else [requirements]

    policy = {
        "default": as_list(default),
        "transports": {
            name.replace("_", "-"): {scope: as_list(requirements) for scope, requirements in scopes.items()}
            for name, scopes in transports.items()
            if isinstance(scopes, dict)
        },
    }
    path = user.home / "etc/policy.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(policy, indent=2))
    return path


ACCEPT, REJECT = {"type": "insecureAcceptAnything"}, {"type": "reject"}


@pytest.fixture
def key(user: User) -> Path:
    return SIGNER.write(user.home / "etc/keys/cosign.pub")


@pytest.mark.parity("signatures beside the image", "refused before anything is unpacked")
def test_a_signed_image_starts_and_others_do_not(user: User, registry: Server, key: Path) -> None:
    path = write(user, signed_by(key))
    assert user.start(f"docker://{registry.host}/test/good:1", "cat", "/number") == "1"
    for name, why in (("plain", "it has no signature"), ("other", "none of 1 signature is by")):
        stderr = user.penroot("start", f"docker://{registry.host}/test/{name}:1", "true", status=1).stderr
        assert stderr.startswith(f"[ERROR] {registry.host}/test/{name}:1 ("), stderr
        assert f"is not signed as {path}: default[0] (default) requires: {why}" in stderr and "\n[HINT] " in stderr
        assert len(stderr.splitlines()) == 2
    assert len(list((user.home / "cache/layers").iterdir())) == 2  # nothing else was unpacked


@pytest.mark.parity("refused before anything is unpacked")
@pytest.mark.parametrize("verb", ["create", "load", "import"])
def test_no_verb_stores_an_unsigned_image(user: User, registry: Server, key: Path, verb: str) -> None:
    write(user, signed_by(key))
    stderr = user.penroot(verb, f"docker://{registry.host}/test/plain:1", status=1).stderr
    assert "it has no signature" in stderr
    assert not list((user.home / "cache/images").iterdir()) and not list(user.home.glob("*.sqsh"))
    assert not user.data.exists() or not [path for path in user.data.iterdir() if not path.name.startswith(".")]


@pytest.mark.parity("an image is verified again at each use")
@pytest.mark.security("S2")
def test_image_is_verified_at_each_use_without_its_registry(user: User, registry: Server, key: Path) -> None:
    """A stored image is checked by the current rules and keys, without a request to the registry."""
    write(user, signed_by(key))
    digest = user.penroot("digest", f"docker://{registry.host}/test/good:1").stdout.strip()
    with faulty(registry.host) as front:
        pinned = f"docker://{front.host}/test/good@{digest}"
        mirror = f"{front.host} mirror={registry.host}\n"
        (user.home / "etc/registries.conf").write_text(mirror)
        identity = {"type": "exactRepository", "dockerRepository": f"{registry.host}/test/good"}
        path = write(user, signed_by(key, identity=identity))
        assert user.start(pinned, "cat", "/number") == "1"
        user.penroot("create", "--name", "box", pinned)
        (user.home / "etc/registries.conf").unlink()
        front.seen.clear()
        assert user.start(pinned, "cat", "/number") == "1"
        assert user.start("box", "cat", "/number") == "1"
        assert front.seen == []
        write(user, signed_by(OTHER.write(user.home / "etc/keys/other.pub"), identity=identity))
        for target in (pinned, "box"):
            stderr = user.penroot("start", target, "true", status=1).stderr
            assert f"is not signed as {path}: default[0] (default) requires: none of 1 signature is by" in stderr


@pytest.mark.parity("an image is verified again at each use")
def test_image_stored_before_the_policy_is_verified(user: User, registry: Server, key: Path) -> None:
    for name in ("good", "plain"):
        user.penroot("create", "--name", name, f"docker://{registry.host}/test/{name}:1")
    write(user, signed_by(key))
    assert user.start("good", "cat", "/number") == "1"
    assert user.start(f"docker://{registry.host}/test/good:1", "cat", "/number") == "1"
    for target in ("plain", f"docker://{registry.host}/test/plain:1"):
        assert "it has no signature" in user.penroot("start", target, "true", status=1).stderr
    assert ": none damaged" in user.penroot("cache", "verify").stderr
    user.penroot("remove", "-f", "good", "plain")
    user.penroot("cache", "prune")
    assert not list((user.home / "cache/images").iterdir())


@pytest.mark.parity("a signature for another tag")
def test_a_signature_for_another_tag_repository_or_digest(user: User, registry: Server, key: Path) -> None:
    """The right key has signed another tag, repository or digest."""
    image = images.busybox(entry("number", b"7"), kinds=OCI)
    repository, digest = f"{registry.host}/test/tagged", image.digest()
    registry.pusher.image("test/tagged", "1", image)
    registry.pusher.image("test/tagged", "2", image)
    uri = f"docker://{repository}"
    exact = write(user, signed_by(key, identity=None))
    for reference, signed_digest, tag, why in (
        (repository, digest, "1", f"its signature is for {repository}, not for {repository}:1"),
        (f"{repository}:1", digest, "1", ""),
        (f"{repository}:1", digest, "2", f"its signature is for {repository}:1, not for {repository}:2"),
        (f"{registry.host}/test/good:1", digest, "1", f"its signature is for {registry.host}/test/good:1, not for "),
        (f"{repository}:1", "sha256:" + 64 * "0", "1", f"its signature is for sha256:{64 * '0'}"),
    ):
        data = payload(reference, signed_digest)
        push(registry.pusher, "test/tagged", digest, [(data, SIGNER.sign(data))])
        user.run("rm", "-rf", str(user.home / "cache"))
        done = user.penroot("start", f"{uri}:{tag}", "cat", "/number", status=1 if why else 0)
        assert done.stdout == ("" if why else "7")
        assert not why or f"{exact}: default[0] (default) requires: {why}" in done.stderr
    write(user, signed_by(key))  # the identity matchRepository accepts each tag of the repository
    sign(registry.pusher, "test/tagged", digest, SIGNER, f"{repository}:1")
    for target in (f"{uri}:2", f"{uri}@{digest}"):
        assert user.start(target, "cat", "/number") == "7"


@pytest.mark.parity("signatures of an index")
def test_signature_of_an_index_covers_its_images(user: User, registry: Server, key: Path) -> None:
    write(user, signed_by(key))
    mine, other = (images.busybox(entry("number", number), kinds=OCI) for number in (b"8", b"9"))
    for image in (mine, other):
        registry.pusher.image("test/index", "", image)
    index = images.index([(mine, {"os": "linux", "architecture": "amd64"})])
    index_digest = registry.pusher.manifest("test/index", "1", index)
    sign(registry.pusher, "test/index", index_digest, SIGNER, f"{registry.host}/test/index")
    uri = f"docker://{registry.host}/test/index"
    assert user.start(f"{uri}:1", "cat", "/number") == "8"
    assert user.start(f"{uri}@{index_digest}", "cat", "/number") == "8"
    assert user.start(f"{uri}:1", "cat", "/number") == "8"  # from the store
    # The digest names the image and no index, so penroot does not look for a signature of the index.
    user.run("rm", "-rf", str(user.home / "cache"))
    assert "no signature" in user.penroot("start", f"{uri}@{mine.digest()}", "true", status=1).stderr
    # The second index, with another image, has no signature.
    registry.pusher.manifest("test/index", "2", images.index([(other, {"os": "linux", "architecture": "amd64"})]))
    assert "no signature" in user.penroot("start", f"{uri}:2", "true", status=1).stderr


@pytest.mark.parity("signatures beside the image")
def test_signatures_among_the_referrers(user: User, registry: Server, key: Path) -> None:
    """Older registries have the list under a tag: "Referrers Tag Schema" in the OCI distribution specification."""
    write(user, signed_by(key))
    image = images.busybox(entry("number", b"5"), kinds=OCI)
    digest = registry.pusher.image("test/referred", "1", image)
    data = payload(f"{registry.host}/test/referred", digest)
    signature = push(registry.pusher, "test/referred", digest, [(data, SIGNER.sign(data))], tag="x", subject=digest)
    artifact = {"mediaType": OCI["manifest"], "artifactType": ARTIFACT, **signature}
    listing = {"schemaVersion": 2, "mediaType": OCI["index"], "manifests": [artifact]}
    registry.pusher.manifest("test/referred", digest.replace(":", "-"), json.dumps(listing).encode())
    assert user.start(f"docker://{registry.host}/test/referred:1", "cat", "/number") == "5"


@pytest.mark.parity("sigstore bundles of cosign 3 with a key")
def test_bundles_of_cosign_3(user: User, registry: Server, key: Path) -> None:
    image = images.busybox(entry("number", b"6"), kinds=OCI)
    digest = registry.pusher.image("test/bundled", "1", image)
    attested = bundle(SIGNER, statement(digest, predicateType="https://slsa.dev/provenance/v1"))
    push_bundles(registry.pusher, "test/bundled", digest, [attested])
    uri = f"docker://{registry.host}/test/bundled:1"
    digest_only = {"type": "digestOnly"}
    write(user, signed_by(key, identity=digest_only))
    assert "not an image signature" in user.penroot("start", uri, "true", status=1).stderr
    push_bundles(registry.pusher, "test/bundled", digest, [attested, bundle(OTHER, statement(digest))])
    assert "not an image signature" in user.penroot("start", uri, "true", status=1).stderr
    good = bundle(SIGNER, statement(digest))
    push_bundles(registry.pusher, "test/bundled", digest, [attested, bundle(OTHER, statement(digest)), good])
    write(user, signed_by(key))
    stderr = user.penroot("start", uri, "true", status=1).stderr
    assert "the signature names no image, as with cosign 3: use signedIdentity digestOnly" in stderr
    write(user, signed_by(key, identity=digest_only))
    assert user.start(uri, "cat", "/number") == "6"
    shown = json.loads(user.penroot("inspect", "--signatures", uri).stdout)
    mine = [signature for signature in shown["signatures"] if signature["key"]]
    assert {"for": None, "digest": digest, "key": str(key)} in mine and shown["admitted"]
    # The signature is stored, so the start works although the registry no longer has it.
    registry.pusher.manifest("test/bundled", digest.replace(":", "-"), json.dumps(EMPTY).encode())
    assert user.start(uri, "cat", "/number") == "6"


EMPTY = {"schemaVersion": 2, "mediaType": OCI["index"], "manifests": []}


def test_rules_of_scopes_take_precedence_over_the_default(user: User, registry: Server, key: Path) -> None:
    host = registry.host
    path = write(user, REJECT, docker={f"{host}/test": signed_by(key), f"{host}/test/plain": ACCEPT})
    assert user.start(f"docker://{host}/test/good:1", "cat", "/number") == "1"
    assert user.start(f"docker://{host}/test/plain:1", "cat", "/number") == "2"
    assert "not signed" in user.penroot("start", f"docker://{host}/test/other:1", "true", status=1).stderr
    write(user, ACCEPT, docker={f"{host}/test/good": [signed_by(key), REJECT]})
    stderr = user.penroot("start", f"docker://{host}/test/good:1", "true", status=1).stderr
    rule = f'transports.docker["{host}/test/good"][1]'
    assert f"is rejected by {path}: {rule} (docker: {host}/test/good)" in stderr
    assert user.start(f"docker://{host}/test/other:1", "cat", "/number") == "3"


@pytest.mark.parity("squashfs files, bcast:")
def test_files_and_directories_have_no_signature(user: User, registry: Server, key: Path, image: Path) -> None:
    """Rules of the transport squashfs match paths of squashfs files. Rules of dir match paths of plain containers."""
    user.penroot("create", "--name", "plain", str(image))
    user.penroot("import", "-o", "made.sqsh", f"docker://{registry.host}/test/good:1")
    write(user, signed_by(key))
    for target in ("./box.sqsh", "./made.sqsh", "plain", "box"):
        stderr = user.penroot("start", target, "true", status=1).stderr
        assert "lacks the signature that is required by" in stderr and "[HINT] start a signed registry image" in stderr
    assert "lacks the signature that is required" in user.penroot("create", "--name", "x", "box.sqsh", status=1).stderr
    (user.home / "link.sqsh").symlink_to("box.sqsh")
    write(user, REJECT, squashfs={str(image): ACCEPT}, dir={str(user.data): ACCEPT})
    for target in ("./box.sqsh", "./link.sqsh", "plain", "box"):
        user.start(target, "true")
    stderr = user.penroot("start", "./made.sqsh", "true", status=1).stderr
    assert stderr.startswith(f"[ERROR] {user.home}/made.sqsh is rejected by ")
    write(user, ACCEPT, squashfs={"": REJECT}, dir={str(user.data / "box"): REJECT})
    user.start("plain", "true")
    for target in ("box", "./box.sqsh"):
        assert "is rejected by" in user.penroot("start", target, "true", status=1).stderr
    assert "is rejected" in user.penroot("start", "./box.sqsh", "true", status=1, env={"ENROOT_UNPACK": "yes"}).stderr


@pytest.mark.parity("squashfs files, bcast:")
def test_layouts_and_archives_by_their_transport(user: User, registry: Server, key: Path) -> None:
    require(shutil.which("skopeo"), "skopeo is not installed")
    source = f"docker://{registry.host}/test/good:1"
    user.run("skopeo", "--insecure-policy", "copy", "-q", "--src-tls-verify=false", source, "oci:layout:one")
    write(user, ACCEPT, oci={"": REJECT})
    assert "is rejected by" in user.penroot("start", "oci:layout:one", "true", status=1).stderr
    write(user, signed_by(key))
    assert "lacks the signature" in user.penroot("create", "--name", "x", "oci:layout:one", status=1).stderr
    write(user, REJECT, oci={f"{user.home}/layout:one": ACCEPT})
    user.penroot("create", "--name", "x", "oci:layout:one")
    assert user.start("x", "cat", "/number") == "1"
    write(user, ACCEPT, oci={str(user.home): REJECT})
    assert "is rejected by" in user.penroot("start", "x", "true", status=1).stderr


@pytest.mark.parity("inspect --signatures")
def test_inspect_shows_who_has_signed(user: User, registry: Server, key: Path) -> None:
    path = write(user, signed_by(key))

    def shown(name: str) -> Any:
        return json.loads(user.penroot("inspect", "--signatures", f"docker://{registry.host}/test/{name}:1").stdout)

    good, other, plain = shown("good"), shown("other"), shown("plain")
    signature = {"for": f"{registry.host}/test/good", "digest": good["digest"], "key": str(key)}
    rule = {"where": f"{path}: default[0]", "scope": "default", "type": "sigstoreSigned"}
    assert good["admitted"] and good["signatures"] == [signature] and good["rules"] == [{**rule, "satisfied": True}]
    assert not other["admitted"] and [each["key"] for each in other["signatures"]] == [None]
    assert plain["signatures"] == [] and plain["rules"] == [{**rule, "satisfied": False, "why": "it has no signature"}]
    path.unlink()
    without = shown("good")
    assert without["admitted"] and without["rules"] == [] and without["signatures"] == [{**signature, "key": None}]
    assert "it is not a registry image" in user.penroot("inspect", "--signatures", "oci:x", status=1).stderr


@pytest.mark.usefixtures("rootfs")
def test_info_and_explain_name_the_policy(user: User) -> None:
    path = write(user, ACCEPT)
    assert str(path) in user.penroot("info").stdout
    assert f"policy   {path} accepts the image\n" in user.start("--explain", "box", "true")


def test_doctor_reads_the_policy_and_its_keys(user: User, key: Path) -> None:
    path = write(user, signed_by(key), docker={"reg.site": [signed_by(key), REJECT]})
    assert f"ok   {path} controls image admission with 2 keys" in user.run("sh", "-c", "penroot doctor; :").stdout
    key.write_text("none")
    stdout = user.penroot("doctor", status=1).stdout
    assert (
        f"bad  images of this rule are rejected: {path}: default[0].keyPath: {key} is not a public key\n     fix: "
        in stdout
    )
    path.write_text("{")
    assert f"bad  every image is rejected: {path}" in user.penroot("doctor", status=1).stdout


@pytest.mark.parity("a user's own policy")
def test_policies_of_user_and_site_apply_together(user: User, registry: Server, key: Path) -> None:
    write(user, signed_by(key), docker={f"{registry.host}/test/plain": ACCEPT})
    user_policy = user.home / ".config/enroot/policy.json"
    user_policy.parent.mkdir(parents=True)
    user_policy.write_text(json.dumps({"default": [REJECT], "transports": {"docker": {f"{registry.host}": [ACCEPT]}}}))
    user.own(user.home / ".config")
    user.start(f"docker://{registry.host}/test/good:1", "true")
    user_policy.write_text(json.dumps({"default": [REJECT]}))
    stderr = user.penroot("start", f"docker://{registry.host}/test/plain:1", "true", status=1).stderr
    assert f"is rejected by {user_policy}: default[0] (default)" in stderr


@pytest.mark.parity("mirrors, and renamed registries")
def test_a_mirror_serves_what_is_signed_for_the_registry(user: User, registry: Server, key: Path) -> None:
    """The mirror also serves the signatures. A signature must name the image as the user does, not as the mirror."""
    write(user, signed_by(key, identity={"type": "matchRepository"}))
    image = images.busybox(entry("number", b"6"), kinds=OCI)
    digest = registry.pusher.image("hub/their/box", "1", image)
    sign(registry.pusher, "hub/their/box", digest, SIGNER, "their.example/their/box")
    (user.home / "etc/registries.conf").write_text(f"their.example mirror={registry.host}/hub\n")
    assert user.start("docker://their.example/their/box:1", "cat", "/number") == "6"
    stderr = user.penroot("start", f"docker://{registry.host}/hub/their/box:1", "true", status=1).stderr
    assert "its signature is for their.example/their/box" in stderr
    remapped = {"type": "remapIdentity", "prefix": f"{registry.host}/hub", "signedPrefix": "their.example"}
    sign(registry.pusher, "hub/their/box", digest, SIGNER, "their.example/their/box:1")
    write(user, signed_by(key, identity=remapped))
    assert user.start(f"docker://{registry.host}/hub/their/box:1", "cat", "/number") == "6"


@pytest.mark.parity("registries.d of podman and skopeo")
def test_registries_d_can_switch_attachments_off(user: User, registry: Server, key: Path) -> None:
    """The narrowest scope with use-sigstore-attachments decides. The user's directory has precedence."""
    write(user, signed_by(key))
    uri, directory = f"docker://{registry.host}/test/good:1", ".config/containers/registries.d"

    def sections(default: bool, **scopes: bool) -> str:
        docker = {f"{registry.host}/{name}": {"use-sigstore-attachments": value} for name, value in scopes.items()}
        return json.dumps({"default-docker": {"use-sigstore-attachments": default}, "docker": docker})

    path = user.write(f"{directory}/here.yaml", sections(True, test=False))
    done = user.penroot("start", uri, "true", status=1)
    assert "it has no signature" in done.stderr and f"{path}: use-sigstore-attachments is false" in done.stderr
    user.write(
        f"{directory}/other.yaml", json.dumps({"docker": {f"{registry.host}/test/good": {"lookaside": "file:///x"}}})
    )
    assert "it has no signature" in user.penroot("start", uri, "true", status=1).stderr
    user.write(f"{directory}/here.yaml", sections(False, test=True))
    assert user.start(uri, "cat", "/number") == "1"
    user.run("rm", "-rf", str(user.home / "cache"))
    user.write(f"{directory}/other.yaml", sections(True))
    stderr = user.penroot("start", uri, "true", status=1).stderr
    assert f"{directory}/other.yaml: default-docker is also in {path}" in stderr


class Skopeo:
    """skopeo(1) as an independent program that signs images, and verifies them with the same policies."""

    def __init__(self, user: User, registry: Server) -> None:
        require(shutil.which("skopeo"), "skopeo is not installed")
        self._user = user
        (user.home / "registries.d").mkdir()
        attached = {"docker": {registry.host: {"use-sigstore-attachments": True}}}
        (user.home / "registries.d/here.yaml").write_text(json.dumps(attached))
        (user.home / "passphrase").write_text("secret")
        (user.home / "cosign.key").write_bytes(encrypted(SIGNER, b"secret"))
        self._words = ("--registries.d", str(user.home / "registries.d"))

    def copy_signed(self, source: str, target: str) -> None:
        key = ("--sign-by-sigstore-private-key", str(self._user.home / "cosign.key"))
        key += ("--sign-passphrase-file", str(self._user.home / "passphrase"))
        plain = ("--src-tls-verify=false", "--dest-tls-verify=false")
        words = ("--insecure-policy", *self._words, "copy", "-q", *plain, *key, source, target)
        done = self._user.run("sh", "-c", '"$@" || echo failed', "sh", "skopeo", *words)
        if "sigstore disabled" in done.stderr:
            pytest.skip("skopeo of Debian 12 is built without sigstore: make matrix tests other releases")
        assert not done.stdout, done.stderr

    def knows_fulcio(self, path: Path) -> bool:
        """Return whether this skopeo can read a policy with keyless identities. Versions from 1.10 on can."""
        words = ("--policy", str(path), "copy", "-q", "dir:/none", "dir:/none")
        return "fulcio" not in self._user.run("skopeo", *words, status=None).stderr

    def admits(self, path: Path, source: str) -> bool:
        """Return whether skopeo copies an image under a policy."""
        target = f"dir:{self._user.home}/copy"
        words = ("--policy", str(path), *self._words, "copy", "-q", "--src-tls-verify=false", source, target)
        done = self._user.run("sh", "-c", '"$@" || echo refused', "sh", "skopeo", *words)
        assert not done.stdout or "signature" in done.stderr or "reject" in done.stderr, done.stderr
        return not done.stdout


@pytest.mark.parity("signatures of cosign and skopeo by key")
def test_signatures_of_skopeo_are_accepted(user: User, registry: Server, key: Path) -> None:
    """skopeo's signature names a tag, so even the strictest identity accepts it."""
    peer = Skopeo(user, registry)
    path = write(user, signed_by(key, identity=None))
    here = f"docker://{registry.host}/test/peer"
    peer.copy_signed(f"docker://{registry.host}/test/plain:1", f"{here}:1")
    assert user.start(f"{here}:1", "cat", "/number") == "2"
    shown = json.loads(user.penroot("inspect", "--signatures", f"{here}:1").stdout)
    assert [signature["for"] for signature in shown["signatures"]] == [f"{registry.host}/test/peer:1"] and shown[
        "admitted"
    ]
    assert peer.admits(path, f"{here}:1")


IDENTITIES: list[dict[str, str] | None] = [
    None,
    {"type": "matchExact"},
    {"type": "matchRepository"},
    {"type": "exactReference", "dockerReference": "HOST/test/peers:1"},
    {"type": "exactRepository", "dockerRepository": "HOST/test/good"},
    {"type": "remapIdentity", "prefix": "HOST/test/other", "signedPrefix": "HOST/test/good"},
]


@pytest.mark.parity("/etc/enroot/policy.json, in the format of podman and skopeo")
@pytest.mark.parametrize("identity", IDENTITIES, ids=lambda identity: str(identity and identity["type"]))
def test_skopeo_admits_the_same(user: User, registry: Server, key: Path, identity: dict[str, str] | None) -> None:
    """For each identity, compare images signed with a tag, without a tag, by another key, and not signed."""
    peer = Skopeo(user, registry)
    peer.copy_signed(f"docker://{registry.host}/test/good:1", f"docker://{registry.host}/test/peers:1")
    digest = user.penroot("digest", f"docker://{registry.host}/test/peers:1").stdout.strip()
    registry.pusher.image("test/peers", "2", images.busybox(entry("number", b"1"), kinds=OCI))
    if identity:
        identity = {name: word.replace("HOST", registry.host) for name, word in identity.items()}
    for rule in (signed_by(key, identity=identity), [signed_by(key, identity=identity), REJECT]):
        path = write(user, REJECT, docker={f"{registry.host}/test": rule})
        by_penroot, by_skopeo = {}, {}
        for name in ("good:1", "plain:1", "other:1", "peers:1", "peers:2", f"peers@{digest}"):
            source = f"docker://{registry.host}/test/{name}"
            by_skopeo[name] = peer.admits(path, source)
            status = user.run("sh", "-c", f"{PREFIX}/bin/penroot start {source} true || echo refused").stdout
            by_penroot[name] = not status
        assert by_penroot == by_skopeo


@pytest.mark.parity("/etc/enroot/policy.json, in the format of podman and skopeo")
@pytest.mark.parametrize("scope", ["", "HOST", "HOST/test", "HOST/test/good", "HOST/test/good:1", "HOST/test/good:2"])
def test_skopeo_has_the_same_scopes(user: User, registry: Server, scope: str) -> None:
    peer = Skopeo(user, registry)
    for default, rule in ((REJECT, ACCEPT), (ACCEPT, REJECT)):
        path = write(user, default, docker={scope.replace("HOST", registry.host): rule})
        by_penroot, by_skopeo = {}, {}
        for name in ("good:1", "plain:1"):
            source = f"docker://{registry.host}/test/{name}"
            by_skopeo[name] = peer.admits(path, source)
            by_penroot[name] = not user.run(
                "sh", "-c", f"{PREFIX}/bin/penroot start {source} true || echo refused"
            ).stdout
        assert by_penroot == by_skopeo


@dataclass
class Keyless:
    """A certificate authority (Fulcio) and a log (Rekor) for keyless signatures."""

    directory: Path
    root: Authority
    rekor: Signer

    def sign(self, server: Server, repository: str, digest: str, *, time: int = 60, **changes: Any) -> None:
        """Sign tag 1 of an image, and log the signature ``time`` seconds after the start of the certificate.

        The certificate is valid for ten minutes.
        """
        signer, data = Signer(), payload(f"{server.host}/{repository}:1", digest)
        signed, certificate = signer.sign(data), self.root.certify(signer, START, **changes)
        entry = logged(self.rekor, START + time, hashedrekord(data, signed, certificate))
        proofs = {"certificate": certificate.decode(), "chain": self.root.pem.decode(), "bundle": json.dumps(entry)}
        annotations = {f"dev.sigstore.cosign/{name}": proof for name, proof in proofs.items()}
        push(server.pusher, repository, digest, [(data, signed)], proofs=annotations)

    def requirement(self, user: User, **fulcio: str) -> dict[str, Any]:
        rekor = self.rekor.write(user.home / "etc/keys/rekor.pub")
        ca = user.home / "etc/keys/fulcio.pem"
        ca.write_bytes(self.root.pem)
        identity = {"caPath": str(ca), "oidcIssuer": OIDC, "subjectEmail": EMAIL, **fulcio}
        return {"type": "sigstoreSigned", "fulcio": identity, "rekorPublicKeyPath": str(rekor)}


START = 1_700_000_000


@pytest.fixture(scope="module")
def keyless(registry: Server, tmp_path_factory: pytest.TempPathFactory) -> Keyless:
    good = Keyless(tmp_path_factory.mktemp("keyless"), Authority("root", START - 1000), Signer())
    others = Keyless(good.directory, Authority("root", START - 1000), Signer())
    situations: dict[str, tuple[Keyless, dict[str, Any]]] = {
        "good": (good, {}),
        "old": (good, {"time": 601}),
        "you": (good, {"email": "you@site.example"}),
        "issuer": (good, {"issuers": {1: "https://evil.example"}}),
        "root": (Keyless(good.directory, others.root, good.rekor), {}),
        "log": (Keyless(good.directory, good.root, others.rekor), {}),
    }
    for number, (name, (signer, changes)) in enumerate(situations.items()):
        image = images.busybox(entry("number", b"k%d" % number), kinds=OCI)
        digest = registry.pusher.image(f"keyless/{name}", "1", image)
        signer.sign(registry, f"keyless/{name}", digest, **changes)
    return good


@pytest.mark.parity("cosign's keyless signatures")
def test_keyless_signature_is_verified_offline_after_a_start(user: User, registry: Server, keyless: Keyless) -> None:
    """The certificate expired years ago, but was valid at the time of the log entry."""
    path = write(user, keyless.requirement(user))
    with faulty(registry.host) as front:
        (user.home / "etc/registries.conf").write_text(f"{front.host} mirror={registry.host}\n")
        remapped = {"type": "remapIdentity", "prefix": front.host, "signedPrefix": registry.host}
        write(user, {**keyless.requirement(user), "signedIdentity": remapped})
        uri = f"docker://{front.host}/keyless/good:1"
        digest = user.penroot("digest", uri).stdout.strip()
        assert user.start(f"docker://{front.host}/keyless/good@{digest}", "cat", "/number") == "k0"
        (user.home / "etc/registries.conf").unlink()
        front.seen.clear()
        assert user.start(f"docker://{front.host}/keyless/good@{digest}", "cat", "/number") == "k0"
        assert front.seen == []
    write(user, keyless.requirement(user, subjectEmail="you@site.example"))
    uri = f"docker://{registry.host}/keyless/good:1"
    stderr = user.penroot("start", uri, "true", status=1).stderr
    assert f"{path}: default[0] (default) requires: none of 1 signature is by you@site.example of {OIDC}: " in stderr
    assert f"the e-mail address in its certificate is {EMAIL}" in stderr
    shown = json.loads(user.penroot("inspect", "--signatures", f"docker://{registry.host}/keyless/you:1").stdout)
    assert shown["admitted"] and shown["signatures"][0]["key"] == f"you@site.example of {OIDC}"
    assert "controls image admission with 1 key" in user.run("sh", "-c", "penroot doctor; :").stdout


@pytest.mark.parity("cosign's keyless signatures")
@pytest.mark.parametrize("name", ["good", "old", "you", "issuer", "root", "log"])
def test_skopeo_admits_the_same_identities(user: User, registry: Server, keyless: Keyless, name: str) -> None:
    peer = Skopeo(user, registry)
    path = write(user, keyless.requirement(user))
    uri = f"docker://{registry.host}/keyless/{name}:1"
    ours = user.penroot("start", uri, "cat", "/number", status=None)
    assert (ours.returncode == 0) == (name == "good"), ours.stderr
    if peer.knows_fulcio(path):
        assert peer.admits(path, uri) == (name == "good")


# Text of a policy -> part of the error
INVALID_POLICIES = {
    "{": ":1: Expecting property name",
    '{"default": [{"type": "rejekt"}]}': ": default[0]: unknown type 'rejekt'",
    '{"default":\n [{"type": "sigstoreSigned"}]}': ": default[0]: sigstoreSigned has no key",
    '{"default": [{"type": "sigstoreSigned", "keyPath": "x.pub"}]}': "must be an absolute path",
    '{"default": [{"type": "sigstoreSigned", "keyPath": "/none/x.pub"}]}': "[0].keyPath: there is no file /none/x.pub",
    '{"default": [{"type": "signedBy", "keyType": "GPGKeys", "keyPath": "/x"}]}': "must have GPG signatures, as",
}


@pytest.mark.parity("typos in a policy")
@pytest.mark.parametrize("text", INVALID_POLICIES)
def test_invalid_policy_admits_nothing_and_is_reported(user: User, registry: Server, text: str) -> None:
    path = user.home / "etc/policy.json"
    path.parent.mkdir()
    path.write_text(text)
    done = user.penroot("start", f"docker://{registry.host}/test/good:1", "true", status=1)
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and lines[0].startswith("[ERROR] ") and lines[1].startswith("[HINT] "), done.stderr
    assert INVALID_POLICIES[text] in lines[0] and str(path) in lines[0]
    assert not (user.home / "cache/layers").exists() or not list((user.home / "cache/layers").iterdir())


@pytest.mark.parity("the examples of docs/howto/signed.md")
def test_the_examples_of_the_documentation(user: User, registry: Server) -> None:
    """The test signs the images itself instead of with cosign, and a mirror stands in for the example's registries."""
    text = (Path(__file__).parents[2] / "docs/howto/signed.md").read_text()
    policies = re.findall("```json\n(.*?)```", text, re.S)
    (commands,) = re.findall("```console\n(.*?)```", text, re.S)
    commands_of_penroot = [shlex.split(line[2:]) for line in commands.splitlines() if line.startswith("$ penroot ")]
    assert len(policies) == 3 and len(commands_of_penroot) == 2
    SIGNER.write(user.home / "etc/keys/rekor.pub")
    (user.home / "etc/keys/fulcio.pem").write_bytes(Authority("root", START).pem)
    SIGNER.write(user.home / "etc/keys/site.pub")
    names = f"registry.example.org mirror={registry.host}/hub\nmirror.example.org:5000 mirror={registry.host}\n"
    (user.home / "etc/registries.conf").write_text(names)
    image = images.busybox(entry("number", b"4"), kinds=OCI)
    for repository, reference in (("hub/approved/box", "registry.example.org/approved/box"), ("vendor/box", "")):
        digest = registry.pusher.image(repository, "1", image)
        sign(registry.pusher, repository, digest, SIGNER, reference or "registry.example.org/box:1")
    for policy in policies:
        (user.home / "etc/policy.json").write_text(policy.replace("/etc/enroot", f"{user.home}/etc"))
        for words in commands_of_penroot if policy is policies[0] else ():
            user.run(*words)
        remapped = "docker://mirror.example.org:5000#vendor/box:1"
        user.penroot("start", remapped, "true", status=int(policy is not policies[1]))
        stderr = user.penroot("start", "docker://other.example.org#x", status=1).stderr
        assert "is rejected by" in stderr and "policy.json: default[0] (default)" in stderr


@pytest.mark.parity("without a policy, no module")
def test_a_start_without_a_policy_imports_nothing_of_it(user: User, rootfs: Path) -> None:
    del rootfs
    code = f"""
import os, sys
sys.path.insert(0, "{LIBRARY}")
from enroot_py.runtime import execute
def execve(*_): print(*sys.modules, flush=True); os._exit(0)
execute._execve = execve
sys.argv = ["penroot", "start", "box", "true"]
from enroot_py.main import main
main()
"""
    done = user.run("/usr/bin/python3", "-IS", "-c", code)
    imported = {name.rpartition(".")[2] for name in done.stdout.split()}
    modules = "policies policy signatures identities admission cryptography lined"
    assert "containers" in imported and not imported & set(modules.split())
