"""Programs that write and read images stay within the memory of a job, or fail at once."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest

from tests.kernel.conftest import PREFIX, User, require
from tests.slurm.lab import Lab
from tests.slurm.steps import sh

Limited = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def limited(user: User) -> Iterator[Limited]:
    """Yield a function that runs penroot as the user in a cgroup with ``mib`` MiB of memory."""
    root = pathlib.Path("/sys/fs/cgroup")
    v1 = (root / "memory").is_dir()
    top = root / "memory" if v1 else root
    require(os.geteuid() == 0, "only root can create control groups")
    cgroup = pathlib.Path(tempfile.mkdtemp(prefix="penroot-test-", dir=top))
    cgroup.chmod(0o755)

    def run(mib: int, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        (cgroup / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{mib}M")
        if not v1:
            (cgroup / "memory.swap.max").write_text("0")
        join = ("sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh")
        return user.run(f"{PREFIX}/bin/penroot", *words, prefix=join, status=status)

    yield run
    while (cgroup / "cgroup.procs").read_text():
        time.sleep(0.01)
    cgroup.rmdir()


@pytest.fixture
def large(user: User, rootfs: pathlib.Path) -> pathlib.Path:
    """Return a container with a file of 600 MiB that does not compress."""
    block = os.urandom(1 << 20)
    with open(rootfs / "opt/large", "wb") as f:
        for number in range(600):
            f.write(number.to_bytes(8, "big") + block[8:])
    user.own(rootfs)
    return rootfs


def squashed(user: User, tree: pathlib.Path) -> pathlib.Path:
    path = user.home / "large.sqsh"
    subprocess.run(["mksquashfs", str(tree), str(path), "-quiet", "-no-progress", "-comp", "lz4"], check=True)
    user.own(path)
    return path


@pytest.mark.security("L3")
def test_an_image_is_unpacked_within_150_mb(user: User, large: pathlib.Path, limited: Limited) -> None:
    """Before the fix, the queues of unsquashfs grew to 512 MB, and a job with less memory was killed."""
    image = squashed(user, large)
    limited(150, "create", "-n", "made", str(image))
    assert (user.data / "made/opt/large").stat().st_size == 600 << 20


@pytest.mark.security("L3")
def test_an_image_is_written_within_what_is_left(user: User, large: pathlib.Path, limited: Limited) -> None:
    """Before the fix, mksquashfs took 512 MB, whatever the job had, and was killed at the very end."""
    limited(200, "export", "-o", "made.sqsh", "box")
    shutil.rmtree(large)
    assert (user.home / "made.sqsh").stat().st_size > 500 << 20


@pytest.mark.security("L3")
def test_error_names_the_memory_that_is_missing(user: User, rootfs: pathlib.Path, limited: Limited) -> None:
    """The command fails before it reads anything, and is not killed by the OOM killer."""
    done = limited(100, "export", "box", status=1)
    assert "writing an image takes 128 MiB of memory, but only 100 MiB are allowed" in done.stderr
    assert "--mem" in done.stderr
    assert not list(user.home.glob("*.sqsh"))


@pytest.mark.security("L3")
def test_a_save_at_a_small_mem_is_kept(lab: Lab) -> None:
    """Before the fix, the OOM killer killed the save, for which the job's files in /dev/shm had left little memory."""
    write = "dd if=/dev/urandom bs=1M 2>/dev/null of="
    fill = sh(f"{write}/large count=160; {write}/dev/shm/alices count=80")
    words = ["--mem=200M", "--container-image=registry:5000#minimal:1", "--container-writable"]
    words += ["--container-save=small.sqsh", "--container-mounts=/dev/shm"]
    # Compress more slowly than the disk reads, so that data waits in memory.
    slow = {"ENROOT_SQUASH_OPTIONS": "-comp gzip -Xcompression-level 1"}
    try:
        done = lab.run(["srun", "-w", "n1", *words, *fill], check=False, env=slow)
        assert done.returncode == 0, done.stderr
        assert "not saved" not in done.stderr
        size = ["srun", "-w", "n1", "--container-image=./small.sqsh", *sh("stat -c %s /large")]
        assert lab.run(size).stdout == f"{160 << 20}\n"
    finally:
        lab.run("rm -f small.sqsh /dev/shm/alices", node="n1")


@pytest.mark.security("L3")
def test_a_save_that_cannot_be_is_refused_before_the_tasks(lab: Lab) -> None:
    """The error names the needed memory before the tasks have made anything that could be lost."""
    words = ["--mem=100M", "--container-image=registry:5000#minimal:1", "--container-save=small.sqsh"]
    done = lab.run(["srun", "-w", "n1", *words, *sh("echo ran")], check=False)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "writing an image takes 128 MiB of memory, but only 100 MiB are allowed" in done.stderr
    assert "--mem" in done.stderr
