#!/usr/bin/env bash
# DistributedDataParallel: an Embedding with max_norm makes the ranks differ.
#
# Versions: torch 2.15.0 with gloo, on CPUs
# Expected: After each step, all ranks have the same parameters.
# Seen: The forward pass of nn.Embedding(max_norm=...) changes the rows that it reads, in the
#   parameter itself. Each rank shortens the rows of its own batch only, and DDP averages gradients
#   only, so the ranks train different models from the first step on. There is no error.
# Output:
#   rank 0, lr=0: the lengths of the rows are [1.0, 3.0]
#   rank 1, lr=0: the lengths of the rows are [3.0, 1.0]
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
    rows = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
    model = DistributedDataParallel(torch.nn.Embedding(2, 2, max_norm=1.0, _weight=rows))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([rank])).sum().backward()
        optimizer.step()
    lengths = [round(length, 4) for length in model.module.weight.norm(dim=1).tolist()]
    for each in range(2):
        dist.barrier()
        if rank == each:
            print(f"rank {rank}, lr=0: the lengths of the rows are {lengths}", flush=True)
    if lengths != [[1.0, 3.0], [3.0, 1.0]][rank]:
        sys.exit("The behavior has changed.")


if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), nprocs=2)
PYTHON
timeout 120 venv/bin/python check.py "$folder/file"
