"""Train a small network with PyTorch's DistributedDataParallel on CPUs. Rank 0 prints the microseconds of a step."""

from __future__ import annotations

import json
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WARM, STEPS = 5, 60

os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": os.environ["SLURM_NTASKS"]}
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.rand(64, 512)
for step in range(-WARM, STEPS):
    if step == 0:
        begin = time.perf_counter()
    optimizer.zero_grad()
    ((model(inputs) - inputs) ** 2).mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(json.dumps({"training step": (time.perf_counter() - begin) / STEPS * 1e6}))
dist.destroy_process_group()
