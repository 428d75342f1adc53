"""The Ansible role with packages and with the archive: two runs on two nodes, and an upgrade while a step runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from packages import place
from tests.installation import PREFIX
from tests.roles import ANSIBLE, HOME, Site, changed, site
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, end, expect, sh

SETTINGS = {"enroot_config": "ENROOT_CACHE_PATH /var/tmp/enroot-cache-$(id -u)\nENROOT_ALLOW_HTTP yes\n"}
SETTINGS |= {"enroot_data_path": "/var/tmp/enroot-data-$(id -u)"}
# config.example/group_vars of DeepOps, with settings for the lab's registry.
DEEPOPS = {
    "enroot_runtime_path": "/run/enroot/user-$(id -u)",
    "enroot_cache_path": "/var/spool/enroot-cache/user-$(id -u)",
    "enroot_data_path": "/tmp/enroot-data/user-$(id -u)",
    "enroot_config": "ENROOT_RUNTIME_PATH {{ enroot_runtime_path }}\n"
    "ENROOT_CACHE_PATH {{ enroot_cache_path }}\n"
    "ENROOT_DATA_PATH {{ enroot_data_path }}\n"
    "ENROOT_SQUASH_OPTIONS -noI -noD -noF -noX -no-duplicates\n"
    "ENROOT_ALLOW_HTTP yes\n",
    "enroot_environ_config_files": [{"filename": "20-site.env", "content": "SITE=example\n"}],
    "penroot_prefix": PREFIX,
    "slurm_install_enroot": False,
    "penroot_serial": 2,
}
STEP = ("srun", "-N2", "--container-name=work", IMAGE, *sh("echo begun; read line; echo ended"))
# Like slurmd.service. The script of Debian's package does not start slurmd without a slurm.conf.
SERVICE = """\
#!/bin/sh
# Short-Description: slurmd
stop() { kill "$(cat /run/slurmd.pid)"; while pgrep -x slurmd; do sleep 0.1; done; }
case $1 in
restart) stop; slurmd --conf-server ctl ;;
status) pgrep -x slurmd ;;
esac
"""


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[Site]:
    configless = bool(getattr(request, "param", False))
    with site(f"{Lab().root}-packages", configless=configless) as made:
        yield made


def newer(package: Path, to: Path) -> str:
    """Make the next version of a package. Return the version."""
    old, new = place.packaged_version(), f"{place.packaged_version()}+1"
    tree = to / "tree"
    subprocess.run(["dpkg-deb", "-R", package, tree], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(
        re.sub(rf"^(Version: |Depends: penroot \(= ){re.escape(old)}", rf"\g<1>{new}", control.read_text(), flags=re.M)
    )
    output = to / package.name.replace(old, new)
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, output], check=True)
    shutil.rmtree(tree)
    return new


def test_packages(nodes: Site, packages: Path) -> None:
    release = nodes.home / "release"
    release.mkdir()
    for path in packages.glob("*.deb"):
        shutil.copy(path, release)
    given = {**SETTINGS, "penroot_release": f"{HOME}/release", "penroot_serial": 1}
    assert all(changed(nodes.play(**given)).values())
    slurmds = nodes.slurmds()
    assert changed(nodes.play(**given)) == {"ctl": 0, "n1": 0, "n2": 0}
    step = nodes.lab.popen(STEP)
    try:
        expect(step, "begun", "begun")
        version = [newer(packages / path.name, release) for path in packages.glob("penroot*_amd64.deb")][0]
        assert all(changed(nodes.play(**given, penroot_version=version)).values())
        for node in nodes.lab.nodes:
            shown = nodes.on(node, "dpkg-query --show --showformat='${Version} ' penroot penroot-slurm-plugin")
            assert shown == f"{version} {version} "
        assert step.poll() is None
        assert nodes.slurmds() == slurmds  # the plugin's line has not changed, so slurmd is not restarted
        assert end(step)[0] == "ended\n" * 2
        assert step.returncode == 0
    finally:
        step.kill()
    shown = nodes.lab.run(["srun", "-N2", "--container-name=work", "sh", "-c", "echo $IMAGE_NAME"])
    assert shown.stdout == "minimal\n" * 2
    assert changed(nodes.play(**given, penroot_version=version)) == {"ctl": 0, "n1": 0, "n2": 0}


def test_the_first_node_that_cannot_run_containers_is_the_last(nodes: Site, packages: Path) -> None:
    shutil.copytree(packages, nodes.home / "release")
    given = {**SETTINGS, "penroot_release": f"{HOME}/release", "penroot_serial": 1}
    said = nodes.play(check=False, **{**given, "enroot_config": "ENROOT_CACHE_PATH relative\n"})
    assert "ENROOT_CACHE_PATH" in said and "NO MORE HOSTS LEFT" in said
    assert nodes.lab.run("command -v penroot", user="root", node="n1", check=False).returncode == 0
    assert nodes.lab.run("command -v penroot", user="root", node="n2", check=False).returncode != 0
    unread = nodes.play(check=False, **given, penroot_config={"cache_pth": "/var/tmp/x"})
    assert "cache_path" in unread
    assert "penroot.yaml" not in nodes.on("n1", "ls /etc/enroot")


@pytest.mark.parametrize("nodes", [True], indirect=True)
def test_archive_and_slurmctld_that_sends_its_configuration(nodes: Site, packages: Path, tmp_path: Path) -> None:
    for node in nodes.lab.nodes:
        nodes.lab.run("cat > /etc/init.d/slurmd; chmod 755 /etc/init.d/slurmd", user="root", node=node, input=SERVICE)
    (archive,) = packages.glob("penroot-*-x86_64.tar.xz")
    shutil.copy(archive, nodes.home)
    given = {
        **SETTINGS,
        "penroot_archive": f"{HOME}/{archive.name}",
        "penroot_prefix": "/opt/site/penroot",
        "penroot_plugin_arguments": ["container_scope=job"],
    }
    assert all(changed(nodes.play(**given)).values())
    line = "required /opt/site/penroot/lib/penroot/spank_pyxis.so container_scope=job # pyxis-py install"
    assert line in nodes.on("n1", "cat /run/slurm/conf/plugstack.conf")
    assert changed(nodes.play(**given)) == {"ctl": 0, "n1": 0, "n2": 0}

    # Each version has its own directory.
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path], check=True)
    (top,) = tmp_path.iterdir()
    newest = top.rename(tmp_path / "penroot-9.0.0-x86_64")
    subprocess.run(["tar", "-cJf", nodes.home / f"{newest.name}.tar.xz", "-C", tmp_path, newest.name], check=True)
    slurmds = nodes.slurmds()
    step = nodes.lab.popen(STEP)
    try:
        expect(step, "begun", "begun")
        given["penroot_archive"] = f"{HOME}/{newest.name}.tar.xz"
        assert all(changed(nodes.play(**given)).values())
        assert end(step)[0] == "ended\n" * 2
        assert step.returncode == 0
    finally:
        step.kill()
    assert nodes.on("n1", "readlink /opt/site/penroot").strip() == newest.name
    assert nodes.lab.run(["srun", "-N2", IMAGE, "true"]).returncode == 0
    assert nodes.slurmds() == slurmds


def test_role_on_a_shared_file_system(nodes: Site) -> None:
    """The whole role except the installation of packages: all nodes share penroot."""
    before = nodes.slurmds()
    first = nodes.play(**DEEPOPS)
    assert all(changed(first).values())
    restarted = nodes.slurmds()
    assert not set(before) & set(restarted)
    shown = nodes.lab.run(["srun", "-N2", IMAGE, "sh", "-c", "echo $IMAGE_NAME $SITE"])
    assert shown.stdout == "minimal example\n" * 2
    places = nodes.on("n1", "stat -c '%n %a %U' /run/enroot /tmp/enroot-data /var/spool/enroot-cache/user-2001")
    assert places == "/run/enroot 1777 root\n/tmp/enroot-data 1777 root\n/var/spool/enroot-cache/user-2001 700 alice\n"
    second = nodes.play(**DEEPOPS)
    assert changed(second) == {"ctl": 0, "n1": 0, "n2": 0}, second
    assert nodes.slurmds() == restarted


def test_ansible_lint_has_nothing_to_say() -> None:
    command = ["ansible-lint", "--offline", "--nocolor", "playbook.yml", "penroot"]
    environ = {**os.environ, "ANSIBLE_HOME": "/var/tmp/penroot-ansible"}
    done = subprocess.run(command, cwd=ANSIBLE, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
