"""Every documented kind of srun failure has a clear message. tests/kernel/test_failures.py tests penroot start."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, ON_N1, assert_nothing_left

# Kind and name -> (arguments of srun, a part of the message).
FAILURES: dict[str, tuple[tuple[str, ...], str]] = {
    "reference: upper case": (("--container-image=UPPER CASE", "true"), "UPPER CASE"),
    "reference: scheme": (("--container-image=nothing://x", "true"), "nothing"),
    "registry: no such image": (("--container-image=registry:5000#nothing:1", "true"), "nothing"),
    "registry: not reached": (("--container-image=registry:1#nothing:1", "true"), "registry:1"),
    "image: missing file": (("--container-image=/nothing.sqsh", "true"), "/nothing.sqsh"),
    "image: no squashfs": (("--container-image=./text.sqsh", "true"), "not a squashfs file"),
    "image: truncated": (("--container-image=./short.sqsh", "true"), "truncated"),
    "mount: missing": ((IMAGE, "--container-mounts=/nothing:/mnt", "true"), "/nothing"),
    "mount: option": ((IMAGE, "--container-mounts=/usr:/mnt:nothing", "true"), "nothing"),
    "mount: directory on file": ((IMAGE, "--container-mounts=/usr:/bin/sh", "true"), "/bin/sh"),
    "container: not running": (("--container-name=none:exec", "true"), "not running"),
    "container: none of that name": (("--container-name=none", "true"), "no such container"),
    "container: bad name": ((IMAGE, "--container-name=a/b", "true"), "a/b"),
    "container: save onto a directory": ((IMAGE, "--container-save=.", "true"), "is a directory"),
    "container: workdir": ((IMAGE, "--container-workdir=/nothing", "true"), "/nothing"),
    "config: environment file": (("--environment=./none.toml", "true"), "none.toml"),
    "config: bad environment file": (("--environment=./bad.toml", "true"), "bad.toml"),
    "hook: Python": ((IMAGE, "true"), "50-hook.py:2 failed: /nothing: No such file or directory"),
    "command: missing": ((IMAGE, "nothing"), "nothing"),
}
PREPARE = """
echo text > text.sqsh; echo 'this is no TOML' > bad.toml
penroot import -o whole.sqsh docker://registry:5000#minimal:1
head -c 5000 whole.sqsh > short.sqsh
"""
HOOK = """
mkdir -p ~/.config/enroot/hooks.d
printf 'def run(context):\\n    open("/nothing")\\n' > ~/.config/enroot/hooks.d/50-hook.py
"""


@pytest.fixture(scope="module")
def files(lab: Lab) -> Iterator[None]:
    lab.run(["bash", "-ec", PREPARE])
    yield
    lab.run("rm -rf *.sqsh bad.toml ~/.config/enroot")


@pytest.mark.parametrize("name", FAILURES)
def test_failure_of_a_step_is_a_clear_error(lab: Lab, files: None, name: str) -> None:
    words, part = FAILURES[name]
    if name.startswith("hook"):
        lab.run(HOOK)
    try:
        done = lab.run(["srun", *ON_N1, *words], check=False)
    finally:
        lab.run("rm -rf ~/.config/enroot")
    assert done.returncode > 0
    assert part in done.stderr
    text = re.sub(r"/\S*/hooks\.d/\S*\.py", "", done.stderr)
    assert not re.search(r"Traceback|  File \"|a bug in|\[Errno|\.py\b|\b[A-Z]\w*(Error|Exception)\b", text), text


def test_failures_leave_nothing(lab: Lab) -> None:
    assert_nothing_left(lab)
