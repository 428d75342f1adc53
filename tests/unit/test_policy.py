"""Policies: their syntax, the scope of an image, the name that a signature must have, and files that are trusted."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import random
import re
from typing import Any

import pytest

from enroot_py.base.errors import ConfigError, PolicyError
from enroot_py.config import document
from enroot_py.features.trust import identities, policy
from enroot_py.features.trust.identities import DockerName, Identity
from enroot_py.features.trust.policy import Policy
from enroot_py.registry import reference
from tests.unit.test_fuzz import mutate
from tests.unit.test_reference import SPELLINGS

ACCEPT, REJECT = {"type": "insecureAcceptAnything"}, {"type": "reject"}
KEYED = {"type": "sigstoreSigned", "keyPath": "/etc/keys/cosign.pub"}
D = "sha256:" + "a" * 64


def read(document: object) -> Policy:
    return Policy("P", json.dumps(document, indent=1).encode())


def rule(document: object, uri: str) -> policy.Rule:
    return read(document).rule(*policy.scopes_of(reference.parse(uri)))


@pytest.mark.parity("/etc/enroot/policy.json, in the format of podman and skopeo")
@pytest.mark.parametrize(
    "uri, scope",
    [
        ("docker://reg.site:5000#team/box:1", "docker: reg.site:5000/team/box:1"),
        ("docker://reg.site:5000#team/box:2", "docker: reg.site:5000/team/box"),
        (f"docker://reg.site:5000#team/box@{D}", f"docker: reg.site:5000/team/box@{D}"),
        ("docker://reg.site:5000#team/other", "docker: reg.site:5000/team"),
        ("docker://REG.site:5000#teams/other", "docker: reg.site:5000"),
        ("docker://reg.site#team/box:1", "docker: *.site"),
        ("docker://a.b.reg.site:80#team/box:1", "docker: *.reg.site"),
        ("docker://busybox", "docker: docker.io/library/busybox"),
        ("docker://docker.io#library/busybox:2", "docker: docker.io/library/busybox"),
        ("docker://other.example#x", "docker: all"),
        ("oci:/images/one:tag", "oci: /images/one:tag"),
        ("oci:/images/one:other", "oci: /images"),
        ("oci-archive:/images/one.tar", "default"),
        ("podman://localhost/x", "containers-storage: all"),
    ],
)
def test_the_narrowest_scope_counts(uri: str, scope: str) -> None:
    words = [
        *("reg.site:5000/team/box:1", "reg.site:5000/team/box", f"reg.site:5000/team/box@{D}", "reg.site:5000/team"),
        *("reg.site:5000", "*.site", "*.reg.site", "docker.io/library/busybox", ""),
    ]
    transports = {
        "docker": {word: [ACCEPT] for word in words},
        "oci": {"/images/one:tag": [ACCEPT], "/images": [ACCEPT]},
        "containers-storage": {"": [ACCEPT]},
    }
    assert rule({"default": [REJECT], "transports": transports}, uri).scope == scope


def test_all_requirements_of_a_scope_count() -> None:
    matched_rule = rule({"default": [ACCEPT, KEYED, REJECT]}, "docker://x")
    assert [requirement.kind for requirement in matched_rule.requirements] == [
        "insecureAcceptAnything",
        "sigstoreSigned",
        "reject",
    ]
    assert [requirement.where for requirement in matched_rule.requirements] == [
        "P: default[0]",
        "P: default[1]",
        "P: default[2]",
    ]
    error = matched_rule.refusal("x")
    assert isinstance(error, PolicyError) and str(error) == "x is rejected by P: default[2] (default)" and error.hint


@pytest.mark.parity("signedBy (GPG)")
@pytest.mark.parametrize(
    "more",
    [
        {"type": "signedBy", "keyType": "GPGKeys", "keyPath": "/x"},
        {"type": "sigstoreSigned", "pki": {"caRootsPath": "/x"}},
    ],
)
def test_unsupported_requirements_admit_nothing(more: dict[str, Any]) -> None:
    document = {"default": [ACCEPT], "transports": {"docker": {"reg.site": [more]}}}
    error = rule(document, "docker://reg.site#x").refusal("x")
    assert error and "must have" in str(error) and "(docker: reg.site)" in str(error) and "keyPath" in error.hint
    assert rule(document, "docker://other.site#x").refusal("x") is None


def requiring(**keys: object) -> dict[str, object]:
    return {"default": [{"type": "sigstoreSigned", **keys}]}


def identified(**keys: object) -> dict[str, object]:
    return requiring(keyPath="/etc/keys/cosign.pub", signedIdentity=keys)


def scoped(transport: str, scope: str) -> dict[str, object]:
    return {"default": [REJECT], "transports": {transport: {scope: [REJECT]}}}


# (policy, part of the error)
INVALID_POLICIES: list[tuple[object, str]] = [
    ([], "P: a policy must be an object"),
    ({}, "P: the policy has no default"),
    ({"default": [ACCEPT], "x": 1}, "P: x: unknown key 'x'"),
    ({"default": ACCEPT}, "P: default: the list of requirements must be a non-empty array"),
    ({"default": [{}]}, "P: default[0]: the type of a requirement must be a non-empty string"),
    ({"default": [{**REJECT, "keyPath": "/x"}]}, "P: default[0].keyPath: unknown key 'keyPath' of reject"),
    (requiring(keyPath="/x", keyData="eA=="), "P: default[0]: sigstoreSigned has keyPath and keyData"),
    (requiring(keyPath="/x", keypath="/x"), "P: default[0].keypath: unknown key 'keypath'"),
    (requiring(keyData="?"), "P: default[0].keyData: keyData is not base64"),
    (requiring(keyPath="/a\0b"), "P: default[0].keyPath: keyPath='/a\\x00b' is not a valid path"),
    (requiring(keyPath="/a\ud800b"), "P: default[0].keyPath: keyPath='/a\\ud800b' is not a valid path"),
    (requiring(keyPaths=[]), "P: default[0].keyPaths: keyPaths must be a non-empty array"),
    (identified(type="match"), "default[0].signedIdentity: unknown signedIdentity"),
    (identified(type="exactReference"), "exactReference needs dockerReference"),
    (identified(type="exactReference", dockerReference="reg.site/x"), "reg.site/x has neither tag nor digest"),
    (identified(type="exactRepository", dockerRepository="reg.site/x:1"), "reg.site/x:1 has a tag or digest"),
    (identified(type="matchRepository", prefix="x"), "unknown key 'prefix' of matchRepository"),
    ({"default": [REJECT], "transports": {"dockr": {}}}, "P: transports.dockr: unknown key 'dockr'"),
    (scoped("docker", "index.docker.io/x"), "in the scope index.docker.io"),
    (scoped("docker", "Reg.site"), 'docker["Reg.site"]: no image is in the scope'),
    *((scoped("docker", word), f"no image is in the scope '{word}'") for word in ("reg.site/", "a*.site", "https://x")),
    (scoped("squashfs", "images"), "scope 'images' of squashfs"),
    (scoped("dir", "/"), "scope '/' of dir"),
]


@pytest.mark.parity("typos in a policy")
@pytest.mark.parametrize("document, error", INVALID_POLICIES)
def test_typo_is_reported_with_its_path(document: object, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(document)
    assert error in str(caught.value) and str(caught.value).startswith("P:") and caught.value.hint


@pytest.mark.parametrize(
    "text, error",
    [
        ("", "P:1: Expecting value"),
        ('{\n"a": 1,\n"a": 2}', "P: 'a' is a duplicate name"),
        ('{"a": 1,\n}', "P:2: Expecting property name|P:1: Illegal trailing comma"),  # before and since Python 3.13
        ('{"a" 1}', "P:1: Expecting ':' delimiter"),
        ("[1\n2]", "P:2: Expecting ',' delimiter"),
        ("[1", "P:1: Expecting ',' delimiter"),
        ("{} {}", "P:1: Extra data"),
        ('"\x01"', "Invalid control character"),
        ("[" * 100_000, "P: nested too deeply"),
    ],
)
def test_invalid_json(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        document.parse("P", text.encode())
    assert re.search(error, str(caught.value))


def test_damaged_policy_is_a_clear_error(rng: random.Random) -> None:
    text = json.dumps({"default": [KEYED], "transports": {"docker": {"": [REJECT]}}}, indent=1)
    for data in (mutate(text, rng).encode("utf-8", "surrogateescape") for _ in range(300)):
        try:
            Policy("P", data)
        except ConfigError as e:
            assert str(e).startswith("P:") and e.hint


IMAGES = {"tag": DockerName("reg.site/team/box", "1"), "digest": DockerName("reg.site/team/box", "", D)}


@pytest.mark.parity("/etc/enroot/policy.json, in the format of podman and skopeo")
@pytest.mark.parametrize(
    "kind, words, image, good, bad",
    [
        ("matchRepoDigestOrExact", (), "tag", ["reg.site/team/box:1"], ["reg.site/team/box", "reg.site/team/box:2"]),
        ("matchRepoDigestOrExact", (), "digest", ["reg.site/team/box", "reg.site/team/box:2"], ["reg.site/box"]),
        ("matchExact", (), "tag", ["reg.site/team/box:1"], ["reg.site/team/box", f"reg.site/team/box@{D}"]),
        ("matchExact", (), "digest", [f"reg.site/team/box@{D}"], ["reg.site/team/box", "reg.site/team/box:1"]),
        ("matchRepository", (), "tag", ["reg.site/team/box", "reg.site/team/box:2"], ["reg.site/team", "team/box"]),
        ("exactReference", ("x.io/a:2",), "tag", ["x.io/a:2"], ["x.io/a", "x.io/a:1", "reg.site/team/box:1"]),
        ("exactRepository", ("x.io/a",), "tag", ["x.io/a", "x.io/a:7"], ["x.io/a/b", "reg.site/team/box:1"]),
        ("remapIdentity", ("reg.site/team", "x.io"), "tag", ["x.io/box:1"], ["x.io/box", "reg.site/team/box:1"]),
        ("remapIdentity", ("reg.site", "x.io"), "digest", ["x.io/team/box", "x.io/team/box:9"], ["reg.site/team/box"]),
        ("remapIdentity", ("reg.site/te", "x.io"), "tag", ["reg.site/team/box:1"], ["x.ioam/box:1"]),
        ("digestOnly", (), "tag", ["reg.site/team/box:1", "x.io/a", "x.io/a:2"], []),
    ],
)
def test_name_that_a_signature_must_have(
    kind: str, words: tuple[str, ...], image: str, good: list[str], bad: list[str]
) -> None:
    identity = Identity(kind, words)
    for names, matches in ((good, True), (bad, False)):
        for name in names:
            assert identity.matches(IMAGES[image], identities.read(name)) == matches, name


@pytest.mark.parametrize("text", ["busybox:1", "library/busybox:1", "docker.io/busybox:1", "index.docker.io/busybox:1"])
def test_names_of_docker_hub_are_equal(text: str) -> None:
    assert identities.read(text) == identities.of(reference.parse("docker://busybox:1"))  # type: ignore[arg-type]


def test_names_with_ports() -> None:
    assert identities.read("reg:5000/box") == DockerName("reg:5000/box")
    assert identities.read("localhost/box:1") == DockerName("localhost/box", "1")
    assert str(identities.read(f"reg:5000/a/b:1@{D}")) == f"reg:5000/a/b:1@{D}"


@pytest.mark.parametrize(("scope", "text"), [(name, text) for name, texts in SPELLINGS.items() for text in texts])
def test_scope_holds_for_each_spelling_of_its_registry(scope: str, text: str) -> None:
    scope = scope.replace("registry-1.docker.io", "docker.io")
    for scope_of_policy, image in ((scope, text), (text.lower(), scope)):
        if scope_of_policy.startswith(("index.", "registry.hub.")):
            continue  # the scope of Docker Hub is docker.io
        for part in ("", "/team", "/team/app:1"):
            document = {"default": [ACCEPT], "transports": {"docker": {scope_of_policy + part: [REJECT]}}}
            matched_rule = rule(document, f"docker://{image}#team/app:1")
            assert matched_rule.refusal("x") is not None, (scope_of_policy, image)
    if not ("." in text or ":" in text):
        return
    assert identities.read(f"{text}/team/app:1") == identities.read(f"{scope}/team/app:1")
    prefix = Identity("remapIdentity", (f"{text}/team", f"{text}/signed"))
    assert prefix.matches(identities.read(f"{scope}/team/app:1"), identities.read(f"{scope}/signed/app:1"))


def test_scope_without_a_port_includes_port_80() -> None:
    """If plain HTTP is allowed, a registry without a port is also reached at port 80."""
    for scope, image in (("reg.site", "reg.site:80"), ("reg.site:80", "reg.site"), ("*.site", "reg.site:80")):
        document = {"default": [ACCEPT], "transports": {"docker": {scope: [REJECT]}}}
        assert rule(document, f"docker://{image}#app:1").refusal("x")
    document = {"default": [ACCEPT], "transports": {"docker": {"reg.site:80": [REJECT], "reg.site": [ACCEPT]}}}
    for image in ("reg.site", "reg.site:5000"):
        assert rule(document, f"docker://{image}#app:1").refusal("x") is None


def test_narrower_scope_counts_in_either_spelling() -> None:
    for wide, narrow in (("reg.site:80", "reg.site"), ("reg.site", "reg.site:80")):
        scopes = {wide: [ACCEPT], f"{narrow}/secure": [REJECT]}
        document = {"default": [ACCEPT], "transports": {"docker": scopes}}
        for image in (wide, narrow):
            assert rule(document, f"docker://{image}#secure/x:1").refusal("x")
            assert rule(document, f"docker://{image}#other/x:1").refusal("x") is None


def test_scope_in_two_spellings_is_an_error() -> None:
    with pytest.raises(ConfigError, match="P:.*duplicate scope reg.site of docker"):
        read({"default": [ACCEPT], "transports": {"docker": {"reg.site": [REJECT], "reg.site:443": [ACCEPT]}}})
    with pytest.raises(ConfigError, match="no image is in the scope '010.0.0.1'") as caught:
        read({"default": [ACCEPT], "transports": {"docker": {"010.0.0.1": [REJECT]}}})
    assert "10.0.0.1" in caught.value.hint


def put(path: pathlib.Path, data: bytes, mode: int = 0o644, owner: int = 0) -> None:
    path.write_bytes(data)
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, owner, owner)


@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_policy_or_key_that_others_can_write_is_not_trusted(tmp_path: pathlib.Path, mode: int) -> None:
    path, key = tmp_path / "policy.json", tmp_path / "key.pub"
    put(key, b"key", mode)
    put(path, json.dumps({"default": [{"type": "sigstoreSigned", "keyPath": str(key)}]}).encode())
    loaded = policy.load(str(path))
    assert loaded
    (source,) = loaded.rule("docker", []).requirements[0].keys
    for read in (source.content, lambda: policy.load(str(path))):
        with pytest.raises(ConfigError) as caught:
            read()
        assert f"can be written by others (mode {mode:o})" in str(caught.value) and "chmod 644" in caught.value.hint
        put(path, path.read_bytes(), mode)


@pytest.mark.parametrize("name", ["/dev/null", "/etc", "loop", "pipe", "/proc/self/mem", "large"])
def test_no_hint_suggests_to_open_system_files(tmp_path: pathlib.Path, name: str) -> None:
    """A hint such as chmod 644 would be harmful for the shadow passwords or a directory of the system."""
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    put(tmp_path / "large", b"x" * (2 << 20))
    named = str(tmp_path / name)
    for read in (lambda: policy.load(named), lambda: policy.KeySource("P:1", named).content()):
        with pytest.raises(ConfigError) as caught:
            read()
        assert f"{named} " in str(caught.value) and caught.value.hint.startswith(
            ("use a file of root", "use a text file")
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_policy_or_key_of_another_user_is_not_trusted(tmp_path: pathlib.Path) -> None:
    path, key = tmp_path / "policy.json", tmp_path / "key.pub"
    put(key, b"key", owner=4711)
    put(path, json.dumps({"default": [{"type": "sigstoreSigned", "keyPath": str(key)}]}).encode())
    loaded = policy.load(str(path))
    assert loaded
    with pytest.raises(ConfigError, match=f"P?{path}: default.0..keyPath: {key} belongs to uid 4711"):
        loaded.rule("docker", []).requirements[0].keys[0].content()
    put(path, path.read_bytes(), owner=4711)
    with pytest.raises(ConfigError, match="belongs to uid 4711"):
        policy.load(str(path))


@pytest.mark.security("S3")
def test_a_policy_that_is_a_link(tmp_path: pathlib.Path) -> None:
    """policy.json may be a link, for example to podman's policy. A dangling link is an error."""
    (tmp_path / "policy.json").symlink_to("other.json")
    with pytest.raises(ConfigError, match="is a dangling link"):
        policy.load(str(tmp_path / "policy.json"))
    put(tmp_path / "other.json", json.dumps({"default": [REJECT]}).encode())
    assert policy.load(str(tmp_path / "policy.json"))
    assert policy.load(str(tmp_path / "none.json")) is None


