"""pyxis-py check: a working node has no errors, and each defect is named with its fix."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest

from enroot_py.cli.doctor import selinux
from tests.installation import LIBRARY, PREFIX
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, srun

CHECK = f"{PREFIX}/bin/pyxis-py check"
PLUGIN = f"{LIBRARY}/spank_pyxis.so"


def check(lab: Lab, script: str = CHECK, user: str = "root") -> str:
    """Run a check on n1, which must fail, and return its report."""
    done = lab.run(["sh", "-ec", script], node="n1", user=user, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def directory(lab: Lab) -> Iterator[str]:
    lab.run("mkdir /tmp/check", node="n1", user="root")
    yield "/tmp/check"
    lab.run("rm -r /tmp/check", node="n1", user="root")


def with_stack(directory: str, *lines: str) -> str:
    text = "\\n".join(lines)
    return f"printf '{text}\\n' > {directory}/plugstack.conf; {CHECK} --plugstack {directory}/plugstack.conf"


@pytest.fixture(scope="module", autouse=True)
def unconfigured(lab: Lab) -> Iterator[subprocess.Popen[str]]:
    """Start a check without Slurm's configuration. It waits long for slurmctld, so start it before all tests."""
    script = f"SLURM_CONF=/no/such exec {CHECK} --plugstack /etc/slurm/plugstack.conf"
    begun = lab.popen(["sh", "-c", script], node="n1", user="root")
    yield begun
    begun.communicate(timeout=250)


@pytest.mark.parity("check: a good node")
@pytest.mark.parametrize("user", ["root", "alice"])
def test_a_node_of_the_lab_is_good(lab: Lab, user: str) -> None:
    out = lab.run(CHECK, node="n1", user=user).stdout
    # Ignore lines about squashfuse and Yama: they differ between distributions, and do not affect a step.
    lines = [line for line in out.splitlines() if not re.search("squashfuse 0.5|one thread|ptrace_scope", line)]
    assert all(line.startswith("ok ") for line in lines), out
    assert any(f"loads {PLUGIN}, for Slurm" in line for line in lines)
    assert any("can mount an overlay" in line for line in lines)
    assert any("ProctrackType=proctrack/cgroup" in line for line in lines)


@pytest.mark.clusters("A kernel that says no")
@pytest.mark.parity("check: reports problems of the kernel")
def test_no_user_namespaces(lab: Lab, directory: str) -> None:
    # Each user namespace has its own limit. Run the check in a user namespace that maps all users, with the limit 0.
    mapped = f"""
        mkfifo {directory}/mapped
        unshare -U sh -c 'read line < {directory}/mapped
            exec sh -c "echo 0 > /proc/sys/user/max_user_namespaces; exec {CHECK}"' &
        until [ "$(readlink /proc/$!/ns/user)" != "$(readlink /proc/self/ns/user)" ]; do sleep 0.05; done
        echo 0 0 65536 > /proc/$!/uid_map
        echo 0 0 65536 > /proc/$!/gid_map
        echo go > {directory}/mapped
        wait $!
    """
    out = check(lab, mapped)
    assert "bad  user.max_user_namespaces is 0" in out
    assert "fix: echo user.max_user_namespaces=15000" in out
    assert "bad  an ordinary user cannot start a container: cannot create a user namespace" in out


@pytest.mark.clusters("A kernel that says no")
@pytest.mark.parity("check: reports problems of the kernel")
def test_fuse_is_closed_to_users(lab: Lab, directory: str) -> None:
    closed = f"mknod -m 600 {directory}/fuse c 10 229; mount --bind {directory}/fuse /dev/fuse"
    out = check(lab, f"unshare -m sh -ec '{closed}; {CHECK}'")
    assert "bad  /dev/fuse has mode 0600" in out
    assert "chmod 666 /dev/fuse" in out


@pytest.mark.parity("check: reports problems of the kernel")
def test_squashfuse_is_not_installed(lab: Lab) -> None:
    hide = "mount --bind /dev/null /usr/bin/squashfuse_ll; mount --bind /dev/null /usr/bin/squashfuse"
    out = check(lab, f"unshare -m sh -ec '{hide}; {CHECK}'")
    assert "bad  squashfuse is not installed" in out


@pytest.mark.parity("check: reports mistakes in plugstack.conf")
def test_the_plugin_is_not_loaded(lab: Lab, directory: str) -> None:
    out = check(lab, with_stack(directory, "optional /x/auto_tmpdir.so"))
    assert "does not load spank_pyxis.so" in out
    assert "fix: pyxis-py install" in out


