from __future__ import annotations

import time

import pytest

from enroot_py.base.errors import ImageReferenceError
from enroot_py.registry.reference import Reference, is_local, parse

D = "sha256:" + "0123456789abcdef" * 4
HUB = "registry-1.docker.io"


@pytest.mark.parity(
    "ubuntu, docker.io/ubuntu and index.docker.io#ubuntu have one canonical name",
    "TAG@DIGEST: the digest takes precedence over the tag, and is verified",
    "a registry's host name may have capitals",
    "a private registry's image name gets no library/ in front",
    "URI: docker://[USER@][REGISTRY#]IMAGE[:TAG][@DIGEST]",
    "URI: the word before the first / is a registry",
    "URI: a digest takes precedence over a tag",
    "URI: docker.io and index.docker.io are Docker Hub",
)
@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        # Docker Hub and its other names
        ("docker://ubuntu", f"{HUB}/library/ubuntu:latest"),
        ("ubuntu", f"{HUB}/library/ubuntu:latest"),
        ("docker://docker.io/ubuntu", f"{HUB}/library/ubuntu:latest"),
        ("docker://index.docker.io#ubuntu", f"{HUB}/library/ubuntu:latest"),
        ("docker://docker.io/library/ubuntu:22.04", f"{HUB}/library/ubuntu:22.04"),
        ("docker://registry-1.docker.io#ubuntu", f"{HUB}/library/ubuntu:latest"),
        ("docker://index.docker.io/a/b", f"{HUB}/a/b:latest"),
        ("docker://me@docker.io#ubuntu", f"{HUB}/library/ubuntu:latest"),
        ("nvidia/cuda:12", f"{HUB}/nvidia/cuda:12"),
        ("a/b/c", f"{HUB}/a/b/c:latest"),
        # other registries
        ("docker://REG.IO/img", "reg.io/img:latest"),
        ("docker://nvcr.io#nvidia/pytorch:25.06-py3", "nvcr.io/nvidia/pytorch:25.06-py3"),
        ("docker://registry#img", "registry/img:latest"),
        ("localhost/img:1", "localhost/img:1"),
        ("LocalHost:5000/a/b:1_x.Y-Z", "localhost:5000/a/b:1_x.Y-Z"),
        ("reg:5000/img", "reg:5000/img:latest"),
        ("[::1]:5000/img", "[::1]:5000/img:latest"),
        # digests
        (f"docker://ubuntu:22.04@{D}", f"{HUB}/library/ubuntu@{D}"),
        (f"docker://reg.io#a/b@{D}", f"reg.io/a/b@{D}"),
        # users
        ("docker://me@reg.io/img", "reg.io/img:latest"),
        ("docker://$oauthtoken@nvcr.io#nvidia/cuda:1", "nvcr.io/nvidia/cuda:1"),
        (f"docker://me@corp.com@reg.io/img:1@{D}", f"reg.io/img@{D}"),
    ],
)
def test_canonical_name(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical


SPELLINGS = {
    "reg.io": ["REG.io", "reg.io.", "reg.io:443", "Reg.IO.:0443"],
    "reg.io:5000": ["reg.io:05000", "reg.io.:5000", "reg.io:0000000000000005000"],
    "reg.io:80": ["reg.io:080"],
    "10.0.0.1:5002": ["10.0.0.1:05002", "[::ffff:10.0.0.1]:5002", "[::FFFF:a00:1]:5002", "10.1:5002", "167772161:5002"],
    "10.0.0.1": ["[::ffff:10.0.0.1]", "10.0.0.1.", "0xa000001", "10.0.0.0x1", "10.0.0.1:443"],
    "[fd00::1]:5000": ["[FD00:0:0::1]:5000", "[fd00::0.0.0.1]:05000"],
    "registry-1.docker.io": ["docker.io:443", "Index.Docker.io.", "registry.hub.docker.com"],
}


@pytest.mark.parametrize(("canonical", "text"), [(name, text) for name, texts in SPELLINGS.items() for text in texts])
def test_registry_has_one_spelling(canonical: str, text: str) -> None:
    assert parse(f"docker://{text}#team/app:1") == parse(f"docker://{canonical}#team/app:1")
    if "." in text or ":" in text:
        assert parse(f"{text}/team/app:1") == parse(f"{canonical}/team/app:1")


@pytest.mark.parametrize(
    "text",
    ["010.0.0.1", "10.0.0.256", "10.0.0.1.2", "a.1", "1.2.3.08", "reg.io:0", "reg..io", "reg.io..", "[::1", "[::1]5"]
    + ["[fe80::1%lo]", "[10.0.0.1]", "réseau.fr", "reg.io:", "reg.io:6553600", "09"],
)
def test_registry_without_a_canonical_spelling_is_refused(text: str) -> None:
    with pytest.raises(ImageReferenceError, match="bad registry") as caught:
        parse(f"docker://{text}#team/app:1")
    assert caught.value.hint


@pytest.mark.parametrize("text", ["me@reg.io:5000#a/b:1", f"docker://me@x.org@reg.io/a@{D}", "ubuntu", "[fe80::1]/a"])
def test_uri_reads_back(text: str) -> None:
    reference = parse(text)
    assert parse(reference.uri()) == reference != Reference("x", "y", "z")
    assert hash(parse(reference.uri())) == hash(reference)
    assert reference.user == {"m": "me", "d": "me@x.org"}.get(text[0], "")
    with pytest.raises(AttributeError):
        reference.tag = "x"


@pytest.mark.parity(
    "the default file name omits the namespace library of Docker Hub",
    "import: the default file name is NAMESPACE+NAME+TAG.sqsh",
)
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("docker://ubuntu", "ubuntu+latest.sqsh"),
        ("docker://nvcr.io#nvidia/pytorch:25.06", "nvidia+pytorch+25.06.sqsh"),
        ("reg.io/library/x:1", "library+x+1.sqsh"),
        (f"ubuntu@{D}", f"ubuntu+{D}.sqsh"),
    ],
)
def test_default_file_name(text: str, name: str) -> None:
    assert parse(text).filename() == name


