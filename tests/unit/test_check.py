"""pyxis-py check beside Slurms that this machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_subprocess import FakeProcess

from enroot_py.cli.doctor import Finding
from pyxis_py import check, settings

OTHER = b"penroot plugin for Slurm 0x180b00"  # 24.11, as SLURM_VERSION_NUMBER


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the programs of Slurm, and no other in PATH."""
    for name in ("scontrol", "slurmd", "srun"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def about_slurm(fp: FakeProcess, programs: Path, *lines: str) -> list[Finding]:
    fp.register(
        [f"{programs}/scontrol", "show", "config"], stdout=["Configuration data as of 2026-11-22T16:38:00", *lines]
    )
    return list(check._slurm(check.slurm_configuration(), settings.load(())))


@pytest.mark.parametrize("tracking", ["proctrack/linuxproc", "proctrack/pgid"])
def test_a_slurm_that_loses_processes(fp: FakeProcess, programs: Path, tracking: str) -> None:
    [found] = about_slurm(fp, programs, f"ProctrackType           = {tracking}")
    assert (found.verdict, found.fix) == ("bad", "ProctrackType=proctrack/cgroup in slurm.conf")
    assert f"ProctrackType={tracking} loses the helper of a step" in found.what


@pytest.mark.parametrize(
    "written", ["JobContainerType        = job_container/tmpfs", "JobContainerType=job_container/tmpfs"]
)
@pytest.mark.parametrize(("private", "verdict"), [("/tmp,/run", "bad"), ("/tmp", "ok"), ("", "ok")])
def test_a_slurm_with_a_tmp_for_each_job(
    fp: FakeProcess, programs: Path, written: str, private: str, verdict: str
) -> None:
    (programs / "job_container.conf").write_text(f"AutoBasePath=true\nDirs={private}\n" if private else "")
    [found] = about_slurm(fp, programs, written, f"SLURM_CONF              = {programs}/slurm.conf")
    assert found.verdict == verdict
    assert found.what.startswith("runtime_path=/run/")


def test_a_slurmctld_that_does_not_answer(fp: FakeProcess, programs: Path) -> None:
    refused = "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)"
    fp.register([f"{programs}/scontrol", "show", "config"], stderr=[refused], returncode=1)
    assert check.slurm_configuration() == {}


@pytest.mark.parametrize(
    ("version", "verdict"), [("slurm 24.11.5", "ok"), ("slurm-wlm 24.11.5", "ok"), ("slurm 25.05.0", "bad")]
)
def test_the_plugin_and_the_slurm_of_the_node(fp: FakeProcess, programs: Path, version: str, verdict: str) -> None:
    plugin = programs / "spank_pyxis.so"
    plugin.write_bytes(OTHER)
    fp.register([f"{programs}/slurmd", "-V"], stdout=[version])
    ours = [check.Line("plugstack.conf:1", str(plugin), ())]
    [found] = check._loaded(ours, ours, "plugstack.conf")
    assert found.verdict == verdict
    assert found.what.endswith(
        f", for Slurm {version.split()[1]}" if verdict == "ok" else "for Slurm 24.11, this is 25.05.0"
    )


def test_srun_is_asked_where_slurmd_does_not_tell(fp: FakeProcess, programs: Path) -> None:
    fp.register([f"{programs}/slurmd", "-V"], returncode=1, stderr=["slurmd: fatal"])
    fp.register([f"{programs}/srun", "-V"], stdout=["slurm 23.11.4"])
    assert check._installed() == "23.11.4"
