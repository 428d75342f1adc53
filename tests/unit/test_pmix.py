"""PMIx in containers. A step that would hang because of root in a user namespace is refused before a task starts."""

from __future__ import annotations

import pathlib

import pytest

from enroot_py.base.errors import ConfigError
from enroot_py.runtime import pmix

NATIVE = {"SLURM_MPI_TYPE": "pmix", "PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_SECURITY_MODE": "native"}
MUNGE = {**NATIVE, "PMIX_SECURITY_MODE": "munge,native"}


def test_several_tasks_are_refused_without_munge() -> None:
    """A single task need not be an MPI program, so it gets only a warning. Steps without PMIx are not affected."""
    with pytest.raises(ConfigError, match="PMIX_SECURITY_MODE=native") as caught:
        pmix.check_root(NATIVE, 2)
    assert "--no-container-remap-root" in caught.value.hint and "--mpi=none" in caught.value.hint
    assert "MPI will not work" in pmix.check_root(NATIVE, 1)
    assert pmix.check_root({**NATIVE, "SLURM_MPI_TYPE": "none"}, 2) == pmix.check_root({}, 2) == ""


@pytest.mark.parity("50-slurm-pmi")
def test_munge_is_mounted_if_it_is_offered(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmix, "MUNGE", str(tmp_path))
    assert pmix.check_root(MUNGE, 2) == ""
    assert [path for path, _, _ in pmix.directories(MUNGE, remap_root=True)] == [str(tmp_path)]
    assert pmix.directories(MUNGE, remap_root=False) == pmix.directories(NATIVE, remap_root=True) == []
    monkeypatch.setattr(pmix, "MUNGE", f"{tmp_path}/none")
    with pytest.raises(ConfigError, match="start munged"):
        pmix.check_root(MUNGE, 2)


def libraries(*names: str, search: str = "") -> pmix.Libraries:
    return pmix.Libraries(lambda path: path.rpartition("/")[2] in names, search)


def test_libraries_are_searched_as_by_the_loader() -> None:
    paths: list[str] = []
    pmix.Libraries(lambda path: bool(paths.append(path)), "/opt/mpi/lib::/x").have("libmpi.so.40")
    assert paths[:2] == ["/opt/mpi/lib/libmpi.so.40", "/x/libmpi.so.40"]
    assert "/usr/lib64/libmpi.so.40" in paths


def test_credential_that_the_image_lacks_is_not_requested() -> None:
    everything = libraries("libpmix.so.2", "libmunge.so.2")
    assert pmix.security(MUNGE, everything, remap_root=True) == {"PMIX_SECURITY_MODE": "munge,native"}
    assert pmix.security(NATIVE, libraries("libpmix.so.2"), remap_root=False) == {"PMIX_SECURITY_MODE": "native"}
    assert pmix.security(MUNGE, libraries("libpmix.so.2"), remap_root=False) == {"PMIX_SECURITY_MODE": "native"}
    assert pmix.security({}, libraries(), remap_root=True) == {}


@pytest.mark.parametrize(
    ("offered", "used"), [("shmem2,hash", "hash"), ("shmem2", "hash"), ("ds21,hash", None), (None, None)]
)
def test_shared_memory_of_the_launcher_is_not_used(offered: str | None, used: str | None) -> None:
    environ = NATIVE if offered is None else {**NATIVE, "PMIX_GDS_MODULE": offered}
    assert pmix.fitted(environ, libraries(), remap_root=False).get("PMIX_GDS_MODULE") == used


def test_copy_by_a_hook_differs_from_a_value_of_the_user() -> None:
    """A PMIX_MCA variable is a hook's copy only if it equals the variable from Slurm."""
    server = {**MUNGE, "PMIX_GDS_MODULE": "shmem2,hash"}
    assert pmix.is_copy("PMIX_MCA_psec", "munge,native", server)
    assert not pmix.is_copy("PMIX_MCA_gds", "hash", server)
    assert not pmix.is_copy("PMIX_MCA_ptl", "tcp", server)


@pytest.mark.parity("PMIx 3 and 5 in the image work with Slurm's PMIx 4")
@pytest.mark.parametrize(("offered", "root"), [("munge", False), ("munge", True), ("munge,native", True)])
def test_no_credential_in_common_is_refused(offered: str, root: bool) -> None:
    environ = {**MUNGE, "PMIX_SECURITY_MODE": offered}
    with pytest.raises(ConfigError, match=r"no libmunge\.so\.2") as caught:
        pmix.security(environ, libraries("libpmix.so.2"), remap_root=root)
    assert ("do not become root in the container" in caught.value.hint) == root
    assert ("mpi.conf" in caught.value.hint) == (offered == "munge")
    # Without a PMIx library in the image, nothing is refused.
    assert "munge" not in str(pmix.security(environ, libraries(), remap_root=root))


def test_mpirun_under_srun_uses_another_server() -> None:
    started = {**NATIVE, "SLURM_MPI_TYPE": "none"}
    assert not pmix.used(started)
    assert pmix.used({**started, "OMPI_COMM_WORLD_RANK": "0"})
