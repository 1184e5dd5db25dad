#!/usr/bin/env bash
# Lightning Fabric: setup_dataloaders turns batches of a BatchSampler into single samples in order.
#
# Versions: lightning 2.6.6, torch 2.15.0, on CPUs
# Expected: Each of two processes gets half of the shuffled batches, with three samples each; or an
#   error.
# Seen: Each process gets batches of one sample, in the order of the data set. A subclass of
#   BatchSampler keeps the size, but loses the order of its sampler. There is no warning.
# Output:
#   BatchSampler, plain:  [[8, 0, 5], [9, 7, 4], [2, 10, 3], [1, 11, 6]]
#   BatchSampler, rank 0: [[0], [2], [4], [6], [8], [10]]
#   Own, plain:  [[8, 0, 5], [9, 7, 4], [2, 10, 3], [1, 11, 6]]
#   Own, rank 0: [[0, 2, 4], [6, 8, 10]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6 lightning==2.6.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
cat > check.py <<'PYTHON'
import logging
import sys
import torch
from lightning.fabric import Fabric
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


class Own(BatchSampler):
    pass


def read(fabric):
    seen = []
    for sampler in (BatchSampler, Own):
        shuffled = RandomSampler(range(12), generator=torch.Generator().manual_seed(0))
        loader = DataLoader(range(12), batch_sampler=sampler(shuffled, 3, drop_last=False))
        if fabric.global_rank == 0:
            print(f"{sampler.__name__}, plain: ", [batch.tolist() for batch in loader])
        seen.append([batch.tolist() for batch in fabric.setup_dataloaders(loader)])
        if fabric.global_rank == 0:
            print(f"{sampler.__name__}, rank 0:", seen[-1])
    if fabric.global_rank == 0 and seen != [
        [[0], [2], [4], [6], [8], [10]],
        [[0, 2, 4], [6, 8, 10]],
    ]:
        sys.exit("The behavior has changed.")


if __name__ == "__main__":
    Fabric(accelerator="cpu", devices=2, strategy="ddp").launch(read)
PYTHON
timeout 120 venv/bin/python check.py
