"""GPUs that Slurm allocates, on nodes with the driver of a fake DGX: the images ask for nothing."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Iterator

import pytest

from tests import fakehost
from tests.slurm.lab import Lab

IMAGE = "--container-image=registry:5000#minimal:1"
GPUS = "ls /dev | grep -x 'nvidia[0-9]*'"


@pytest.fixture(scope="module")
def dgx(lab: Lab) -> Iterator[dict[str, str]]:
    """Variables of a job that make its containers those of a fake DGX, in a home that all nodes share."""
    tree = pathlib.Path(lab.root, "home/alice/dgx")
    fakehost.dgx_a100(tree)
    yield {"PENROOT_HOST_ROOT": "/home/alice/dgx", "ENROOT_RESTRICT_DEV": "yes"}
    shutil.rmtree(tree)


def srun(lab: Lab, env: dict[str, str], *options: str, script: str = GPUS) -> list[str]:
    return lab.run(["srun", *options, IMAGE, "sh", "-c", script], env=env).stdout.split()


def test_allocated_and_no_others(lab: Lab, dgx: dict[str, str]) -> None:
    script = f"{GPUS}; echo $CUDA_VISIBLE_DEVICES; ls /usr/bin/nvidia-smi /usr/lib/*/libcuda.so.1"
    out = srun(lab, dgx, "--gres=gpu:2", script=script)
    assert out[:4] == ["nvidia0", "nvidia1", "0,1", "/usr/bin/nvidia-smi"]
    assert out[4].endswith("/libcuda.so.1")


def test_step_without_gpus_has_none(lab: Lab, dgx: dict[str, str]) -> None:
    assert srun(lab, dgx, script=f"{GPUS}; ls /usr/bin/nvidia-smi 2>&1 | grep -c 'No such'; true") == ["1"]


def test_every_task_of_a_step_sees_its_gpus(lab: Lab, dgx: dict[str, str]) -> None:
    out = srun(lab, dgx, "-n3", "--gres=gpu:3", script=f"echo $({GPUS})")
    assert out == ["nvidia0", "nvidia1", "nvidia2"] * 3


def test_each_task_is_told_its_own(lab: Lab, dgx: dict[str, str]) -> None:
    """With --gpus-per-task the container has those of all tasks, whichever came first."""
    script = 'for n in 0 1; do test -e /dev/nvidia$n || echo missing $n; done; echo "$CUDA_VISIBLE_DEVICES"'
    assert sorted(srun(lab, dgx, "-n2", "--gpus-per-task=1", script=script)) == ["0", "1"]


def test_variable_of_another_day_is_reported(lab: Lab, dgx: dict[str, str]) -> None:
    env = {**dgx, "NVIDIA_VISIBLE_DEVICES": "5"}
    done = lab.run(["srun", "--gres=gpu:1", IMAGE, "sh", "-c", GPUS], env=env)
    assert done.stdout.split() == ["nvidia0"]
    assert "NVIDIA_VISIBLE_DEVICES=5" in done.stderr


def test_caller_may_refuse(lab: Lab, dgx: dict[str, str]) -> None:
    script = f"{GPUS}; echo none"
    assert srun(lab, {**dgx, "NVIDIA_VISIBLE_DEVICES": "void"}, "--gres=gpu:1", script=script) == ["none"]
    assert srun(lab, {**dgx, "PENROOT_SLURM_GPUS": "no"}, "--gres=gpu:1", script=script) == ["none"]


def test_batch_script_with_steps(lab: Lab, dgx: dict[str, str]) -> None:
    """A step that asks for no GPU does not get those of its job."""
    script = "\n".join(
        [
            "#!/bin/bash",
            f'srun --gres=gpu:2 {IMAGE} sh -c "{GPUS}" > out.gpus',
            f'srun --gres=none {IMAGE} sh -c "{GPUS}; echo none" > out.none',
        ]
    )
    lab.run(["sh", "-c", "cat > gpus.sbatch"], input=script)
    lab.run(["sbatch", "--wait", "--gres=gpu:2", "-o", "out.log", "gpus.sbatch"], env=dgx)
    assert lab.run(["cat", "out.gpus"]).stdout.split() == ["nvidia0", "nvidia1"]
    assert lab.run(["cat", "out.none"]).stdout.split() == ["none"]
