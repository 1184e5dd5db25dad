#!/usr/bin/env bash
# gloo: reduce changes the tensors of the ranks that only send.
#
# Versions: torch 2.15.0 with gloo, on CPUs
# Expected: Reduce writes to the destination only, as it does with NCCL. Other ranks keep their
#   values, and can still use them, for example as the metrics of their own part of the data.
# Seen: A part of the sum, from an element that depends on the size and the rank, is in the tensor
#   of the other rank. Open since 2022: https://github.com/pytorch/pytorch/issues/76527
# Output:
#   rank 0 passes 4 times 1.0 and gets [3.0, 3.0, 3.0, 3.0]
#   rank 1 passes 4 times 2.0 and gets [2.0, 2.0, 3.0, 3.0]
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


def reduce(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    value = rank + 1.0
    tensor = torch.full((4,), value)
    dist.reduce(tensor, dst=0)
    for each in range(2):
        dist.barrier()
        if rank == each:
            print(f"rank {rank} passes 4 times {value} and gets {tensor.tolist()}", flush=True)
    if tensor.tolist() != [[3.0] * 4, [2.0, 2.0, 3.0, 3.0]][rank]:
        sys.exit("The behavior has changed.")


if __name__ == "__main__":
    mp.spawn(reduce, (sys.argv[1],), nprocs=2)
PYTHON
timeout 120 venv/bin/python check.py "$folder/file"