@pytest.mark.parity("URI: docker://[USER@][REGISTRY#]IMAGE[:TAG][@DIGEST]")
@pytest.mark.parametrize(
    "text",
    [
        "", "docker://", "docker:///x", "a//b", "/x", "a/", "-a", "a-", "UPPER", "a b", "a:", "a:b:c", "a:-tag",
        "a:" + "t" * 129, "a@sha256:123", "a@sha512:" + "0" * 128, "a@" + D.upper(), "@a", "reg.io:99999/a",
        "reg.io:x/a", "..:5/a", "#a", "[::1/a", "dockerd://", "podman://-v", "oci:", "docker-archive::x",
        "https://reg.io/a", "a/../b", "a/./b", "x\n",
        "a" * 300, "./image.sqsh", "a%2fb", "é", "reg.io/a:²",
    ],
)  # fmt: skip
def test_rejects(text: str) -> None:
    with pytest.raises(ImageReferenceError):
        parse(text)


@pytest.mark.parity("image.sqsh without ./ is a file if it exists")
def test_file_name_as_image_gets_a_hint() -> None:
    with pytest.raises(ImageReferenceError) as caught:
        parse("/data/image.sqsh")
    assert "./image.sqsh" in caught.value.hint


def test_long_input_takes_no_time() -> None:
    """A pattern that takes quadratic time would need hours."""
    began = time.process_time()
    for text in ("a" * 200_000, "a/" * 100_000, "a@" * 100_000, ":" * 200_000, "a-_." * 50_000):
        with pytest.raises(ImageReferenceError):
            parse(text)
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("names", "local"),
    [
        (["localhost", "LOCALHOST:5000", "127.0.0.1:5000", "127.9.9.9", "[::1]:5000", "a.localhost"], True),
        (["reg.io", "127.0.0.1.evil.org", "127.evil:5000", "localhost.evil", "[::2]:5000", "10.0.0.1"], False),
    ],
)
def test_registries_of_this_machine_are_local(names: list[str], local: bool) -> None:
    assert {name: is_local(name) for name in names} == dict.fromkeys(names, local)


@pytest.mark.parametrize(
    ("text", "canonical", "filename"),
    [
        ("oci:dir", "oci:/here/dir", "dir.sqsh"),
        ("oci:/a/dir:one", "oci:/a/dir:one", "dir+one.sqsh"),
        ("oci-archive:../x.tar", "oci-archive:/x.tar", "x.sqsh"),
        ("docker-archive:/x.tar:a/b:1", "docker-archive:/x.tar:a/b:1", "x+a+b+1.sqsh"),
        ("dockerd://a/b:1", "dockerd://a/b:1", "a+b+1.sqsh"),
        ("podman://ubuntu", "podman://ubuntu", "ubuntu.sqsh"),
    ],
)
def test_local_images_and_images_of_engines(text: str, canonical: str, filename: str) -> None:
    image = parse(text, "/here")
    assert str(image) == image.uri() == canonical and parse(canonical) == image
    assert image.filename() == filename


def test_password_for_an_engine_is_refused_and_hidden() -> None:
    for scheme in ("dockerd://", "podman://"):
        with pytest.raises(ImageReferenceError) as caught:
            parse(f"{scheme}alice:S3cret@registry.example/x")
        assert "S3cret" not in f"{caught.value} {caught.value.hint}"
        assert str(parse(f"{scheme}registry.example:5000/x@sha256:{'a' * 64}")).endswith("a" * 64)
