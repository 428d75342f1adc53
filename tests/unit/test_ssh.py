"""Resolve names of jobs with squeue, and make and remove the keys of a job."""

from __future__ import annotations

import os
import pathlib
import re
import stat
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from enroot_py.base.errors import ContainerError, PenrootError
from pyxis_py.features.ssh import jobs, sshkeys
from pyxis_py.features.ssh.sshkeys import JobKeys
from pyxis_py.features.ssh.verbs import ssh_config

ME = os.geteuid()


@pytest.fixture
def slurm(fp: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fake the programs of Slurm. In the lab of the tests, no node can be down while a job runs on it."""
    monkeypatch.setattr(jobs, "find", lambda program, package: program)
    fp.allow_unregistered(False)
    fp.keep_last_process(True)
    fp.register(["scontrol", "show", "hostnames", fp.any()], stdout="n1\nn2\n")
    return fp


def squeue(slurm: Any, *lines: str) -> None:
    slurm.register(["squeue", slurm.any()], stdout="".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("state", ["down", "down*", "mixed*"])
def test_a_node_that_is_down(slurm: Any, state: str) -> None:
    squeue(slurm, f"42|42|{ME}|RUNNING|n[1-2]|None|a|b")
    slurm.register(["sinfo", slurm.any()], stdout=f"{state}\n")
    with pytest.raises(ContainerError, match=rf"job 42: node n2 is {state.replace('*', '.')}$") as raised:
        jobs.destination("42.n2")
    assert raised.value.hint == "sinfo --nodes n2 --list-reasons"


def test_an_element_of_an_array(slurm: Any) -> None:
    squeue(slurm, f"50|42_7|{ME}|RUNNING|n[1-2]|None|a|b")
    slurm.register(["sinfo", slurm.any()], stdout="mixed\n")
    destination = jobs.destination("42_7")
    assert (destination.job.number, destination.job.name) == ("50", "a|b")
    assert (destination.node, destination.container) == ("n1", "")


def test_job_names_of_other_users_are_not_queried(slurm: Any) -> None:
    """A name with a line break could look like a line about a job of this user."""
    squeue(slurm, f"42|42|{ME}|RUNNING|n1|None|")
    jobs.job("42")
    assert "%j" not in "".join(slurm.calls[-1])


def test_line_breaks_in_names(slurm: Any) -> None:
    squeue(slurm, f"42|42|{ME}|RUNNING|n1|None|a\nb|c", f"43|43|{ME}|RUNNING|n1|None|train")
    assert jobs.job("train").number == "43"


def test_variables_that_make_squeue_show_less(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, fp: Any) -> None:
    """If squeue obeyed such variables, the keys of running jobs would be removed."""
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n[ \"$SQUEUE_STATES\" ] || echo '42|42|{ME}|RUNNING|n1|None|a'\n")
    squeue.chmod(0o755)
    fp.allow_unregistered(True)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    assert [job.number for job in jobs.mine()] == ["42"]


HOSTILE = ("x\ntouch\n.cluster", "x y.cluster", "x.cluster")


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("name", HOSTILE)
def test_host_name_is_not_run_as_a_command(tmp_path: pathlib.Path, name: str, shell: str) -> None:
    """With ssh before 9.6, a shell runs parts of these names as commands. Such a command would leave a file."""
    (tmp_path / "home/.ssh").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for program, does in (("ssh", 'echo "$@" > asked'), ("touch", "echo > ran"), ("y.cluster", "echo > ran")):
        (tmp_path / "bin" / program).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / program).chmod(0o755)
    done = CliRunner().invoke(ssh_config, ["login"])
    match = re.search(r'^Match originalhost "\*\.cluster,(.*?)" exec "(.*)"$', done.output, re.M)
    assert match, done.output
    assert set(match[1].replace("!*", "").replace("*", "").replace(",", "")) == set("$`;&|<>()' ")
    environ = {"HOME": f"{tmp_path}/home", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    subprocess.run([shell, "-c", match[2].replace("%n", name)], env=environ, cwd=tmp_path, check=False)
    assert (tmp_path / "home/.ssh/asked").read_text().split()[-2:] == ["ssh-key", name.split()[0]]
    assert not list(tmp_path.rglob("ran"))


def test_a_name_of_several_jobs(slurm: Any) -> None:
    squeue(
        slurm, f"42|42|{ME}|RUNNING|n1|None|train", f"43|43|{ME}|RUNNING|n1|None|train", f"44|44|{ME}|PENDING||x|train"
    )
    with pytest.raises(ContainerError, match=r"the name train matches several jobs: 42, 43$"):
        jobs.destination("train")


def test_keys_are_private_and_made_once(tmp_path: pathlib.Path) -> None:
    keys = JobKeys(str(tmp_path), "lab", "42")
    keys.make()
    first = keys.for_client()
    keys.make()
    assert keys.for_client() == first
    for path in (keys.parent, keys.path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    (tmp_path / "key").write_bytes(first)
    (tmp_path / "key").chmod(0o600)
    shown = subprocess.run(["ssh-keygen", "-y", "-f", tmp_path / "key"], capture_output=True, text=True, check=True)
    assert shown.stdout == pathlib.Path(keys.path, "user.pub").read_text()
    listed = subprocess.run(["ssh-keygen", "-F", "penroot", "-f", tmp_path / "key"], capture_output=True, check=True)
    assert pathlib.Path(keys.path, "host.pub").read_bytes().split()[1] in listed.stdout


def test_keys_of_other_jobs_are_removed(tmp_path: pathlib.Path) -> None:
    """Keys of the given jobs and of other clusters stay."""
    for cluster, job in (("lab", "41"), ("lab", "42"), ("lab-2", "7"), ("lab", "43")):
        JobKeys(str(tmp_path), cluster, job).make()
    (tmp_path / "ssh/.new-lab.41-x").mkdir()
    JobKeys(str(tmp_path), "lab", "42").forget_all_but({"42", "43"})
    assert sorted(os.listdir(tmp_path / "ssh")) == ["lab-2.7", "lab.42", "lab.43"]


def test_nothing_but_keys_is_removed(tmp_path: pathlib.Path) -> None:
    for name, stays in (("home/lab.42", True), ("ssh/papers", True), ("ssh/lab.43", True), ("ssh/lab.42", False)):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        (directory / "user").touch()
        sshkeys.remove(str(directory), "42")
        assert (directory / "user").exists() == stays, name
    (tmp_path / "ssh/lab.42").symlink_to("papers")
    sshkeys.remove(f"{tmp_path}/ssh/lab.42", "42")
    assert (tmp_path / "ssh/papers/user").exists()


@pytest.mark.parametrize(("mode", "access"), [(0o757, "written"), (0o755, "read"), (0o711, "read")])
def test_a_directory_that_others_see_is_refused(tmp_path: pathlib.Path, mode: int, access: str) -> None:
    (tmp_path / "ssh").mkdir()
    (tmp_path / "ssh").chmod(mode)
    with pytest.raises(PenrootError, match=rf"cannot keep keys in .*/ssh: can be {access} by others") as raised:
        JobKeys(str(tmp_path), "lab", "42").make()
    assert raised.value.hint == f"make it private: chmod 700 {tmp_path}/ssh"


def test_without_asyncssh(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    with pytest.raises(PenrootError, match="^ssh needs the Python library asyncssh, which is not installed$"):
        JobKeys(str(tmp_path), "lab", "42").make()
    assert os.listdir(tmp_path / "ssh") == []
