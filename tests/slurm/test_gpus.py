"""GPUs that Slurm allocates, on nodes with the driver of a fake DGX. The images do not request GPUs."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator

import pytest

from tests import fakeaccelerators, fakehost
from tests.slurm.lab import Lab, slurm_version
from tests.slurm.steps import end, expect, sbatch

IMAGE = "--container-image=registry:5000#minimal:1"
GPUS = "ls /dev | grep -x 'nvidia[0-9]*'"


@pytest.fixture(scope="module")
def dgx(lab: Lab) -> Iterator[dict[str, str]]:
    """Yield variables that give a job's containers a fake DGX. Its files are in a home that all nodes share."""
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
    direct = ["/dev/gdrdrv", "/dev/knem", "/dev/nvidia-caps-imex-channels/channel0", "/dev/nvidia-fs0", "/dev/xpmem"]
    assert srun(lab, dgx, "--gres=gpu:1", script=f"ls {' '.join(direct)}") == direct


def test_jobs_side_by_side_have_each_its_own(lab: Lab, dgx: dict[str, str]) -> None:
    """The second job's device files keep the node's GPU numbers, but CUDA numbers a container's GPUs from 0."""
    say = f"echo up; echo $({GPUS}) $CUDA_VISIBLE_DEVICES; read line"
    first = lab.popen(["srun", "-w", "n1", "--gres=gpu:2", IMAGE, "sh", "-c", say], env=dgx)
    expect(first, "up")
    script = f"echo $({GPUS}) $CUDA_VISIBLE_DEVICES"
    try:
        assert srun(lab, dgx, "-w", "n1", "--gres=gpu:2", script=script) == ["nvidia2", "nvidia3", "0,1"]
    finally:
        out, _ = end(first)
    assert out == "nvidia0 nvidia1 0,1\n"


def test_step_without_gpus_has_none(lab: Lab, dgx: dict[str, str]) -> None:
    assert srun(lab, dgx, script=f"{GPUS}; ls /usr/bin/nvidia-smi 2>&1 | grep -c 'No such'; true") == ["1"]


def test_every_task_of_a_step_sees_its_gpus(lab: Lab, dgx: dict[str, str]) -> None:
    out = srun(lab, dgx, "-n3", "--gres=gpu:3", script=f"echo $({GPUS})")
    assert out == ["nvidia0", "nvidia1", "nvidia2"] * 3


@pytest.mark.parity("--gpus-per-task: a container has the GPUs of all tasks, and each task learns its own GPU")
def test_each_task_learns_its_own_gpu(lab: Lab, dgx: dict[str, str]) -> None:
    """With --gpus-per-task the container has the GPUs of all tasks, whichever task came first."""
    script = 'for n in 0 1; do test -e /dev/nvidia$n || echo missing $n; done; echo "$CUDA_VISIBLE_DEVICES"'
    assert sorted(srun(lab, dgx, "-n2", "--gpus-per-task=1", script=script)) == ["0", "1"]


@pytest.mark.parametrize("bind", ["single:1", "map_gpu:1,0", "per_task:1"])
def test_tasks_that_are_bound_to_gpus(lab: Lab, dgx: dict[str, str], bind: str) -> None:
    script = 'test -e /dev/nvidia0 && test -e /dev/nvidia1 && echo "$CUDA_VISIBLE_DEVICES"'
    assert sorted(srun(lab, dgx, "-n2", "--gres=gpu:2", f"--gpu-bind={bind}", script=script)) == ["0", "1"]


def test_tasks_that_are_not_bound_have_the_gpus_too(lab: Lab, dgx: dict[str, str]) -> None:
    """Since 23.11, Slurm lists the GPUs in CUDA_VISIBLE_DEVICES. Earlier releases report only how many there are."""
    script = 'test -e /dev/nvidia0 && test -e /dev/nvidia1 && echo "both$CUDA_VISIBLE_DEVICES"'
    names = "0,1" if slurm_version() >= (23, 11) else ""
    assert srun(lab, dgx, "-n2", "--gres=gpu:2", "--gpu-bind=none", script=script) == [f"both{names}"] * 2


@pytest.mark.parametrize("option", ["--gpus-per-task=1", "--gpu-bind=none"])
def test_bound_tasks_of_a_batch_job_have_its_gpus_and_no_others(lab: Lab, dgx: dict[str, str], option: str) -> None:
    """On one node, the batch script has all GPUs of the job, so the container can have the GPUs of all tasks."""
    script = "\n".join(
        [
            "#!/bin/bash",
            f'srun {option} {IMAGE} sh -c "echo \\$({GPUS})" > out.bound',
        ]
    )
    lab.run(["sh", "-c", "cat > bound.sbatch"], input=script)
    sbatch(lab, "-N1", "-n2", "--gres=gpu:2", "-o", "out.log", "bound.sbatch", env=dgx)
    assert lab.run(["cat", "out.bound"]).stdout.split() == ["nvidia0", "nvidia1"] * 2


