"""srun --environment: the host's libfabric and NCCL plugin on each node, if the file requests them."""

from __future__ import annotations

import pathlib
import re
import shutil
from collections.abc import Iterator

import pytest

from tests import fakefabric
from tests.fakefabric import CRAY, LIB
from tests.slurm.lab import Lab
from tests.slurm.steps import MINIMAL, assert_nothing_left, sh

FILE = f'image = "{MINIMAL}"\nmounts = ["/usr/bin/fi_info:/mnt/fi_info"]\n'


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    yield
    lab.run("rm -f it.toml")
    assert_nothing_left(lab)


@pytest.fixture(scope="module")
def cray(lab: Lab) -> Iterator[dict[str, str]]:
    """Yield variables that give a job's nodes a fake Slingshot."""
    tree = pathlib.Path(lab.root, "home/alice/cray")
    fakefabric.slingshot(tree)
    yield {"PENROOT_HOST_ROOT": "/home/alice/cray", "ENROOT_FABRIC_PATH": CRAY, "ENROOT_RESTRICT_DEV": "yes"}
    shutil.rmtree(tree)


@pytest.mark.parity("srun --environment: on each node of a step")
def test_the_annotation_brings_libfabric_to_each_node(lab: Lab) -> None:
    lab.run("cat > it.toml", input=f'{FILE}[annotations]\ncom.hooks.cxi.enabled = "true"\n')
    done = lab.run(
        ["srun", "-N2", "--environment=./it.toml", *sh("/mnt/fi_info -p tcp | grep -x 'provider: tcp' | sort -u")]
    )
    assert done.stdout == "provider: tcp\n" * 2
    assert "no hook implements these annotations" not in done.stderr
    by_setting = [f"--container-image={MINIMAL}", "--container-mounts=/usr/bin/fi_info:/mnt/fi_info"]
    done = lab.run(["srun", "-N2", *by_setting, "/mnt/fi_info", "-p", "tcp"], env={"ENROOT_FABRIC": "libfabric"})
    assert "provider: tcp\n" in done.stdout
    lab.run("cat > it.toml", input=FILE)
    without = lab.run(["srun", "-N2", "--environment=./it.toml", "/mnt/fi_info"], check=False)
    assert without.returncode and "libfabric.so.1: cannot open shared object file" in without.stderr


@pytest.mark.parity("com.hooks.aws_ofi_nccl")
def test_plugin_of_nccl_in_the_requested_variant(lab: Lab, cray: dict[str, str]) -> None:
    """With the plugin, the container gets libfabric, and the Slingshot devices that Slurm names."""
    text = '[annotations.com.hooks.aws_ofi_nccl]\nenabled = "true"\nvariant = "cuda12"\n'
    lab.run("cat > it.toml", input=FILE + text)
    script = f"echo $NCCL_NET_PLUGIN $FI_PROVIDER_PATH; ls /dev/cxi* {LIB}/libnccl-net-ofi.so {LIB}/libfabric.so.1"
    env = {**cray, "SLINGSHOT_DEVICES": "cxi1"}
    out = lab.run(["srun", "-N2", "--environment=./it.toml", *sh(script)], env=env).stdout.splitlines()
    assert sorted(out) == sorted(
        [f"ofi {LIB}/libfabric", "/dev/cxi1", f"{LIB}/libnccl-net-ofi.so", f"{LIB}/libfabric.so.1"] * 2
    )
    lab.run("cat > it.toml", input=FILE + text.replace("cuda12", "cuda13"))
    done = lab.run(["srun", "-N2", "--environment=./it.toml", "true"], check=False, env=env)
    assert done.returncode and "has no libnccl-net-ofi.so, variant cuda13," in done.stderr
    assert "penroot fabric IMAGE" in done.stderr


@pytest.mark.parity("the examples of docs/howto/fabric.md")
def test_the_examples_of_the_documentation(lab: Lab, cray: dict[str, str]) -> None:
    """Run the examples with an image of the lab."""
    docs = (pathlib.Path(__file__).parents[2] / "docs/howto/fabric.md").read_text()
    file = re.search(r"```toml\n# ~/\.edf/nccl\.toml\n(.*?)```", docs, re.S)
    lines = re.search(r"```console\n(.*?)```", docs, re.S)
    assert file and lines
    lab.run("mkdir -p .edf; cat > .edf/nccl.toml", input=file[1].replace("nvcr.io#nvidia/pytorch:24.05-py3", MINIMAL))
    try:
        commands = [line.removeprefix("$ ").partition("  #")[0].strip() for line in lines[1].splitlines()]
        out = [lab.run(command, env=cray, node="n1").stdout for command in commands]
    finally:
        lab.run("rm -r .edf")
    assert f"libfabric  {CRAY}/libfabric.so.1.27.0\n" in out[0] and "/dev/cxi0 (cxi)" in out[0]
    plugin = f"{fakefabric.OFI_NCCL}/cuda12/lib/libnccl-net.so"
    assert f"nccl       the host's {plugin}, the image has none: requested by com.hooks.aws_ofi_nccl.enabled" in out[1]
    assert out[2] == "ofi\n" * 2
