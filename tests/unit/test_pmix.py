"""PMIx and root of a user namespace: what would hang is refused before a task starts."""

import pathlib

import pytest

from enroot_py import pmix
from enroot_py.errors import ConfigError

NATIVE = {"SLURM_MPI_TYPE": "pmix", "PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_SECURITY_MODE": "native"}
MUNGE = {**NATIVE, "PMIX_SECURITY_MODE": "munge,native"}


def test_several_tasks_are_refused_without_munge() -> None:
    with pytest.raises(ConfigError, match="PMIX_SECURITY_MODE=native") as caught:
        pmix.check_root(NATIVE, 2)
    assert "--no-container-remap-root" in caught.value.hint
    assert "--mpi=none" in caught.value.hint


def test_one_task_may_be_no_mpi_program() -> None:
    assert "MPI will not work" in pmix.check_root(NATIVE, 1)


def test_other_steps_are_none_of_it() -> None:
    assert pmix.check_root({**NATIVE, "SLURM_MPI_TYPE": "none"}, 2) == ""
    assert pmix.check_root({}, 2) == ""


def test_munge_is_mounted_where_it_is_offered(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmix, "_MUNGE", str(tmp_path))
    assert pmix.check_root(MUNGE, 2) == ""
    assert [path for path, _, _ in pmix.directories(MUNGE, remap_root=True)] == [str(tmp_path)]
    assert pmix.directories(MUNGE, remap_root=False) == []
    assert pmix.directories(NATIVE, remap_root=True) == []


def test_a_node_without_munged_is_said_so(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmix, "_MUNGE", f"{tmp_path}/none")
    with pytest.raises(ConfigError, match="munged must run there"):
        pmix.check_root(MUNGE, 2)