# If the device cgroup denies open(2), the error is EPERM. Any error about the missing driver means that the cgroup has
# allowed open(2).
OPENED = """
for n in 0 1 2 3; do
    test -e /dev/nvidia$n || continue
    said=$( (exec 3< /dev/nvidia$n) 2>&1) && echo $n && continue
    case $said in
    *"No such device"* | *"Input/output"*) echo $n ;;
    *"not permitted"*) echo no$n ;;
    *) echo "$said" ;;
    esac
done
"""


@pytest.fixture
def constrained(lab: Lab) -> Iterator[dict[str, str]]:
    """Yield variables for a fake host with four GPUs, on n1 with ConstrainDevices.

    The GPUs have the device numbers of the files in the lab's gres.conf.
    """
    if not os.path.isdir("/sys/fs/cgroup/devices"):
        pytest.skip("this machine's device cgroup is eBPF, for which Slurm needs systemd")
    host = fakehost.FakeHost(pathlib.Path(lab.root, "home/alice/four"))
    host.standard_nodes()
    host.driver()
    for index in range(4):
        host.gpu(index, fakehost.BUSES[index], index)
        (host.root / f"dev/nvidia{index}").unlink()
        host.node(f"/dev/nvidia{index}", 4, index)
    before = pathlib.Path(lab.root, "etc/slurm/cgroup.conf").read_text()
    try:
        lab.configure("cgroup.conf", before + "ConstrainDevices=yes\n")
        lab.restart_daemon("n1", "slurmd")
        yield {"PENROOT_HOST_ROOT": "/home/alice/four", "ENROOT_RESTRICT_DEV": "yes"}
    finally:
        lab.configure("cgroup.conf", before)
        lab.restart_daemon("n1", "slurmd")
        shutil.rmtree(host.root)


@pytest.mark.parametrize(
    ("options", "opened"),
    [
        (("--gres=gpu:2",), ["0", "1"]),
        (("-n2", "--gres=gpu:3"), ["0", "1", "2"] * 2),
        # Bound tasks: the container has all device nodes, and Slurm denies each task all GPUs but its own.
        (("-n2", "--gpus-per-task=1"), ["0", "no1", "no2", "no3", "no0", "1", "no2", "no3"]),
        # A step without GPUs, although a variable requests all GPUs.
        ((), ["no0", "no1", "no2", "no3"]),
    ],
    ids=["two", "three", "bound", "none"],
)
def test_device_cgroup_agrees(
    lab: Lab, constrained: dict[str, str], options: tuple[str, ...], opened: list[str]
) -> None:
    """A task can open exactly the GPUs that Slurm has allocated to it."""
    visible = {} if options else {"NVIDIA_VISIBLE_DEVICES": "all"}
    assert sorted(srun(lab, {**constrained, **visible}, "-w", "n1", *options, script=OPENED)) == sorted(opened)


def test_stale_gpu_variable_is_reported(lab: Lab, dgx: dict[str, str]) -> None:
    env = {**dgx, "NVIDIA_VISIBLE_DEVICES": "5"}
    done = lab.run(["srun", "--gres=gpu:1", IMAGE, "sh", "-c", GPUS], env=env)
    assert done.stdout.split() == ["nvidia0"]
    assert "NVIDIA_VISIBLE_DEVICES=5" in done.stderr


def test_gpus_of_other_vendors(lab: Lab) -> None:
    """ENROOT_DEVICES gives a step the device nodes of AMD and Intel GPUs, by CDI name or by path."""
    host = fakehost.other_vendors(pathlib.Path(lab.root, "home/alice/amd"))
    env = {"PENROOT_HOST_ROOT": "/home/alice/amd", "ENROOT_RESTRICT_DEV": "yes"}
    script = "find /dev/kfd /dev/dri -type c 2> /dev/null; true"
    try:
        for devices, expected in (
            ("amd.com/gpu=1", ["/dev/dri/renderD129", "/dev/kfd"]),
            ("intel.com/gpu=card2,/dev/kfd", ["/dev/dri/card2", "/dev/dri/renderD130", "/dev/kfd"]),
            ("", []),
        ):
            environ = {**env, "ENROOT_DEVICES": devices} if devices else env
            assert sorted(srun(lab, environ, "--gres=gpu:1", script=script)) == expected
        command = ["srun", "--gres=gpu:1", IMAGE, "true"]
        done = lab.run(command, env={**env, "ENROOT_DEVICES": "amd.com/gpu=7"}, check=False)
        assert done.returncode != 0
        assert "no CDI device amd.com/gpu=7" in done.stderr
    finally:
        shutil.rmtree(host.root)


