"""Each variable PYXIS_CONTAINER_* does the same as its option, for srun and batch jobs. Forms of image references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyxis_py.request.options import all_options
from tests.slurm.lab import Lab
from tests.slurm.steps import MINIMAL, clear, sbatch, sh, srun
from tests.slurm.test_entrypoint import ENTRY

FILE = "./variables.sqsh"  # an image with an entrypoint, made once
# Variable: (its value, a task's script, the script's output without the variable, the output with it). A task's output
# does not show IMAGE, NAME and SAVE, so tests look at these from outside.
EFFECTS = {
    "PYXIS_CONTAINER_MOUNTS": ("/etc/hostname:/mnt/x", "cat /mnt/x 2>/dev/null", "", "n1"),
    "PYXIS_CONTAINER_WORKDIR": ("/usr", "pwd", "/srv/work", "/usr"),
    "PYXIS_CONTAINER_MOUNT_HOME": ("on", "ls $HOME | grep -c variables", "0", "1"),
    "PYXIS_CONTAINER_REMAP_ROOT": ("true", "id -u", "2001", "0"),
    "PYXIS_CONTAINER_ENTRYPOINT": ("1", "echo $MADE", "", "made"),
    "PYXIS_CONTAINER_WRITABLE": ("y", "touch /made 2>/dev/null && echo made", "", "made"),
    "PYXIS_CONTAINER_READONLY": ("no", "touch /made 2>/dev/null && echo made", "", "made"),
    "PYXIS_CONTAINER_ENV": ("IMAGE_NAME", "echo $IMAGE_NAME", "minimal", "job"),
    "PYXIS_CONTAINER_SLURM": ("yes", "command -v squeue", "", "/run/penroot/slurm/bin/squeue"),
    "PYXIS_CONTAINER_UNSHARE": ("net", "wc -l < /proc/net/dev", "4", "3"),
}
SEEN_FROM_OUTSIDE = {
    "PYXIS_ENVIRONMENT",  # test_environment_files.py
    *("PYXIS_CONTAINER_PIN", "PYXIS_CONTAINER_LOCK"),  # test_pins.py
    *(f"PYXIS_CONTAINER_{name}" for name in ("IMAGE", "NAME", "SAVE", "ENTRYPOINT_LOG")),
}


@pytest.fixture(scope="module", autouse=True)
def image(lab: Lab) -> Iterator[None]:
    srun(lab, f"--container-image={MINIMAL}", f"--container-save={FILE}", "--container-writable", *sh(ENTRY))
    yield
    clear(lab, "rm -f *.sqsh")


def test_every_option_has_its_variable_here() -> None:
    assert {option.variable for option in all_options() if option.variable} == {*EFFECTS, *SEEN_FROM_OUTSIDE}


@pytest.mark.parity(
    "PYXIS_CONTAINER_SLURM",
    "PYXIS_CONTAINER_IMAGE",
    "PYXIS_CONTAINER_MOUNTS",
    "PYXIS_CONTAINER_WORKDIR",
    "PYXIS_CONTAINER_MOUNT_HOME",
    "PYXIS_CONTAINER_REMAP_ROOT",
    "PYXIS_CONTAINER_ENTRYPOINT",
    "PYXIS_CONTAINER_WRITABLE",
    "PYXIS_CONTAINER_READONLY",
    "PYXIS_CONTAINER_ENV",
    "PYXIS_CONTAINER_UNSHARE",
)
@pytest.mark.parametrize("variable", EFFECTS)
def test_each_does_what_its_option_does(lab: Lab, variable: str) -> None:
    value, show, without, with_it = EFFECTS[variable]
    env = {"PYXIS_CONTAINER_IMAGE": FILE, "IMAGE_NAME": "job"}
    script = sh(f"{show}; true")
    assert srun(lab, *script, env=env).strip() == without
    assert srun(lab, *script, env={**env, variable: value}).strip() == with_it


@pytest.mark.parametrize("slip", ["PYXIS_CONTAINER_MOUNT", "PYXIS_CONTAINER_IMAG"])
@pytest.mark.parametrize("others", [{"PYXIS_CONTAINER_IMAGE": FILE}, {}], ids=["in a container", "alone"])
def test_misspelt_variable_is_reported(lab: Lab, slip: str, others: dict[str, str]) -> None:
    done = lab.run(["srun", "true"], env={**others, slip: "/etc:/mnt/x", "PYXIS_CONTAINER_OF_THE_SITE": "1"})
    lines = [line for line in done.stderr.splitlines() if "ignoring" in line]
    meant = {"PYXIS_CONTAINER_MOUNT": "PYXIS_CONTAINER_MOUNTS", "PYXIS_CONTAINER_IMAG": "PYXIS_CONTAINER_IMAGE"}
    assert lines == [f"pyxis: ignoring {slip}: did you mean {meant[slip]}?"]


def test_misspelt_setting_is_reported(lab: Lab) -> None:
    done = lab.run(["srun", "true"], env={"PYXIS_CONTAINER_IMAGE": FILE, "ENROOT_MOUNT_HOM": "yes"})
    assert "pyxis: ignoring ENROOT_MOUNT_HOM: did you mean ENROOT_MOUNT_HOME?\n" in done.stderr


@pytest.mark.parity("PYXIS_CONTAINER_NAME", "PYXIS_CONTAINER_SAVE")
def test_name_and_save(lab: Lab) -> None:
    env = {"PYXIS_CONTAINER_IMAGE": FILE, "PYXIS_CONTAINER_NAME": "said", "PYXIS_CONTAINER_SAVE": "said.sqsh"}
    srun(lab, "true", env=env)
    assert lab.run(["penroot", "list"], node="n1").stdout == "pyxis_said\n"
    assert srun(lab, "--container-name=said", *sh("echo $IMAGE_NAME")) == "minimal\n"
    assert srun(lab, "--container-image=./said.sqsh", *sh("echo $IMAGE_NAME")) == "minimal\n"
    clear(lab, "rm said.sqsh")


@pytest.mark.parity("PYXIS_CONTAINER_ENTRYPOINT_LOG")
def test_the_log_of_an_entrypoint(lab: Lab) -> None:
    env = {"PYXIS_CONTAINER_IMAGE": FILE, "PYXIS_CONTAINER_ENTRYPOINT": "yes", "PYXIS_CONTAINER_ENTRYPOINT_LOG": "yes"}
    assert "entry for" in lab.run(["srun", "-w", "n1", "true"], env=env).stderr


@pytest.mark.parity("PYXIS_CONTAINER_*: variables of a batch job apply to its script and steps")
def test_in_the_environment_of_a_batch_job(lab: Lab) -> None:
    env = {"PYXIS_CONTAINER_IMAGE": FILE, "PYXIS_CONTAINER_WORKDIR": "/usr"}
    try:
        script = "#!/bin/sh\necho $IMAGE_NAME $PWD\n"
        sbatch(lab, "-w", "n1", "-o", "said.out", input=script, env=env)
        assert lab.run(["cat", "said.out"]).stdout.endswith("minimal /usr\n")
    finally:
        lab.run(["rm", "-f", "said.out"])


@pytest.mark.parity("--container-image: accepts / or # after the registry")
@pytest.mark.parametrize(
    "reference",
    [
        "registry:5000#minimal:1",
        "registry:5000/minimal:1",
        "docker://registry:5000#minimal:1",
        "docker://registry.lab/minimal:1",
        "minimal:1",
        "docker.io#library/minimal:1",
        "registry:5000#minimal@DIGEST",
    ],
)
def test_forms_of_a_reference(lab: Lab, reference: str) -> None:
    if reference.endswith("DIGEST"):
        digest = lab.run(["penroot", "digest", f"docker://{MINIMAL}"]).stdout.strip()
        assert digest.startswith("sha256:")
        reference = reference.replace("DIGEST", digest)
    assert srun(lab, f"--container-image={reference}", *sh("echo $IMAGE_NAME")) == "minimal\n"


@pytest.mark.parity("--container-mounts: paths may contain escaped spaces, colons and commas")
def test_separators_in_names_of_files_and_the_same_mount_twice(lab: Lab) -> None:
    lab.run("mkdir 'a b:c,d' && touch 'a b:c,d/file'")
    try:
        mount = r"./a\ b\:c\,d:/mnt/e\ f\:g\,h"
        mounts = f"--container-mounts={mount},{mount}"
        out = srun(lab, f"--container-image={MINIMAL}", mounts, *sh("ls /mnt/*; grep -c /mnt/e /proc/self/mounts"))
        assert out == "file\n1\n"
    finally:
        lab.run(["rm", "-r", "a b:c,d"])
