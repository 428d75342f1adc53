"""Pins of images in a job's variables and in a lock file, and the image in the comment of a job."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from enroot_py.base.digests import Pin
from enroot_py.base.errors import ConfigError, PenrootError, UsageError
from enroot_py.features.pins import lockfile, pins, step
from enroot_py.features.pins.options import PIN
from enroot_py.features.pins.pins import Pins
from enroot_py.registry.reference import LocalImage, Reference, parse
from pyxis_py.node import comment
from pyxis_py.request import options
from pyxis_py.request.job import PINNED, RESOLVED, Job
from pyxis_py.submit import submission

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
TEXT = f"# of the team\nversion 1\n\nubuntu {A}\n  reg#b/c:1   {B}\nwaits:1\n"


def job(*pairs: tuple[str, str], context: str = "srun", verb: str = "check", cwd: str = "/") -> Job:
    return Job([("verb", verb), ("context", context), ("cwd", cwd), *pairs])


def carrying(pins_of_job: Pins, *option_words: str, verb: str = "check") -> Job:
    return job(("environ", f"{PINNED}={pins_of_job.dumps()}"), *(("option", word) for word in option_words), verb=verb)


def pin_of(request: Job, image: str) -> Pin | None:
    return request.pin(options.parse(request.options, request.environ), parse(image))


def pinned(request: Job) -> str:
    """Resolve the job's images as sbatch and salloc do for all steps. Return the text for the variable PINNED."""
    return "".join(text for _, text in step.at_submit(request, submission.check(request)[0]))


def remote(text: str) -> Reference:
    image = parse(text)
    assert not isinstance(image, LocalImage)
    return image


def test_lock_file_pins_each_spelling_of_an_image() -> None:
    file = lockfile.parse("/x.lock", TEXT)
    for image in ("ubuntu", "docker://ubuntu:latest", "me@docker.io#library/ubuntu"):
        assert file.pin(remote(image)) == Pin(A, "/x.lock:4 locks it to", file.pin(remote(image)).hint)  # type: ignore[union-attr]
    assert file.pin(remote("reg#b/c:1")) and not file.pin(remote(f"ubuntu@{B}"))
    with pytest.raises(ConfigError, match=r"/x\.lock: reg/b/c:2 is not in this lock file") as caught:
        file.pin(remote("reg#b/c:2"))
    assert caught.value.hint == "add it: penroot lock /x.lock reg#b/c:2"
    with pytest.raises(ConfigError, match=r"/x\.lock:6: waits:1 has no digest yet"):
        file.pin(remote("waits:1"))


def test_carried_pins_are_read_back() -> None:
    carried = Pins({"reg/a:1": A, "reg/b:1": ""}, "./my lock", lockfile.parse("/a b/my lock", TEXT))
    assert pins.loads(carried.dumps()) == carried
    assert pins.loads(Pins({}).dumps()) == Pins({})
    assert pins.loads(Pins({"reg/a:1": A}).dumps()) == Pins({"reg/a:1": A})


@pytest.mark.security("H6")
def test_forged_pins_raise_no_exception() -> None:
    chance = random.Random(15)
    words = ["x" * 500, "\t", A, *"tag lock path image reg/a:1 1 -1 /etc/shadow ../.. @ # é".split()]
    for _ in range(3000):
        text = "".join(chance.choice([*words, " ", " ", "\n"]) for _ in range(chance.randrange(20)))
        try:
            loaded = pins.loads(text)
        except PenrootError:
            continue
        assert all(digest in ("", A) for digest in loaded.tags.values())


def test_lock_file_of_any_text_raises_only_config_errors() -> None:
    chance = random.Random(16)
    words = ["version 1\n", A, "\n", " ", "\x00", "\ufeff", *"version ubuntu # 1 @ : docker:// oci:x".split()]
    for _ in range(3000):
        try:
            lockfile.parse("/x", "version 1\n" * chance.randrange(2) + "".join(chance.choices(words, k=8)))
        except ConfigError as e:
            assert str(e).startswith("/x:") and e.hint


def test_step_uses_the_digest_of_its_job() -> None:
    pinned_images = Pins({str(parse("ubuntu")): A})
    for image in ("ubuntu", "docker://docker.io#library/ubuntu:latest"):
        pin = pin_of(carrying(pinned_images), image)
        assert pin and (pin.digest, pin.origin) == (A, "the job has pinned it to")
    assert pin_of(carrying(pinned_images), "ubuntu:22.04") is None
    assert pin_of(carrying(pinned_images, "container-pin=no"), "ubuntu") is None
    assert pin_of(carrying(pinned_images), f"ubuntu@{B}") is None
    assert pin_of(carrying(pinned_images), "oci:/ubuntu") is None


def test_pin_of_srun_comes_first_on_a_node() -> None:
    """srun resolves the tag for all nodes of the step, also with --container-pin=no."""
    pinned_images = Pins({str(parse("ubuntu")): A})
    resolved = ("environ", f"{RESOLVED}={parse('ubuntu').uri()} {B}")
    node = job(resolved, ("environ", f"{PINNED}={pinned_images.dumps()}"), ("option", "container-pin=no"), verb="step")
    assert pin_of(node, "ubuntu") == Pin(B)
    assert pin_of(job(resolved, verb="step"), "ubuntu") == Pin(B)