def test_variables_and_limits_of_the_fabric_pass_unchanged(lab: Lab) -> None:
    value = "a'b\"c $(id) `x`; \\ ünï=*,[0-3]"
    names = ("HCOLL_MAIN_IB", "SHARP_COLL_LOG", "UCX_TLS", "NCCL_IB_HCA")
    script = "env | grep -aE '^(HCOLL|SHARP|UCX|NCCL)_' | sort; grep -E 'locked|stack' /proc/self/limits; df /dev/shm"
    command = ["srun", "--propagate=MEMLOCK,STACK", IMAGE, "sh", "-c", script]
    limited = ["prlimit", "--memlock=49152:", "--stack=6144000:"]
    env = dict.fromkeys(names, value)
    inside = lab.run([*limited, *command], env=env).stdout.splitlines()
    assert inside[:4] == sorted(f"{name}={value}" for name in names)
    outside = lab.run([*limited, *[word for word in command if word != IMAGE]], env=env).stdout.splitlines()
    assert inside == outside
    assert [line.split()[3] for line in inside[4:6]] == ["6144000", "49152"]


def test_caller_may_refuse(lab: Lab, dgx: dict[str, str]) -> None:
    """A variable of the caller keeps the allocated GPUs out of the container."""
    script = f"{GPUS}; echo none"
    assert srun(lab, {**dgx, "NVIDIA_VISIBLE_DEVICES": "void"}, "--gres=gpu:1", script=script) == ["none"]
    assert srun(lab, {**dgx, "PENROOT_SLURM_GPUS": "no"}, "--gres=gpu:1", script=script) == ["none"]


def test_batch_script_with_steps(lab: Lab, dgx: dict[str, str]) -> None:
    """A step that requests no GPU does not get the GPUs of its job."""
    script = "\n".join(
        [
            "#!/bin/bash",
            f'srun --gres=gpu:2 {IMAGE} sh -c "{GPUS}" > out.gpus',
            f'srun --gres=none {IMAGE} sh -c "{GPUS}; echo none" > out.none',
        ]
    )
    lab.run(["sh", "-c", "cat > gpus.sbatch"], input=script)
    sbatch(lab, "--gres=gpu:2", "-o", "out.log", "gpus.sbatch", env=dgx)
    assert lab.run(["cat", "out.gpus"]).stdout.split() == ["nvidia0", "nvidia1"]
    assert lab.run(["cat", "out.none"]).stdout.split() == ["none"]


@pytest.mark.parity("ROCR_VISIBLE_DEVICES")
def test_gpus_of_amd_that_slurm_allocated(lab: Lab) -> None:
    """The second job's device files keep the node's GPU numbers.

    ROCm numbers a container's GPUs from 0, and HIP numbers the GPUs that ROCm shows.
    """
    host = fakeaccelerators.mi300x(pathlib.Path(lab.root, "home/alice/mi300x"))
    env = {"PENROOT_HOST_ROOT": "/home/alice/mi300x", "ENROOT_RESTRICT_DEV": "yes"}
    say = "echo $(cd /dev/dri && ls -d render*) $ROCR_VISIBLE_DEVICES $GPU_DEVICE_ORDINAL"
    first = lab.popen(["srun", "-w", "n1", "--gres=gpu:2", IMAGE, "sh", "-c", f"echo up; {say}; read line"], env=env)
    expect(first, "up")
    try:
        out = srun(lab, env, "-w", "n1", "--gres=gpu:2", script=say)
        assert out == ["renderD130", "renderD131", "0,1", "0,1"]
        # Slurm does not name the GPUs of a step with bound tasks. The container has all GPUs, and each task gets the
        # number of its own GPU.
        count = "echo $(ls -d /dev/dri/render* | wc -l) $ROCR_VISIBLE_DEVICES $GPU_DEVICE_ORDINAL"
        bound = srun(lab, env, "-w", "n1", "-n2", "--gres=gpu:2", "--gpu-bind=single:1", script=count)
        assert sorted(bound) == sorted(["8", "2", "0", "8", "3", "0"])
    finally:
        out, _ = end(first)
        shutil.rmtree(host.root)
    assert out == "renderD128 renderD129 0,1 0,1\n"
