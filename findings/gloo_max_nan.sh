#!/usr/bin/env bash
# gloo: all_reduce with MAX or MIN loses NaN values.
#
# Versions: torch 2.15.0 with gloo, on CPUs
# Expected: A NaN of any rank makes the element NaN on all ranks, as in torch.maximum.
# Seen: A NaN of rank 1 is lost in a tensor of one element. Half of the NaN values are lost in
#   larger tensors, whichever rank has them.
# Output:
#   MAX: 1 NaN on rank 0, 1 NaN in the result
#   MAX: 1000000 NaN on rank 0, 500000 NaN in the result
#   MAX: 1 NaN on rank 1, 0 NaN in the result
#   MAX: 1000000 NaN on rank 1, 500000 NaN in the result
#   MIN: 1 NaN on rank 0, 1 NaN in the result
#   MIN: 1000000 NaN on rank 0, 500000 NaN in the result
#   MIN: 1 NaN on rank 1, 0 NaN in the result
#   MIN: 1000000 NaN on rank 1, 500000 NaN in the result
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


def count_nans(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    seen = {}
    for operation in ("MAX", "MIN"):
        for owner in (0, 1):
            for size in (1, 1_000_000):
                tensor = torch.full((size,), float("nan") if rank == owner else 0.0)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
                seen[operation, owner, size] = int(tensor.isnan().sum())
    if rank == 0:
        for (operation, owner, size), count in seen.items():
            print(f"{operation}: {size} NaN on rank {owner}, {count} NaN in the result")
    want = {(0, 1): 1, (1, 1): 0, (0, 1_000_000): 500_000, (1, 1_000_000): 500_000}
    if any(want[key[1:]] != count for key, count in seen.items()):
        sys.exit("The behavior has changed.")


if __name__ == "__main__":
    mp.spawn(count_nans, (sys.argv[1],), nprocs=2)
PYTHON
timeout 120 venv/bin/python check.py "$folder/file"
