#!/usr/bin/env bash
# torch.distributed.checkpoint: of equal names on two ranks, one value remains.
#
# Versions: torch 2.15.0 with gloo, on CPUs
# Expected: Each rank gets its own values back, or saving refuses different values of one name.
# Seen: All ranks get the tensor of rank 0 and the number of rank 1. One checkpoint mixes two ranks,
#   without a warning.
# Output:
#   rank 1 saved 1 and 1, and loads {'tensor': tensor([0]), 'number': 1}
#   rank 0 saved 0 and 0, and loads {'tensor': tensor([0]), 'number': 1}
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
import warnings
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp


def save_and_load(rank, file):
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    dcp.save({"tensor": torch.tensor([rank]), "number": rank}, checkpoint_id=f"{file}.checkpoint")
    state = {"tensor": torch.tensor([-1]), "number": -1}
    dcp.load(state, checkpoint_id=f"{file}.checkpoint")
    print(f"rank {rank} saved {rank} and {rank}, and loads {state}", flush=True)
    if (state["tensor"].item(), state["number"]) != (0, 1):
        sys.exit("The behavior has changed.")


if __name__ == "__main__":
    mp.spawn(save_and_load, (sys.argv[1],), nprocs=2)
PYTHON
timeout 120 venv/bin/python check.py "$folder/file"
