"""A cluster whose nodes have no Slurm configuration: slurmctld sends plugstack.conf without the files that it includes.

See slurmd_config_files and client_config_files in Slurm's fetch_config.c, 22.05 to 26.05. If an included directory
exists only on ctl, no node loads the plugins of its files: steps run on the host, and only `pyxis-py check` reports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.installation import PREFIX, copy_tree
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE
from tests.waiting import until

SITE = "/home/opt"  # all nodes of this lab see the directory, and no other lab does
PLUGIN = f"{SITE}/lib/penroot/spank_pyxis.so"
NAME = ("sh", "-c", "echo $IMAGE_NAME")
FIX = "fix: on the host of slurmctld: pyxis-py install (it adds a line to plugstack.conf); then scontrol reconfigure"


@pytest.fixture(scope="module")
def site(lab: Lab) -> Iterator[Lab]:
    """Yield a configless cluster of one node, with its own installation and a login node without Slurm daemons."""
    more = Lab(lab.root + "-configless")
    more.up(nodes=1, prefix=PREFIX, configless=True)
    more.start_daemon("registry", "munged")
    copy_tree(Path(f"{more.root}{SITE}/lib/penroot"))
    yield more
    more.down()


def pyxis_py(site: Lab, verb: str, node: str, status: int = 0) -> str:
    """Run pyxis-py on a node, and return stdout and stderr. The login node is named "registry"."""
    prefix = "" if verb == "check" else f"--prefix {SITE}"
    server = {"SLURM_CONF_SERVER": "ctl"} if node == "registry" else {}
    done = site.run(f"{PREFIX}/bin/pyxis-py {verb} {prefix} 2>&1", node=node, user="root", check=False, env=server)
    assert done.returncode == status, done.stdout
    return done.stdout


def reconfigure(site: Lab, wanted: str) -> None:
    """Make slurmctld send its files, and wait until n1's copy of plugstack.conf is ``wanted``."""
    site.run("scontrol reconfigure", user="root")
    copy = ["cat", "/run/slurm/conf/plugstack.conf"]
    until(lambda: site.run(copy, node="n1").stdout.strip() == wanted, "the new plugstack.conf on n1", 60)


@pytest.mark.clusters("Configless Slurm")
@pytest.mark.parity("check: finds the plugstack.conf that Slurm reads")
def test_included_files_are_not_sent_to_nodes(site: Lab) -> None:
    out = pyxis_py(site, "check", "n1", 1)
    assert (
        "bad  /run/slurm/conf/plugstack.conf does not load spank_pyxis.so: slurmctld does not send included files"
        in out
    )
    assert FIX in out
    assert "bad  srun does not load spank_pyxis.so" in pyxis_py(site, "check", "registry", 1)
    assert "warn slurmctld sends /etc/slurm/plugstack.conf to nodes, but not the included" in pyxis_py(
        site, "check", "ctl"
    )
    # On n1, srun itself refuses the option.
    done = site.run(["srun", IMAGE, "true"], node="n1", check=False)
    assert "unrecognized option" in done.stderr


@pytest.mark.parity("install works on a configless cluster")
def test_a_node_may_have_a_file_that_is_included_by_its_path(site: Lab) -> None:
    """The sent plugstack.conf includes an absolute path, so pyxis-py install on the node writes the file there."""
    assert "loaded by /etc/slurm/plugstack.conf.d/pyxis.conf" in pyxis_py(site, "install", "n1")
    assert f"ok   /etc/slurm/plugstack.conf.d/pyxis.conf:1 loads {PLUGIN}" in pyxis_py(site, "check", "n1")
    assert site.run(["srun", IMAGE, *NAME]).stdout == "minimal\n"
    assert "removed /etc/slurm/plugstack.conf.d/pyxis.conf" in pyxis_py(site, "uninstall", "n1")


@pytest.mark.clusters("Configless Slurm")
@pytest.mark.parity("install works on a configless cluster")
def test_the_line_is_in_the_file_that_is_sent(site: Lab) -> None:
    """plugstack.conf includes a relative path: pyxis-py install on slurmctld's host adds a line to plugstack.conf."""
    site.configure("plugstack.conf", "include plugstack.conf.d/*.conf\n")
    reconfigure(site, "include plugstack.conf.d/*.conf")
    out = pyxis_py(site, "install", "n1")
    assert f"built {PLUGIN}" in out
    assert "/run/slurm/conf/plugstack.conf comes from slurmctld and does not load the plugin" in out
    assert "pyxis.conf:1 loads" in pyxis_py(site, "install", "ctl", 1)
    site.run("rm /etc/slurm/plugstack.conf.d/pyxis.conf", user="root")

    assert "scontrol reconfigure" in pyxis_py(site, "install", "ctl")
    text = site.run("cat /etc/slurm/plugstack.conf").stdout.strip()
    assert text.splitlines()[-1] == f"required {PLUGIN} # pyxis-py install"
    reconfigure(site, text)
    for node, server in (("ctl", {}), ("n1", {}), ("registry", {"SLURM_CONF_SERVER": "ctl"})):
        assert site.run(["srun", IMAGE, *NAME], node=node, env=server).stdout == "minimal\n"
    # --container-slurm passes the files from slurmctld on to the container.
    step = f"srun --overlap --chdir=/ {IMAGE} sh -c 'echo $IMAGE_NAME'; grep -c . /run/penroot/slurm/etc/slurm.conf"
    inside = site.run(["srun", IMAGE, "--container-slurm", "sh", "-c", step], node="n1").stdout.split()
    assert inside[0] == "minimal" and int(inside[1]) > 20
    assert f"ok   /run/slurm/conf/plugstack.conf:2 loads {PLUGIN}" in pyxis_py(site, "check", "n1")
    assert "ok   srun loads spank_pyxis.so" in pyxis_py(site, "check", "registry")
    assert f"loaded by /run/slurm/conf/plugstack.conf ({PLUGIN})" in pyxis_py(site, "install", "n1")

    assert "first, on the host of slurmctld" in pyxis_py(site, "uninstall", "n1", 1)
    assert "removed the line in /etc/slurm/plugstack.conf" in pyxis_py(site, "uninstall", "ctl")
    reconfigure(site, text.rpartition("\n")[0])
    assert "bad  /run/slurm/conf/plugstack.conf does not load" in pyxis_py(site, "check", "n1", 1)
    assert site.run(["penroot", "list"], node="n1").stdout == ""
