"""The plugin in real Slurm with UBSan.

AddressSanitizer would have to be loaded before slurmstepd, srun and all their children, so
tests/kernel/test_plugin_build.py runs the plugin with AddressSanitizer, against hostile helpers.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from pyxis_py.admin import cli
from pyxis_py.admin.header import c_header
from tests.installation import LIBRARY
from tests.slurm.lab import Lab
from tests.slurm.steps import HELPER, IMAGE, ON_N1, end, expect, on_node, refused, sbatch, sh, srun


@pytest.fixture
def sanitized(lab: Lab, tmp_path: pathlib.Path) -> Iterator[Lab]:
    plugin = f"{LIBRARY}/sanitized-{os.getpid()}.so"
    (tmp_path / "options.h").write_text(c_header())
    sources = cli.source_directory()
    includes = (tmp_path, sources, os.path.dirname(sources), cli.find_slurm(None))
    defines = ('-DPENROOT_PYTHON="/usr/bin/python3"', f'-DPENROOT_LIB="{LIBRARY}"')
    sanitizers = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
    files = cli.sources_in(sources)
    subprocess.run(
        ["cc", *cli.CFLAGS, *sanitizers, *defines, *(f"-I{path}" for path in includes), *files, "-o", plugin],
        check=True,
    )
    before = pathlib.Path(lab.root, "etc/slurm/plugstack.conf.d/pyxis.conf").read_text()
    lab.install_plugin(f"required {plugin}")
    yield lab
    lab.install_plugin(before.strip())
    os.unlink(plugin)


@pytest.mark.security("R8")
@pytest.mark.soak
def test_the_plugin_in_slurm_with_a_sanitizer(sanitized: Lab) -> None:
    lab = sanitized
    log = f"{lab.root}/nodes/n1/var/log/slurmd.log"
    before = os.path.getsize(log)
    assert srun(lab, "-n4", "--cpu-bind=none", IMAGE, "--container-writable", "echo", "here") == "here\n" * 4
    refused(lab, IMAGE, "--container-workdir=/nonexistent", "true")
    lab.run("printf '#!/bin/sh\\necho here\\n' > sanitized.sh")
    sbatch(lab, "-w", "n1", "--export=NONE", "-o", "sanitized.out", IMAGE, "sanitized.sh")
    assert "here\n" in lab.run("cat sanitized.out; rm sanitized.*").stdout
    for signal in ("KILL", "STOP"):
        step = lab.popen(["srun", *ON_N1, IMAGE, "--container-writable", *sh("echo up; read line")])
        expect(step, "up")
        on_node(lab, f"pkill -{signal} -f {HELPER}")
        end(step)
        assert step.returncode == 0
    with open(log, errors="replace") as file:
        file.seek(before)
        text = file.read()
    assert "runtime error" not in text and "signal 6" not in text
