#!/usr/bin/env bash
# DistributedDataParallel: the previous forward pass decides whether buffers are broadcast.
#
# Versions: torch 2.15.0 with gloo, on CPUs
# Expected: With broadcast_buffers=True, each forward pass in training begins with the buffers of
#   rank 0.
# Seen: A forward pass under no_grad or no_sync turns off the broadcast of the next one. A training
#   step after a validation batch therefore uses the buffers of its own rank.
# Output:
#   after training: the buffer of rank 1 is 0.0, that of rank 0 is 0.0
#   after no_grad: the buffer of rank 1 is 1.0, that of rank 0 is 0.0
#   after no_sync: the buffer of rank 1 is 1.0, that of rank 0 is 0.0
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


class Shifted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, batch):
        return self.linear(batch) + self.shift


def train(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    batch = torch.ones(1, 1)
    seen = {}
    for previous in ("training", "no_grad", "no_sync"):
        model = DistributedDataParallel(Shifted())
        if previous == "training":
            model(batch).sum().backward()
        elif previous == "no_grad":
            with torch.no_grad():
                model(batch)
        else:
            with model.no_sync():
                model(batch).sum().backward()
        model.module.shift.fill_(rank)
        model(batch).sum().backward()
        seen[previous] = model.module.shift.item()
    if rank == 1:
        for previous, shift in seen.items():
            print(f"after {previous}: the buffer of rank 1 is {shift}, that of rank 0 is 0.0")
        if seen != {"training": 0.0, "no_grad": 1.0, "no_sync": 1.0}:
            sys.exit("The behavior has changed.")


if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), nprocs=2)
PYTHON
timeout 120 venv/bin/python check.py "$folder/file"
