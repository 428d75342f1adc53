"""srun resolves a tag for all nodes of a step, and refuses options that conflict with a container."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from enroot_py.base.errors import ConfigError, UsageError
from enroot_py.registry.reference import parse
from pyxis_py.request.job import RESOLVED, Job
from pyxis_py.submit import submission

DIGEST = "sha256:" + "a" * 64


def job(image: str, *pairs: tuple[str, str], context: str = "srun", cwd: str = "/") -> Job:
    facts = [("verb", "check"), ("context", context), ("cwd", cwd), ("option", f"container-image={image}"), *pairs]
    return Job(facts)


def resolves(job: Job) -> str:
    wish = submission.check(job)[1]
    return str(wish.image) if wish and wish.resolve else ""


@pytest.mark.parametrize(
    ("image", "tag"),
    [
        ("debian", "registry-1.docker.io/library/debian:latest"),
        ("docker://reg:5000#a/b:c", "reg:5000/a/b:c"),
        (f"debian@{DIGEST}", ""),
        (f"debian:12@{DIGEST}", ""),
        ("./x.sqsh", ""),
        ("x.sqsh", ""),
        ("docker://x.sqsh", "registry-1.docker.io/library/x.sqsh:latest"),
        ("reg:5000#x.sqsh", "reg:5000/x.sqsh:latest"),
        ("/x.sqsh", ""),
        ("oci:layout", ""),
        ("docker-archive:x.tar", ""),
        ("podman://x", ""),
    ],
)
def test_tags_of_registries_are_resolved(image: str, tag: str) -> None:
    assert resolves(job(image)) == tag


@pytest.mark.clusters("Login nodes or nodes that reach no registry")
@pytest.mark.parametrize("argument", ["resolve_tags=0", "importer=/bin/true"])
def test_sites_can_disable_tag_resolution(tmp_path: Path, argument: str) -> None:
    """sbatch and salloc resolve no tag either, and the name of a file is not a tag."""
    assert resolves(job("debian", ("arg", argument))) == ""
    for context in ("sbatch", "salloc"):
        assert resolves(job("debian", context=context)) == ""
    (tmp_path / "a.sqsh").write_bytes(b"")
    assert resolves(job("a.sqsh", cwd=str(tmp_path))) == ""


@pytest.mark.parity("URI: docker://USER:PASSWORD@... is a login for this command only")
@pytest.mark.parametrize("context", ["srun", "sbatch", "salloc"])
@pytest.mark.parametrize("arguments", [(), (("arg", "importer=/bin/true"),)])
def test_password_in_an_image_is_refused(context: str, arguments: tuple[tuple[str, str], ...]) -> None:
    """Slurm stores a job's options, and shows them to everybody."""
    with pytest.raises(UsageError, match="passwords are not accepted here") as caught:
        submission.check(job("docker://me:hunter2@reg.io#a/b:1", *arguments, context=context))
    assert "hunter2" not in f"{caught.value}{caught.value.hint}"
    assert "penroot login --username USER reg.io" in caught.value.hint


@pytest.mark.security("H3")
@pytest.mark.parametrize(
    ("image", "resolved_digest", "digest"),
    [
        *(("debian:12", DIGEST, DIGEST), ("docker://docker.io#library/debian:12", DIGEST, DIGEST)),
        *(("debian:13", DIGEST, ""), ("debian:12", None, "")),
        *(("debian:12", text, "") for text in ("", "sha256:../../a", DIGEST[:-1], DIGEST.upper())),
    ],
)
def test_resolved_digest_counts_only_for_its_image(image: str, resolved_digest: str | None, digest: str) -> None:
    uri = parse("debian:12").uri()
    resolved = [] if resolved_digest is None else [("environ", f"{RESOLVED}={uri} {resolved_digest}")]
    assert job(image, *resolved).resolved(parse(image).uri()) == digest