def test_a_lock_file_is_read_once_for_a_job(tmp_path: Path) -> None:
    """All nodes use the text that the job carries. A lock file of this name in another directory is read anew."""
    file = tmp_path / "x.lock"
    file.write_text(f"version 1\nubuntu {A}\n")
    option = ("option", "container-lock=x.lock")
    first = job(option, context="sbatch", cwd=str(tmp_path))
    text = pinned(first)
    file.write_text(f"version 1\nubuntu {B}\n")
    carried = ("environ", f"{PINNED}={text}")
    for cwd, digest in ((str(tmp_path), A), ("/", A)):
        pin = pin_of(job(option, carried, cwd=cwd), "ubuntu")
        assert pin and pin.digest == digest and pin.origin == f"{file}:2 locks it to"
    (tmp_path / "there").mkdir()
    (tmp_path / "there/x.lock").write_text(f"version 1\nubuntu {B}\n")
    pin = pin_of(job(option, carried, cwd=str(tmp_path / "there")), "ubuntu")
    assert pin and pin.digest == B
    assert pin_of(job(option, carried, verb="step", cwd="/nowhere"), "ubuntu").digest == A  # type: ignore[union-attr]


def test_pins_too_large_for_a_job_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.lock").write_text("version 1\n" + "".join(f"r#i{number} {A}\n" for number in range(600)))
    option = ("option", "container-lock=x.lock")
    request = job(option, context="sbatch", cwd=str(tmp_path))
    text = pinned(request)
    assert 48_000 < len(text) < 64 << 10
    before = Pins({f"reg/{'x' * 200}/i{number}:1": A for number in range(100)})  # pins of another component of the job
    request = job(option, ("environ", f"{PINNED}={before.dumps()}"), context="sbatch", cwd=str(tmp_path))
    with pytest.raises(UsageError, match="more than the 64 KiB that fit into the environment of a job"):
        pinned(request)


@pytest.mark.parity("digests, squashfs files")
@pytest.mark.parametrize(
    ("option_words", "context"),
    [
        (("container-image=ubuntu",), "srun"),
        (("container-image=/x.sqsh",), "sbatch"),
        (("container-image=oci:/x",), "sbatch"),
        ((f"container-image=ubuntu@{A}",), "sbatch"),
        (("container-name=x",), "sbatch"),
        (("container-image=ubuntu", "container-pin=no"), "salloc"),
    ],
)
def test_without_pins_no_registry_is_contacted(option_words: tuple[str, ...], context: str) -> None:
    """A request to the registry would cause a warning, because this host reaches no registry."""
    request = job(*(("option", word) for word in option_words), context=context)
    assert pinned(request) == ""


@pytest.mark.parity("--container-pin=no")
@pytest.mark.parametrize("argument", ["pin_tags=no", "resolve_tags=no", "importer=/bin/true"])
def test_site_can_leave_pins_to_steps(argument: str) -> None:
    request = job(("option", "container-image=ubuntu"), ("arg", argument), context="sbatch")
    assert pinned(request) == ""


@pytest.mark.parity("PYXIS_CONTAINER_PIN")
@pytest.mark.parametrize(
    ("text", "pin"),
    [("no", False), ("NO", False), ("yes", True), ("a,reg#b:1,a", ("a", "reg#b:1")), ("docker://no", ("docker://no",))],
)
def test_words_and_images_of_the_option(text: str, pin: object) -> None:
    assert options.parse([("container-pin", text)], {}).value(PIN) == pin
    assert options.parse([], {"PYXIS_CONTAINER_PIN": text}).value(PIN) == pin


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("container-pin=", "needs a value"),
        ("container-pin=a,,b", "an image is empty"),
        ("container-lock=", "needs a value"),
        ("container-lock=~/x", "no shell has replaced the ~"),
        ("container-lock=a\nb", "control characters"),
    ],
)
def test_invalid_options(option: str, error: str) -> None:
    name, _, text = option.partition("=")
    with pytest.raises(UsageError, match=error):
        options.parse([(name, text)], {})


@pytest.mark.parametrize("image", ["/x.sqsh", "oci:/x", "A", "bcast:/x"])
def test_container_pin_needs_a_tag(image: str) -> None:
    request = job(("option", f"container-pin={image}"), context="sbatch")
    with pytest.raises(UsageError, match="--container-pin="):
        pinned(request)


@pytest.mark.parity("show_image=yes")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("(null)", f"image=r/a:1@{A}"),
        ("", f"image=r/a:1@{A}"),
        ("mine; a=b", f"mine; a=b; image=r/a:1@{A}"),
        (f"mine; image=r/b:1@{B}; more", f"mine; more; image=r/a:1@{A}"),
        ("image=of mine", f"image=of mine; image=r/a:1@{A}"),
        ("two\nlines", f"two\nlines; image=r/a:1@{A}"),
    ],
)
def test_comment_keeps_the_words_of_the_user(before: str, after: str) -> None:
    assert comment.changed(before, f"r/a:1@{A}") == after
    assert comment.changed(after, f"r/a:1@{A}") == after


def test_a_comment_that_cannot_be_changed_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """squeue fails, as it does if slurmctld does not answer."""
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 'squeue: error: no slurmctld' >&2\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    comment.add(job(("jobid", "7")), f"r/a:1@{A}")
    assert "cannot add the image to the comment of the job: " in capfd.readouterr().err


def test_endless_number_is_ignored() -> None:
    """Python refuses to parse a number with so many digits."""
    assert pins.loads(f"path /x\nimage {'9' * 5000} ubuntu {A}").lock == lockfile.LockFile("/x", ())


@pytest.mark.parametrize("text", [f"tag reg/a:1 ../.. {A}", f"tag reg/a:1 {A} x", "tag reg/a:1 sha256:../.."])
def test_invalid_digest_is_ignored(text: str) -> None:
    assert pins.loads(text).tags == {"reg/a:1": ""}