@pytest.mark.parity("check: reports mistakes in plugstack.conf")
def test_the_plugin_is_of_another_slurm(lab: Lab, directory: str) -> None:
    other = r"s/\(penroot plugin for Slurm 0x\)....../\1120304/"
    script = f"sed '{other}' {PLUGIN} > {directory}/spank_pyxis.so; "
    out = check(lab, script + with_stack(directory, f"required {directory}/spank_pyxis.so"))
    assert f"bad  {directory}/spank_pyxis.so is for Slurm 18.03, this is" in out


def test_a_file_that_is_not_there(lab: Lab, directory: str) -> None:
    out = check(lab, with_stack(directory, "required /no/such/spank_pyxis.so"))
    assert f"bad  {directory}/plugstack.conf:1: /no/such/spank_pyxis.so: No such file or directory" in out


def test_user_missing_in_the_user_database(lab: Lab) -> None:
    """The check also works for a user id without an account."""
    as_user = "setpriv --reuid=27001 --regid=27001 --clear-groups -- env HOME=/tmp"
    assert "containers are in" in check(lab, f"{as_user} {CHECK} --plugstack /no/such")


def test_full_disk_is_reported(lab: Lab) -> None:
    done = lab.run(f"{CHECK} > /dev/full", node="n1", user="root", check=False)
    assert done.stderr == "[ERROR] cannot write or read the output: No space left on device\n"
    assert done.returncode == 1


def test_arguments_that_slurm_would_stumble_on(lab: Lab, directory: str) -> None:
    out = check(lab, with_stack(directory, f"required {PLUGIN} runtime=/x"))
    assert "unknown argument" in out
    assert "known are runtime_path" in out


@pytest.mark.parity("check: reports mistakes in plugstack.conf")
def test_the_plugin_is_loaded_twice(lab: Lab, directory: str) -> None:
    out = check(lab, with_stack(directory, f"required {PLUGIN}", f"required {PLUGIN}"))
    assert "loaded more than once" in out


@pytest.mark.clusters("A `/tmp` for each job")
@pytest.mark.parity("check: reports mistakes in plugstack.conf")
def test_a_private_tmp_that_comes_later(lab: Lab, directory: str) -> None:
    script = with_stack(directory, f"required {PLUGIN}", "optional /usr/lib/slurm/auto_tmpdir.so")
    out = lab.run(["sh", "-c", script], node="n1", user="root").stdout  # a warning only: exit status 0
    assert "warn" in out
    assert "comes after spank_pyxis.so: containers have the node's /tmp" in out


@pytest.mark.clusters("A kernel that says no")
@pytest.mark.parity("check: reports problems of the kernel")
def test_a_place_without_execution(lab: Lab, directory: str) -> None:
    mount = f"mount -t tmpfs -o noexec none {directory}"
    out = check(lab, f"unshare -m sh -ec '{mount}; ENROOT_DATA_PATH={directory}/data {CHECK}'")
    assert f"bad  containers are in {directory}/data, mounted noexec" in out
    assert "ENROOT_DATA_PATH" in out


@pytest.mark.clusters("Control groups, version 1 and 2")
@pytest.mark.parity("check: reports SELinux")
def test_the_device_cgroup_denies_fuse(lab: Lab, directory: str) -> None:
    if not os.path.isdir("/sys/fs/cgroup/devices"):
        pytest.skip("no device cgroup of version 1")
    cgroup = "/sys/fs/cgroup/devices/check"
    enter = f"mkdir {cgroup}; echo c 10:229 rwm > {cgroup}/devices.deny; echo $$ > {cgroup}/cgroup.procs"
    leave = "echo $$ > /sys/fs/cgroup/devices/cgroup.procs"
    out = check(lab, f"{enter}; {CHECK} || failed=1; {leave}; rmdir {cgroup}; exit ${{failed:-0}}")
    assert "bad  the device cgroup of this process denies /dev/fuse" in out
    assert "ConstrainDevices=no" in out


@pytest.mark.parity("check: reports SELinux")
def test_proc_hides_processes(lab: Lab, directory: str) -> None:
    script = f"unshare -m sh -ec 'mount -t proc -o hidepid=2 proc /proc; {CHECK}'"
    out = lab.run(["sh", "-ec", script], node="n1", user="root").stdout  # a warning only: exit status 0
    assert "warn /proc is mounted with hidepid=" in out
    assert "mount -o remount,hidepid=0 /proc" in out