def test_unresolvable_tag_gives_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on port 1 of this machine."""
    monkeypatch.setenv("no_proxy", "*")
    request = job("127.0.0.1:1#a:b", ("environ", f"HOME={os.getcwd()}"), ("environ", "ENROOT_TRANSFER_RETRIES=0"))
    _, wish = submission.check(request)
    assert wish is not None
    assert submission.resolve(request, wish.image) == ""


@pytest.mark.parametrize(
    ("flag", "hint"), [("r0", "did you mean ro?"), ("x-create=directory", "known are "), ("frobnicate", "known are ")]
)
def test_a_flag_that_no_mount_has_is_refused(flag: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"--container-mounts: unknown mount option '{flag}'") as caught:
        submission.check(job("debian", ("option", f"container-mounts=/etc:/etc:ro+{flag}")))
    assert hint in caught.value.hint
    mounts = "container-mounts=/etc:/x:ro+rprivate+nofail,tmpfs:/t:size=1m,umount:/y"
    submission.check(job("debian", ("option", mounts)))


JOB_OF_PARENT = f"""
from pyxis_py.request.job import Job
words = open(f"/proc/{{os.getppid()}}/cmdline").read().split(chr(0))
program = words.index("prog") if "prog" in words else len(words)
image = ("option", "container-image=a@{DIGEST}")
job = Job([("verb", "check"), ("context", words[0]), ("cwd", "/"), ("optind", str(program)), image])
"""


@pytest.mark.parametrize(
    ("line", "later"),
    [
        ("srun -n2 --container-image=x prog", True),
        ("srun -n2 --container-image=x a : -n1 b", False),
        ("srun --het-group=0,1 --container-image=x a", False),
        ("srun --async --container-image=x a", False),
        ("srun --as --container-image=x a", False),
        ("srun --account=a --container-image=x a", True),
        ("srun --container-image=x prog --async --het-group", True),
    ],
)
def test_steps_that_learn_the_digest_after_the_allocation(line: str, later: bool) -> None:
    """With srun --async of Slurm 26.05, the step would start before the digest is known, so srun waits for it."""
    assert as_child_of(line, f"{JOB_OF_PARENT}\nprint(submission.learns_later(job))") == f"{later}\n"


WAITS = "--wait-for-children: srun and the process with the container would wait"
CHECK = f"""
{JOB_OF_PARENT}
from enroot_py.base.errors import UsageError
try:
    submission.check(job)
except UsageError as e:
    print(e)
"""


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("srun --wait-for-children prog", WAITS),
        ("srun --wait-for prog", WAITS),
        ("srun --wait=5 prog", ""),
        ("srun prog --wait-for-children", ""),
        ("srun prog : --wait-for-children prog", "--wait-for-children: srun and"),
        ("srun --wait 5 prog", ""),
        ("sbatch --wait-all-nodes=1 prog", ""),
        ("salloc --no-shell", "--no-shell: salloc passes container options"),
        ("salloc --no-kill prog", ""),
        ("salloc prog --no-shell", ""),
    ],
)
def test_options_that_conflict_with_a_container_are_refused(line: str, why: str) -> None:
    """For --wait-for-children of Slurm 25.05, see _check_if_task_cg_empty in proctrack_cgroup.c."""
    assert as_child_of(line, CHECK).startswith(why)
    assert bool(as_child_of(line, CHECK)) is bool(why)


def as_child_of(line: str, code: str) -> str:
    """Run Python code as the child of a process with the command line ``line``, as the plugin does. Return stdout."""
    child = [sys.executable, "-c", f"import os\nfrom pyxis_py.submit import submission\n{code}"]
    words = line.split()
    start = f"import subprocess; subprocess.run({child!r}, check=True)"
    # Python itself reads the first words, so -c and the code must follow the program's name.
    parent = subprocess.Popen(
        [words[0], "-c", start, *words[1:]], executable=sys.executable, stdout=subprocess.PIPE, text=True
    )
    return parent.communicate(timeout=60)[0]
