"""Run pyxis-py check with fake programs of Slurm releases that this machine lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_subprocess import FakeProcess

from enroot_py.base.errors import ConfigError
from enroot_py.cli.doctor import Finding
from pyxis_py.admin import check, plugstack, prebuilt
from pyxis_py.request import settings

OTHER = b"penroot plugin for Slurm 0x180b00"  # 24.11, as SLURM_VERSION_NUMBER


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with empty programs of Slurm. It is the only directory in PATH."""
    for name in ("scontrol", "slurmd", "srun"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    (tmp_path / "slurm.conf").touch()
    return tmp_path


def about_slurm(fp: FakeProcess, programs: Path, *lines: str) -> list[Finding]:
    fp.register(
        [f"{programs}/scontrol", "show", "config"], stdout=["Configuration data as of 2026-11-22T16:38:00", *lines]
    )
    return list(check._slurm(check.slurm_configuration(), settings.load(())))


@pytest.mark.clusters("Control groups, version 1 and 2")
@pytest.mark.parametrize("tracking", ["proctrack/linuxproc", "proctrack/pgid"])
def test_a_slurm_that_loses_processes(fp: FakeProcess, programs: Path, tracking: str) -> None:
    [finding] = about_slurm(fp, programs, f"ProctrackType           = {tracking}")
    assert (finding.verdict, finding.fix) == ("bad", "set ProctrackType=proctrack/cgroup in slurm.conf")
    assert f"ProctrackType={tracking} does not track the helper of a step" in finding.what


@pytest.mark.clusters("A `/tmp` for each job")
@pytest.mark.parity("check: reports a runtime_path in a directory that is private to each job")
@pytest.mark.parametrize("key", ["JobContainerType        = ", "JobContainerType=job_", "NamespaceType           = "])
@pytest.mark.parametrize(("private", "verdict"), [("/tmp,/run", "bad"), ("/tmp", "ok"), ("", "ok")])
@pytest.mark.parametrize("kind", ["tmpfs", "linux"])
def test_a_slurm_with_a_tmp_for_each_job(
    fp: FakeProcess, programs: Path, key: str, private: str, verdict: str, kind: str
) -> None:
    """Since 25.11, JobContainerType is also called NamespaceType: both names are one setting in read_config.c."""
    if private:
        (programs / "job_container.conf").write_text(
            f"AutoBasePath=true\nDirs={private if kind == 'tmpfs' else '/x'}\n"
        )
        text = f"node_confs:\n  - nodes: ['n[1-4]']\n    options: {{dirs: '{private}'}}\n"
        (programs / "namespace.yaml").write_text(f"defaults: {{dirs: /dev/shm}}\n{text}")
    [finding] = about_slurm(fp, programs, f"{key}container/{kind}", f"SLURM_CONF              = {programs}/slurm.conf")
    assert finding.verdict == verdict
    assert finding.what.startswith("runtime_path=/run/")


@pytest.mark.clusters("A `/tmp` for each job")
def test_directories_of_dir_confs_are_private(fp: FakeProcess, programs: Path) -> None:
    """Slurm 26.11 knows dir_confs: namespace.yaml(5)."""
    directories = "dir_confs: [{path: /tmp, tmpfs: true}, {path: /run, base_path: /nvme}]"
    (programs / "namespace.yaml").write_text(f"defaults:\n  {directories}\n")
    configuration = ("NamespaceType=namespace/linux", f"SLURM_CONF = {programs}/slurm.conf")
    [finding] = about_slurm(fp, programs, *configuration)
    assert finding.verdict == "bad" and "is in /run, which" in finding.what


def test_a_slurm_where_jobs_share_tmp(fp: FakeProcess, programs: Path) -> None:
    assert about_slurm(fp, programs, "JobContainerType        = (null)", "NamespaceType           = (null)") == []


# ---- the location of plugstack.conf


@pytest.fixture
def copy(programs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory for the copy of slurmctld's files. This machine has its own slurm.conf in ``programs``."""
    directory = programs / "run"
    directory.mkdir()
    (directory / "slurm.conf").touch()
    monkeypatch.setattr(plugstack, "CACHE", str(directory))
    return directory


@pytest.mark.parity("check: finds the plugstack.conf that Slurm reads")
def test_default_path_is_beside_slurm_conf(fp: FakeProcess, programs: Path) -> None:
    """If PlugStackConfig has its default, all releases of scontrol print "(null)": config_info.c."""
    about_slurm(fp, programs, "PlugStackConfig         = (null)", f"SLURM_CONF              = {programs}/slurm.conf")
    fp.register([f"{programs}/scontrol", "show", "config"], stdout=[f"SLURM_CONF = {programs}/slurm.conf"])
    assert plugstack.files(check.slurm_configuration()) == [f"{programs}/plugstack.conf"]
    assert plugstack.files({"PlugStackConfig": "/x/stack"}) == ["/x/stack"]


@pytest.mark.parity("check: finds the plugstack.conf that Slurm reads")
def test_srun_and_slurmd_may_read_two_files(programs: Path, copy: Path) -> None:
    """slurmd --conf-server reads the copy of slurmctld's files, but srun reads the machine's own slurm.conf."""
    slurm = {"SLURM_CONF": f"{programs}/slurm.conf"}
    assert plugstack.files(slurm) == [f"{programs}/plugstack.conf", f"{copy}/plugstack.conf"]
    (programs / "slurm.conf").unlink()
    assert plugstack.files(slurm) == [f"{copy}/plugstack.conf"]
    (copy / "slurm.conf").unlink()
    assert plugstack.files(slurm) == []


def test_path_in_plugstackconfig_hides_the_sent_file(programs: Path, copy: Path) -> None:
    """spank_stack_init() opens the path of PlugStackConfig, and does not search the copy of slurmctld's files."""
    [finding] = check._loaded(f"{programs}/none/plugstack.conf", [])
    assert finding.verdict == "bad" and "instead of slurmctld's copy" in finding.what
    assert "remove PlugStackConfig from slurm.conf" in finding.fix


@pytest.mark.parametrize(("written", "sent"), [("SlurmctldParameters=x,enable_configless", True), ("#{}", False)])
def test_a_slurmctld_that_sends_files(programs: Path, written: str, sent: bool) -> None:
    (programs / "slurm.conf").write_text("ClusterName=c\nInclude more.conf\n")
    (programs / "more.conf").write_text(written.format("SlurmctldParameters=enable_configless") + "\n")
    assert plugstack.is_sent(f"{programs}/plugstack.conf") is sent


def test_the_line_goes_into_a_file_that_is_sent(programs: Path) -> None:
    path = programs / "plugstack.conf"
    path.write_text("# the site's\ninclude plugstack.conf.d/*\n")
    path.chmod(0o640)
    plugstack.configure_sent(str(path), "/lib/spank_pyxis.so", ["container_scope=job"])
    [line] = plugstack.stack(str(path))
    assert (line.path, line.arguments, line.number) == ("/lib/spank_pyxis.so", ("container_scope=job",), 3)
    assert path.stat().st_mode & 0o777 == 0o640
    plugstack.configure_sent(str(path), "/lib/spank_pyxis.so", ())
    assert path.read_text().count("\n") == 3
    plugstack.check_unused("/lib/spank_pyxis.so", f"{programs}/plugstack.conf.d")
    assert plugstack.unconfigure_sent(str(path), "/lib/spank_pyxis.so") == [f"the line in {path}"]
    assert path.read_text() == "# the site's\ninclude plugstack.conf.d/*\n"


def test_line_through_a_version_link_is_removed_too(programs: Path) -> None:
    """A line for a removed plugin must not remain: Slurm runs no job while a required plugin is missing."""
    for version in ("1.0", "2.0"):
        (programs / version).mkdir()
        (programs / version / "spank_pyxis.so").touch()
    (programs / "link").symlink_to("1.0")
    directory = programs / "plugstack.conf.d"
    written = plugstack.configure(str(directory), f"{programs}/link/spank_pyxis.so", ())
    assert plugstack.unconfigure(str(directory), f"{programs}/2.0/spank_pyxis.so") == []
    (programs / "plugstack.conf").write_text(f"required {programs}/link/spank_pyxis.so # the site's\n")
    with pytest.raises(ConfigError, match=r"plugstack\.conf:1 loads "):
        plugstack.check_unused(f"{programs}/1.0/spank_pyxis.so", str(directory))
    assert plugstack.unconfigure(str(directory), f"{programs}/1.0/spank_pyxis.so") == [written]


def test_second_line_for_the_plugin_is_refused(programs: Path) -> None:
    """Slurm would load the plugin twice, and refuse the options of the second copy."""
    path = programs / "plugstack.conf"
    path.write_text("include plugstack.conf.d/*\n")
    plugstack.configure(f"{programs}/plugstack.conf.d", "/lib/spank_pyxis.so", ())
    with pytest.raises(ConfigError, match=r"pyxis.conf:1 loads /lib/spank_pyxis.so") as caught:
        plugstack.configure_sent(str(path), "/lib/spank_pyxis.so", ())
    assert "slurmctld sends only" in caught.value.hint


def test_line_of_the_site_stays(programs: Path) -> None:
    path = programs / "plugstack.conf"
    path.write_text("required /lib/spank_pyxis.so\n")
    assert plugstack.unconfigure_sent(str(path), "/lib/spank_pyxis.so") == []
    with pytest.raises(ConfigError, match="plugstack.conf:1 loads"):
        plugstack.check_unused("/lib/spank_pyxis.so", f"{programs}/plugstack.conf.d")


def test_programs_that_fail_are_ignored(fp: FakeProcess, programs: Path) -> None:
    refused = "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)"
    fp.register([f"{programs}/scontrol", "show", "config"], stderr=[refused], returncode=1)
    assert check.slurm_configuration() == {}
    fp.register([f"{programs}/slurmd", "-V"], returncode=1, stderr=["slurmd: fatal"])
    fp.register([f"{programs}/srun", "-V"], stdout=["slurm 23.11.4"])
    assert prebuilt.installed() == "23.11.4"


@pytest.mark.parametrize(
    ("version", "verdict"), [("slurm 24.11.5", "ok"), ("slurm-wlm 24.11.5", "ok"), ("slurm 25.05.0", "bad")]
)
def test_the_plugin_and_the_slurm_of_the_node(fp: FakeProcess, programs: Path, version: str, verdict: str) -> None:
    plugin = programs / "spank_pyxis.so"
    plugin.write_bytes(OTHER)
    fp.register([f"{programs}/slurmd", "-V"], stdout=[version])
    [finding] = check._loaded("plugstack.conf", [check.Line("plugstack.conf", 1, str(plugin), ())])
    assert finding.verdict == verdict
    assert finding.what.endswith(
        f", for Slurm {version.split()[1]}" if verdict == "ok" else "for Slurm 24.11, this is 25.05.0"
    )