def test_a_key_within_the_policy() -> None:
    data = base64.b64encode(b"PEM").decode()
    matched_rule = rule(requiring(keyDatas=[data, data]), "docker://x")
    assert [key.content() for key in matched_rule.requirements[0].keys] == [b"PEM", b"PEM"]
    with pytest.raises(ConfigError, match="P:2: this is not UTF-8") as caught:
        policy.Policy("P", b"{\n\xff")
    assert caught.value.hint


FULCIO = {"caPath": "/ca.pem", "oidcIssuer": "https://login.site", "subjectEmail": "me@site"}
REKOR = {"rekorPublicKeyPath": "/rekor.pub"}


@pytest.mark.parity("cosign's keyless signatures")
def test_identity_of_fulcio_is_read_with_its_log() -> None:
    (requirement,) = rule(requiring(fulcio=FULCIO, **REKOR), "docker://x").requirements
    assert requirement.fulcio and (
        requirement.fulcio.ca.path,
        requirement.fulcio.oidc_issuer,
        requirement.fulcio.subject_email,
    ) == tuple(FULCIO.values())
    assert [source.path for source in requirement.rekor] == ["/rekor.pub"] and not requirement.keys


@pytest.mark.parity("typos in a policy")
@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"fulcio": FULCIO}, "fulcio needs the key of a transparency log"),
        ({"fulcio": FULCIO, "keyPath": "/x", **REKOR}, "sigstoreSigned has keyPath and fulcio"),
        ({"fulcio": {**FULCIO, "caData": "eA=="}, **REKOR}, "caPath and caData exclude each other"),
        ({"fulcio": {key: FULCIO[key] for key in ("caPath", "oidcIssuer")}, **REKOR}, "fulcio needs subjectEmail"),
        ({"fulcio": {key: FULCIO[key] for key in ("oidcIssuer", "subjectEmail")}, **REKOR}, "fulcio needs caPath"),
        ({"fulcio": {**FULCIO, "subjectEmail": ""}, **REKOR}, "subjectEmail must be a non-empty string"),
        ({"fulcio": {**FULCIO, "subject": "me"}, **REKOR}, "unknown key 'subject'"),
        ({"fulcio": [], **REKOR}, "fulcio must be an object"),
        ({"keyPath": "/x", **REKOR, "rekorPublicKeyData": "eA=="}, "exclude each other"),
        ({"keyPath": "/x", "rekorPublicKeyDatas": []}, "must be a non-empty array"),
    ],
)
def test_invalid_keyless_rule_is_reported(keys: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rule(requiring(**keys), "docker://x")
    assert error in str(caught.value) and str(caught.value).startswith("P: default[0]") and caught.value.hint