@pytest.mark.clusters("A kernel that says no")
def test_steps_run_where_proc_hides_processes(lab: Lab) -> None:
    lab.run(["mount", "-o", "remount,hidepid=2", "/proc"], node="n1", user="root")
    try:
        assert srun(lab, IMAGE, "-n2", "--container-writable", "pwd") == "/srv/work\n" * 2
    finally:
        lab.run(["mount", "-o", "remount,hidepid=0", "/proc"], node="n1", user="root")


@pytest.mark.clusters("Few inodes, or a quota of files")
@pytest.mark.parity("check: reports SELinux")
def test_a_quota_of_files(lab: Lab, directory: str) -> None:
    mount = f"mount -t tmpfs -o usrquota,usrquota_inode_hardlimit=500,mode=1777 none {directory}"
    as_alice = f"setpriv --reuid=alice --clear-groups env ENROOT_DATA_PATH={directory} {CHECK}"
    script = f"unshare -m sh -ec '{mount}; exec {as_alice}'"
    if lab.run(["sh", "-ec", f"unshare -m {mount}"], node="n1", user="root", check=False).returncode:
        pytest.skip("this kernel has no quota on tmpfs")
    out = check(lab, script)
    assert f"bad  {directory} has room for 500 files (your quota)" in out
    assert "setquota" in out


@pytest.mark.clusters("Few inodes, or a quota of files")
@pytest.mark.parity("check: reports SELinux")
def test_a_file_system_with_few_inodes(lab: Lab, directory: str) -> None:
    mount = f"mount -t tmpfs -o nr_inodes=20000,mode=700 none {directory}"
    script = f"unshare -m sh -ec '{mount}; ENROOT_DATA_PATH={directory} {CHECK}'"
    out = lab.run(["sh", "-ec", script], node="n1", user="root").stdout  # a warning only: exit status 0
    assert f"warn {directory} has room for 19999 files (the file system)" in out


@pytest.mark.clusters("Homes on NFS, a local disk in each node")
@pytest.mark.parity("check: reports SELinux")
def test_root_is_nobody_in_homes(lab: Lab) -> None:
    # A user's FUSE mount is closed to root, like a home on NFS with root_squash: fuse(4), allow_other.
    lab.run("mkdir -p home/in; echo 1 > home/in/file; mksquashfs home/in home.sqsh -quiet; mkdir -p mounted", node="n1")
    closed = "squashfuse home.sqsh mounted"
    done = lab.run(closed, node="n1", check=False)
    try:
        if done.returncode:
            pytest.skip(f"users cannot mount by FUSE here: {done.stderr}")
        script = "from pyxis_py.admin.check import root_squash; print(*root_squash('/home/alice/mounted'))"
        begin = f"import sys; sys.path.insert(0, '{LIBRARY}'); "
        out = lab.run(["/usr/bin/python3", "-c", begin + script], node="n1", user="root").stdout
        assert "verdict='warn'" in out
        assert "out of home directories" in out
    finally:
        # As root: fusermount needs an /etc/mtab, which a small Debian lacks.
        lab.run("umount -l /home/alice/mounted", node="n1", user="root", check=False)
        lab.run("rm -rf home home.sqsh mounted", node="n1")


def test_the_configuration_of_slurm_is_not_there(lab: Lab, unconfigured: subprocess.Popen[str]) -> None:
    """Without its configuration, not even srun -V works. The check warns, and asks slurmd for the version."""
    out, err = unconfigured.communicate(timeout=250)
    assert (unconfigured.returncode, err) == (0, "")  # a warning only
    assert "warn scontrol cannot show the configuration of Slurm" in out
    assert f"loads {PLUGIN}, for Slurm" in out


@pytest.mark.clusters("A kernel that says no")
@pytest.mark.parity("check: reports SELinux")
@pytest.mark.parametrize(("enforce", "verdict"), [("1", ["warn"]), ("0", ["ok"]), (None, [])])
def test_selinux(tmp_path: pathlib.Path, enforce: str | None, verdict: list[str]) -> None:
    if enforce:
        (tmp_path / "enforce").write_text(enforce)
    found = list(selinux(str(tmp_path)))
    assert [finding.verdict for finding in found] == verdict
    assert all("audit2allow" in finding.fix for finding in found if finding.verdict == "warn")
