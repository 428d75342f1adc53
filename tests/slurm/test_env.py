"""--container-env: variables of the job, and values in the option, that take precedence over the image's."""

from __future__ import annotations

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, sh, srun

SHOW = sh("echo $IMAGE_NAME,$ONE,$TWO,$LANG")


@pytest.mark.parity("--container-env: accepts NAME=VALUE and patterns")
def test_values(lab: Lab) -> None:
    env = {"ONE": "job", "IMAGE_NAME": "job"}
    given = r"--container-env=ONE=a\,b,TWO=x=y,IMAGE_NAME=given,LANG=de"
    assert srun(lab, "-n2", IMAGE, given, *SHOW, env=env) == "given,a,b,x=y,de\n" * 2


@pytest.mark.parity("--container-env: accepts NAME=VALUE and patterns")
def test_patterns(lab: Lab) -> None:
    env = {"ONE": "job", "IMAGE_NAME": "job", "LANG": "C"}
    assert srun(lab, "-n2", IMAGE, "--container-env=IMAGE_*", *SHOW, env=env) == "job,job,,\n" * 2
    assert srun(lab, IMAGE, "--container-env=*NG,NO_*", *SHOW, env=env) == "minimal,job,,C\n"


def test_paths_missing_inside_are_named_once(lab: Lab) -> None:
    env = {"NCCL_TOPO_FILE": "/no/topo.xml", "SSL_CERT_FILE": "/etc/passwd", "CURL_CA_BUNDLE": "/no/ca.pem"}
    command = ["srun", "-N2", "-n4", IMAGE, "--container-env=CURL_CA_BUNDLE=/dev/null", "true"]
    done = lab.run(command, env=env)
    named = [line for line in done.stderr.splitlines() if "in the container" in line]
    assert len(named) == 1, done.stderr
    assert "no such file or directory in the container: NCCL_TOPO_FILE=/no/topo.xml; mount it" in named[0]
