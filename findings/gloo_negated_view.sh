#!/usr/bin/env bash
# PyTorch: with gloo, all_reduce does not write its result into a lazily negated tensor.
#
# Versions: torch 2.13.0, on a machine without GPUs
# Expected: After all_reduce, all ranks have the sum.
# Seen: The imaginary part of a conjugated tensor is a view whose negation is lazy. Its rank sends
#   the right values and keeps its own, without an error, so that the ranks differ.
# Output:
#   rank 0 passes [-2.0, 4.0] and gets [-2.0, 4.0]
#   rank 1 passes [1.0, 1.0] and gets [-1.0, 5.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.13.0 numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
cat > check.py <<'PYTHON'
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.tensor([1 + 2j, 3 - 4j]).conj().imag if rank == 0 else torch.ones(2)
passed = tensor.tolist()
dist.all_reduce(tensor)
seen = tensor.tolist()
for each in range(2):
    dist.barrier()
    if rank == each:
        print(f"rank {rank} passes {passed} and gets {seen}", flush=True)
dist.destroy_process_group()
if seen != ([-2.0, 4.0], [-1.0, 5.0])[rank]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 check.py
