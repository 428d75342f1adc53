"""A real GPU in a container: the same devices, the same results, the same speed as outside."""

from __future__ import annotations

import glob
import json
import os
import pathlib
import shutil
import subprocess

import pytest

from tests.gpu.conftest import Box, libraries

pytestmark = pytest.mark.gpu

VECTOR_ADD = r"""
#include <cstdio>
#include <cstdlib>
__global__ void add(const float *a, const float *b, float *c, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n)
		c[i] = a[i] + b[i];
}
int main()
{
	const int n = 1 << 20;
	const size_t size = n * sizeof(float);
	float *a = (float *)malloc(size), *b = (float *)malloc(size), *c = (float *)calloc(n, sizeof(float));
	for (int i = 0; i < n; i++) {
		a[i] = i;
		b[i] = 2 * i;
	}
	float *on_gpu[3];
	for (int i = 0; i < 3; i++)
		cudaMalloc(&on_gpu[i], size);
	cudaMemcpy(on_gpu[0], a, size, cudaMemcpyHostToDevice);
	cudaMemcpy(on_gpu[1], b, size, cudaMemcpyHostToDevice);
	add<<<(n + 255) / 256, 256>>>(on_gpu[0], on_gpu[1], on_gpu[2], n);
	cudaMemcpy(c, on_gpu[2], size, cudaMemcpyDeviceToHost);
	cudaError_t error = cudaGetLastError();
	int wrong = 0;
	for (int i = 0; i < n; i++)
		wrong += c[i] != 3.0f * i;
	printf("%s, %d wrong\n", cudaGetErrorString(error), wrong);
	return wrong != 0;
}
"""

# The same with the driver alone, which compiles the kernel itself.
WITH_DRIVER = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static const char kernel[] =
	".version 6.3\n.target sm_75\n.address_size 64\n"
	".visible .entry vector_add(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u32 pn)\n"
	"{\n"
	"	.reg .pred %p<2>;\n	.reg .b32 %r<6>;\n	.reg .f32 %f<4>;\n	.reg .b64 %rd<8>;\n"
	"	ld.param.u64 %rd1, [pa];\n	ld.param.u64 %rd2, [pb];\n	ld.param.u64 %rd3, [pc];\n"
	"	ld.param.u32 %r1, [pn];\n"
	"	mov.u32 %r2, %ctaid.x;\n	mov.u32 %r3, %ntid.x;\n	mov.u32 %r4, %tid.x;\n"
	"	mad.lo.u32 %r5, %r2, %r3, %r4;\n"
	"	setp.ge.u32 %p1, %r5, %r1;\n	@%p1 bra DONE;\n"
	"	mul.wide.u32 %rd4, %r5, 4;\n"
	"	add.u64 %rd5, %rd1, %rd4;\n	add.u64 %rd6, %rd2, %rd4;\n	add.u64 %rd7, %rd3, %rd4;\n"
	"	ld.global.f32 %f1, [%rd5];\n	ld.global.f32 %f2, [%rd6];\n"
	"	add.f32 %f3, %f1, %f2;\n	st.global.f32 [%rd7], %f3;\n"
	"DONE:\n	ret;\n}\n";

static void *cuda;

static void *function(const char *name)
{
	void *found = dlsym(cuda, name);
	if (found == NULL) {
		fprintf(stderr, "libcuda.so.1 has no %s\n", name);
		exit(2);
	}
	return found;
}

