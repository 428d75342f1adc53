"""Mutated files of optional features of penroot lead to a result, or to an error of one line with a hint."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from enroot_py.base import log
from enroot_py.base.errors import PenrootError
from enroot_py.features.environments import edf, edf_parser
from enroot_py.features.environments import shown as environments
from enroot_py.features.environments.startfile import StartFile
from enroot_py.features.pins import lockfile
from enroot_py.features.slurm_inside.slurmconf import SlurmConf
from enroot_py.features.trust.policy import Policy
from pyxis_py.request import options
from tests.unit.test_fuzz import mutate

pytestmark = pytest.mark.soak

RULES = {
    "": [{"type": "reject"}],
    "reg.site/team": [{"type": "sigstoreSigned", "keyPath": "/k.pub", "signedIdentity": {"type": "digestOnly"}}],
    "*.site": [{"type": "sigstoreSigned", "keyData": "eA==", "signedIdentity": {"type": "matchRepository"}}],
}
SEEDS = {
    "environment": """\
base_environment = ["base"]
image = "reg.site#team/torch:24.05-py3"
mounts = ["${PLACE}:${PLACE}", "/data/sets:/data:ro", "./x.sqsh:/y:sqsh+noexec", "tmpfs:/z"]
workdir = "${PLACE}/run"
entrypoint = true
devices = ["nvidia.com/gpu=all", "/dev/x"]
[env]
PATH = "${PATH}:/opt/bin"
A = "${X:-y} $$ ${SLURM_JOB_ID}",
[annotations]
com.hooks.cxi.enabled = "true"
com.pyxis.slurm = "false"
com.hooks.netstack.source = "host"
"a b" = '''x
y'''
""",
    "lock": f"# of the team\nversion 1\nreg.site#team/torch:24.05-py3 sha256:{'a' * 64}\nubuntu:24.04\n",
    "policy": json.dumps({"default": RULES[""], "transports": {"docker": RULES, "dir": {"/sw": RULES[""]}}}, indent=1),
    "slurm.conf": "ClusterName=x\nAuthInfo=socket=/x,ttl=3 PluginDir=/a # c\nCPUs=3 \\\nX=1\nPlugStackConfig=/none\n",
}


@pytest.fixture
def read(tmp_path: Path) -> dict[str, Callable[[str], object]]:
    """Return kind -> function that parses a text of this kind, and uses the result."""
    directory = tmp_path / ".edf"
    directory.mkdir()
    (directory / "base.toml").write_text('image = "x"\n[env]\nB = "1"\n')
    environ = {"HOME": str(tmp_path), "PLACE": "/place", "PATH": "/bin"}

    def environment(text: str) -> None:
        (directory / "it.toml").write_text(text, errors="surrogateescape")
        file = edf_parser.read("it", "--environment=it", str(tmp_path), environ)
        edf_parser.check(file)
        edf_parser.annotation_warning(file)
        for form in ("toml", "json"):
            environments.shown(file, form)
        assert edf.loads(file.dumps()) == file
        assert StartFile(file, job=None).target is not None
        options.parse([("environment", "it")], environ, read=lambda name, origin: file).fstab()

    def conf(text: str) -> None:
        (tmp_path / "slurm.conf").write_text(text, errors="surrogateescape")
        SlurmConf(f"{tmp_path}/slurm.conf").changed({"PluginDir": "/c"})

    return {
        "environment": environment,
        "lock": lambda text: lockfile.parse("/lock", text),
        "policy": lambda text: Policy("/policy", text.encode("utf-8", "surrogateescape")),
        "slurm.conf": conf,
    }


@pytest.mark.parametrize("kind", SEEDS)
def test_mutated_files(
    read: dict[str, Callable[[str], object]],
    kind: str,
    rng: random.Random,
    soak: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log, "sink", lambda level, text: None)
    for _ in range(30_000 if soak else 1_000):
        try:
            read[kind](mutate(SEEDS[kind], rng))
        except PenrootError as e:
            assert str(e) and "\n" not in str(e), repr(str(e))
            assert e.hint, str(e)
