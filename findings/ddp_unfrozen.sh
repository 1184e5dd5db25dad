#!/usr/bin/env bash
# DistributedDataParallel: a parameter that you unfreeze later trains on each rank alone.
#
# Versions: torch 2.15.0 with gloo, on CPUs
# Expected: The gradient of an unfrozen parameter is averaged, or the next step is an error, as it
#   is if you freeze one.
# Seen: DDP decides in its constructor which gradients it averages. In gradual unfreezing, the ranks
#   use their own gradients for the new parameters, and train different models. The documentation
#   says not to change parameters after wrapping, and there is no error.
# Output:
#   rank 0: gradient of the head 1.5, of the unfrozen body 1.0
#   rank 1: gradient of the head 1.5, of the unfrozen body 2.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
cat > check.py <<'PYTHON'
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def train(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    body, head = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    for layer in (body, head):
        torch.nn.init.ones_(layer.weight)
    body.requires_grad_(False)
    model = DistributedDataParallel(torch.nn.Sequential(body, head))
    batch = torch.full((1, 1), rank + 1.0)
    model(batch).sum().backward()  # of the first epochs
    body.requires_grad_(True)
    model.zero_grad()
    model(batch).sum().backward()
    gradients = head.weight.grad.item(), body.weight.grad.item()
    for each in range(2):
        dist.barrier()
        if rank == each:
            seen = "gradient of the head {}, of the unfrozen body {}".format(*gradients)
            print(f"rank {rank}: {seen}", flush=True)
    if gradients != (1.5, rank + 1.0):
        sys.exit("The behavior has changed.")


if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), nprocs=2)
PYTHON
timeout 120 venv/bin/python check.py "$folder/file"
