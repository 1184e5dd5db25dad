#!/usr/bin/env bash
# gloo: all_reduce and broadcast of a strided view write to other elements.
#
# Versions: torch 2.15.0 with gloo, on CPUs
# Expected: The call changes the elements of the view, or refuses a tensor that is not contiguous.
# Seen: The call changes as many elements as the view has, from the first one on in memory. The
#   first column of a matrix as view changes the first row. There is no error and no warning.
# Output:
#   all_reduce of the first column, rank 1: [[30.0, 30.0, 30.0], [20.0, 20.0, 20.0], [20.0, 20.0, 20.0]]
#   broadcast of the first column, rank 1:  [[10.0, 10.0, 10.0], [20.0, 20.0, 20.0], [20.0, 20.0, 20.0]]
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


def share_a_column(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    seen = []
    for share in (dist.all_reduce, lambda column: dist.broadcast(column, src=0)):
        matrix = torch.full((3, 3), 10.0 * (rank + 1))
        share(matrix[:, 0])
        seen.append(matrix.tolist())
    if rank == 1:
        print("all_reduce of the first column, rank 1:", seen[0])
        print("broadcast of the first column, rank 1: ", seen[1])
        if seen != [[[30.0] * 3, [20.0] * 3, [20.0] * 3], [[10.0] * 3, [20.0] * 3, [20.0] * 3]]:
            sys.exit("The behavior has changed.")


if __name__ == "__main__":
    mp.spawn(share_a_column, (sys.argv[1],), nprocs=2)
PYTHON
timeout 120 venv/bin/python check.py "$folder/file"
