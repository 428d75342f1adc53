from __future__ import annotations

import resource
from pathlib import Path

import pytest

from enroot_py.base import memory

MIB = 1 << 20


@pytest.mark.parametrize(
    ("names", "prefix", "none"), [(memory.V1, "total_", str(2**63 - 4096)), (memory.V2, "", "max")]
)
def test_limits_of_a_group_and_its_parents(tmp_path: Path, names: tuple[str, str, str], prefix: str, none: str) -> None:
    """The kernel's documents cgroup-v1/memory and cgroup-v2 describe the format of the files."""
    for path, limit, used in (("job", f"{300 * MIB}", 200), ("job/step", none, 120)):
        group = tmp_path / path
        group.mkdir()
        (group / names[0]).write_text(f"{limit}\n")
        (group / names[1]).write_text(f"{used * MIB}\n")
        (group / "memory.stat").write_text(
            f"cache 1\nactive_file 7\n{prefix}active_file {20 * MIB}\n{prefix}inactive_file {30 * MIB}\n"
        )
    limits = list(memory.limits(str(tmp_path), "/job/step", names))
    assert limits == [(0, 70 * MIB), (300 * MIB, 150 * MIB), (0, 0)]


def test_free_memory_is_at_most_that_of_the_machine() -> None:
    pages = resource.getpagesize()
    with open("/proc/meminfo") as f:
        total = int(f.readline().split()[1]) * 1024
    assert pages < memory.left() <= total


def test_buffers_and_threads_fit_into_free_memory() -> None:
    assert memory.share(64 << 30, 64) == (512 * MIB, 64)
    assert memory.share(250 * MIB, 64) == (93 * MIB, 7)
    assert memory.share(-1, 64) == (64 * MIB, 1)
