"""The Ansible role where penroot is on a file system that all nodes see: all but the installation of packages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.installation import PREFIX
from tests.kernel.conftest import require
from tests.roles import Site, changed, site
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE

# As in config.example/group_vars of DeepOps, and what the registry of the lab needs.
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


@pytest.fixture(scope="module")
def nodes() -> Iterator[Site]:
    require(shutil.which("ansible-playbook"), "ansible-core is not installed: tests/prerequisites")
    with site(Lab().root + "-ansible") as made:
        yield made


def test_role(nodes: Site) -> None:
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
