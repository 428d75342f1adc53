"""Fit a line on all GPUs of a job, with torch.distributed."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        x = torch.rand(1024, 1, device=device)
        loss = ((model(x) - (3 * x + 1)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"{int(total.item())} ranks, loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
