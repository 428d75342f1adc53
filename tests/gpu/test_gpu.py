"""A real GPU in a container: the same devices, the same results, the same speed as outside."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from tests.gpu.conftest import Box

pytestmark = pytest.mark.gpu

VECTOR_ADD = r"""
#include <cstdio>
__global__ void add(const float *a, const float *b, float *c, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n)
		c[i] = a[i] + b[i];
}
int main()
{
	const int n = 1 << 20;
	float *a, *b, *c;
	cudaMallocManaged(&a, n * sizeof *a);
	cudaMallocManaged(&b, n * sizeof *b);
	cudaMallocManaged(&c, n * sizeof *c);
	for (int i = 0; i < n; i++) {
		a[i] = i;
		b[i] = 2 * i;
	}
	add<<<(n + 255) / 256, 256>>>(a, b, c, n);
	cudaError_t error = cudaDeviceSynchronize();
	int wrong = 0;
	for (int i = 0; i < n; i++)
		wrong += c[i] != 3.0f * i;
	printf("%s, %d wrong\n", cudaGetErrorString(error), wrong);
	return wrong != 0;
}
"""

MATMUL = """
import time, torch
torch.manual_seed(1)
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
for _ in range(20):
    c = a @ b
torch.cuda.synchronize()
begin = time.perf_counter()
for _ in range(200):
    c = a @ b
torch.cuda.synchronize()
print(torch.cuda.get_device_name(), c.float().sum().item(), time.perf_counter() - begin)
"""

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29417", rank=0, world_size=1)
x = torch.full((1 << 20,), 3.0, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
print(x.sum().item())
dist.destroy_process_group()
"""


def test_the_gpus_of_outside(box: Box) -> None:
    outside = shutil.which("nvidia-smi")
    if outside is None:
        pytest.skip("nvidia-smi is not installed")
    wanted = subprocess.run([outside, "-L"], capture_output=True, text=True, check=True).stdout
    box.add(outside)  # for its libraries; the program itself is bound over it
    (box.root / outside.lstrip("/")).unlink()
    assert box.run("nvidia-smi", "-L") == wanted
    first = box.run("nvidia-smi", "-L", env={"NVIDIA_VISIBLE_DEVICES": "0"}).splitlines()
    assert first[0] == wanted.splitlines()[0]
    uuid = wanted.split("UUID: ")[1].split(")")[0]
    assert uuid in box.run("nvidia-smi", "-L", env={"NVIDIA_VISIBLE_DEVICES": uuid, "ENROOT_RESTRICT_DEV": "y"})


def test_vector_add(box: Box, tmp_path: pathlib.Path) -> None:
    compiler = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if compiler is None:
        pytest.skip("nvcc is not installed")
    (tmp_path / "add.cu").write_text(VECTOR_ADD)
    program = tmp_path / "add"
    subprocess.run([compiler, "-arch=native", "-o", program, tmp_path / "add.cu"], check=True)
    target = box.root / "bin/add"
    shutil.copy(program, target)
    box.add(program)
    box.user.own(target)
    for environ in ({}, {"ENROOT_RESTRICT_DEV": "yes"}, {"NVIDIA_VISIBLE_DEVICES": "0"}):
        assert box.run("/bin/add", env=environ) == "no error, 0 wrong\n", environ


def test_matmul_is_equal_and_as_fast(torch_box: tuple[Box, str]) -> None:
    box, python = torch_box
    outside = subprocess.run([python, "-c", MATMUL], capture_output=True, text=True, check=True).stdout.split()
    inside = box.run(python, "-c", MATMUL).split()
    assert inside[:-1] == outside[:-1]
    assert float(inside[-1]) < 1.1 * float(outside[-1])


def test_all_reduce(torch_box: tuple[Box, str]) -> None:
    box, python = torch_box
    assert box.run(python, "-c", ALL_REDUCE).split()[-1] == str(3.0 * (1 << 20))


def test_void_gives_no_driver(box: Box) -> None:
    (box.root / "bin/find").symlink_to("busybox")
    out = box.run("find", "/usr", "-name", "libcuda*", env={"NVIDIA_VISIBLE_DEVICES": "void"})
    assert out == ""