#define CALL(name, ...)                                                                                                \
	do {                                                                                                           \
		int (*call)() = (int (*)())function(#name);                                                            \
		int code = call(__VA_ARGS__);                                                                          \
		if (code) {                                                                                            \
			fprintf(stderr, #name " gave %d\n", code);                                                     \
			return 1;                                                                                      \
		}                                                                                                      \
	} while (0)

int main(int argc, char **argv)
{
	if (argc > 1)
		return fputs(kernel, stdout) == EOF;
	cuda = dlopen("libcuda.so.1", RTLD_NOW);
	if (cuda == NULL) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	unsigned n = 1 << 20;
	size_t size = n * sizeof(float);
	float *a = malloc(size), *b = malloc(size), *c = calloc(n, sizeof *c);
	for (unsigned i = 0; i < n; i++) {
		a[i] = i;
		b[i] = 2 * i;
	}
	int device;
	void *context, *module, *add;
	unsigned long long da, db, dc;
	CALL(cuInit, 0U);
	CALL(cuDeviceGet, &device, 0);
	CALL(cuDevicePrimaryCtxRetain, &context, device);
	CALL(cuCtxSetCurrent, context);
	CALL(cuModuleLoadData, &module, kernel);
	CALL(cuModuleGetFunction, &add, module, "vector_add");
	CALL(cuMemAlloc_v2, &da, size);
	CALL(cuMemAlloc_v2, &db, size);
	CALL(cuMemAlloc_v2, &dc, size);
	CALL(cuMemcpyHtoD_v2, da, a, size);
	CALL(cuMemcpyHtoD_v2, db, b, size);
	void *arguments[] = {&da, &db, &dc, &n};
	CALL(cuLaunchKernel, add, (n + 255) / 256, 1U, 1U, 256U, 1U, 1U, 0U, NULL, arguments, NULL);
	CALL(cuCtxSynchronize);
	CALL(cuMemcpyDtoH_v2, c, dc, size);
	int wrong = 0;
	for (unsigned i = 0; i < n; i++)
		wrong += c[i] != 3.0f * i;
	printf("no error, %d wrong\n", wrong);
	return wrong != 0;
}
"""

# The best of ten batches after the clocks have settled, so that other load on the GPU does not count.
MATMUL = """
import time, torch
torch.manual_seed(1)
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
def batch(count):
    begin = time.perf_counter()
    for _ in range(count):
        c = a @ b
    torch.cuda.synchronize()
    return c, (time.perf_counter() - begin) / count
until = time.perf_counter() + 1
while time.perf_counter() < until:
    c, _ = batch(100)
best = min(batch(100)[1] for _ in range(10))
print("result", c.float().sum().item(), torch.cuda.get_device_name())
print("TFLOP/s", 2 * 4096**3 / best / 1e12)
"""

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
x = torch.full((1 << 20,), 3.0, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
print("sum", x.sum().item())
dist.destroy_process_group()
"""


def rest_of_line(output: str, word: str) -> str:
    """Return the rest of the line that begins with ``word``."""
    return next(line.partition(" ")[2] for line in output.splitlines() if line.startswith(word + " "))


def test_the_gpus_of_outside(box: Box) -> None:
    outside = shutil.which("nvidia-smi")
    if outside is None:
        pytest.skip("nvidia-smi is not installed")
    wanted = subprocess.run([outside, "-L"], capture_output=True, text=True, check=True).stdout
    box.add(outside)  # for its libraries; the program itself is mounted over the copy
    (box.root / outside.lstrip("/")).unlink()
    assert box.run("nvidia-smi", "-L") == wanted
    first = box.run("nvidia-smi", "-L", env={"NVIDIA_VISIBLE_DEVICES": "0"}).splitlines()
    assert first[0] == wanted.splitlines()[0]
    uuid = wanted.split("UUID: ")[1].split(")")[0]
    # Use NVML if /proc does not list them.
    for environ in ({}, {"ENROOT_RESTRICT_DEV": "y"}):
        assert uuid in box.run("nvidia-smi", "-L", env={"NVIDIA_VISIBLE_DEVICES": uuid, **environ})
    # Like Slurm.
    minor = next(path.removeprefix("/dev/nvidia") for path in sorted(glob.glob("/dev/nvidia[0-9]*")))
    step = {"NVIDIA_VISIBLE_DEVICES": "all", "SLURM_STEP_GPUS": minor, "ENROOT_RESTRICT_DEV": "y"}
    assert len(box.run("nvidia-smi", "-L", env=step).splitlines()) == 1


def test_explained(box: Box) -> None:
    """The plan names this machine's devices, and a container has them."""
    done = box.user.penroot("start", "--explain", "box", env={"NVIDIA_VISIBLE_DEVICES": "all"})
    lines = [line.split() for line in done.stdout.splitlines()]
    planned = {words[1] for words in lines if words and words[0] in ("device", "file", "link")}
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= planned
    assert {pathlib.Path(path).name for path in planned} >= {"libcuda.so.1", "libnvidia-ml.so.1"}
    assert "WARN" not in done.stderr
    missing = box.run("sh", "-c", 'for p in "$@"; do test -e "$p" || echo "$p"; done', "sh", *sorted(planned))
    assert missing == ""


def compiled(tmp_path: pathlib.Path, how: str) -> pathlib.Path:
    """Compile a program that adds vectors on the GPU."""
    program = tmp_path / "add"
    if how == "driver":
        if shutil.which("gcc") is None:
            pytest.skip("gcc is not installed")
        (tmp_path / "add.c").write_text(WITH_DRIVER)
        command = ["gcc", "-std=gnu11", "-o", program, tmp_path / "add.c", "-ldl"]
    else:
        compiler = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
        if compiler is None:
            pytest.skip("nvcc is not installed")
        (tmp_path / "add.cu").write_text(VECTOR_ADD)
        command = [compiler, "-arch=native", "-o", program, tmp_path / "add.cu"]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize("how", ["driver", "nvcc"])
def test_vector_add(box: Box, tmp_path: pathlib.Path, how: str) -> None:
    program = compiled(tmp_path, how)
    outside = subprocess.run([program], capture_output=True, text=True, check=False)
    assert outside.stdout == "no error, 0 wrong\n", f"outside: {outside.stdout}{outside.stderr}"
    box.copy(libraries([str(program)]))
    shutil.copy(program, box.root / "bin/add")
    box.user.own(box.root)
    for environ in ({}, {"ENROOT_RESTRICT_DEV": "yes"}, {"NVIDIA_VISIBLE_DEVICES": "0"}):
        assert box.run("/bin/add", env=environ) == "no error, 0 wrong\n", environ


def test_vector_add_by_cdi(box: Box, tmp_path: pathlib.Path) -> None:
    """With a specification of this machine's devices, which only these containers see."""
    if os.geteuid():
        pytest.skip("only root has a /run of his own")
    program = compiled(tmp_path, "driver")
    box.copy(libraries([str(program)]))
    shutil.copy(program, box.root / "bin/add")
    box.user.own(box.root)
    environ = {"NVIDIA_VISIBLE_DEVICES": "all", "PENROOT_NVIDIA_MODE": "native"}
    lines = box.user.penroot("start", "--explain", "box", env=environ).stdout.splitlines()
    planned = [words for words in map(str.split, lines) if words[2:3] == ["from"]]
    mounts = [{"containerPath": word[1], "hostPath": word[3]} for word in planned if word[0] == "file"]
    folders = {path.rpartition("/")[0] for path in (mount["containerPath"] for mount in mounts) if ".so." in path}
    arguments = [word for folder in sorted(folders) for word in ("--folder", folder)]
    edits = {
        "deviceNodes": [{"path": word[3]} for word in planned if word[0] == "device"],
        "mounts": mounts,
        "hooks": [{"hookName": "createContainer", "args": ["nvidia-cdi-hook", "update-ldcache", *arguments]}],
        "env": ["FROM_CDI=yes"],
    }
    spec = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [{"name": "all", "containerEdits": edits}]}
    (tmp_path / "gpu.json").write_text(json.dumps(spec))
    script = 'mount -t tmpfs run /run && mkdir /run/cdi && cp "$0" /run/cdi && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", script, str(tmp_path / "gpu.json"))
    for options in (("--device", "nvidia.com/gpu=all"), ("-e", "NVIDIA_VISIBLE_DEVICES=all")):
        command = ("penroot", "start", *options, "box", "sh", "-c", "echo $FROM_CDI; add")
        out = box.user.run(*command, env={"PENROOT_NVIDIA_MODE": "cdi"}, prefix=prefix).stdout
        assert out == "yes\nno error, 0 wrong\n"


def test_matmul_is_equal_and_as_fast(torch_box: tuple[Box, str]) -> None:
    """On a GPU without other users."""
    box, python = torch_box
    outside = subprocess.run([python, "-c", MATMUL], capture_output=True, text=True, check=True).stdout
    inside = box.run(python, "-c", MATMUL)
    assert rest_of_line(inside, "result") == rest_of_line(outside, "result")
    speeds = float(rest_of_line(inside, "TFLOP/s")), float(rest_of_line(outside, "TFLOP/s"))
    print("TFLOP/s inside and outside:", *speeds)
    assert speeds[0] > 0.9 * speeds[1]


def test_all_reduce(torch_box: tuple[Box, str]) -> None:
    box, python = torch_box
    assert rest_of_line(box.run(python, "-c", ALL_REDUCE), "sum") == str(3.0 * (1 << 20))


def test_void_gives_no_driver(box: Box) -> None:
    (box.root / "bin/find").symlink_to("busybox")
    out = box.run("find", "/usr", "-name", "libcuda*", env={"NVIDIA_VISIBLE_DEVICES": "void"})
    assert out == ""
