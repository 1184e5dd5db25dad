#!/usr/bin/env bash
# Accelerate: without cpu=True, two processes on CPUs form a group and train two models.
#
# Versions: accelerate 1.15.0, torch 2.15.0, on a machine without GPUs
# Expected: The two processes of torchrun average their gradients, or Accelerator raises an error.
# Seen: The process group has two members, but each Accelerator reports one process and wraps
#   nothing. Both train a model of their own, and both are the main process.
# Output:
#   rank 1, Accelerator({}): members=2, num_processes=1, main=True, the weight moves by 1.0
#   rank 0, Accelerator({}): members=2, num_processes=1, main=True, the weight moves by 0.0
#   rank 0, Accelerator({'cpu': True}): members=2, num_processes=2, main=True, the weight moves by 0.5
#   rank 1, Accelerator({'cpu': True}): members=2, num_processes=2, main=False, the weight moves by 0.5
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6 accelerate==1.15.0)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
cat > check.py <<'PYTHON'
import os
import sys
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState

rank = int(os.environ["RANK"])
seen = []
for arguments in ({}, {"cpu": True}):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(**arguments)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = accelerator.unwrap_model(model).weight.item()
    accelerator.backward(model(torch.full((1, 1), float(rank))).sum())
    optimizer.step()
    moved = round(before - accelerator.unwrap_model(model).weight.item(), 4)
    members, processes = dist.get_world_size(), accelerator.num_processes
    seen.append((members, processes, accelerator.is_main_process, moved))
    print(
        f"rank {rank}, Accelerator({arguments}): members={members}, num_processes={processes}, "
        f"main={accelerator.is_main_process}, the weight moves by {moved}",
        flush=True,
    )
dist.destroy_process_group()
if seen != [(2, 1, True, float(rank)), (2, 2, rank == 0, 0.5)]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 check.py
