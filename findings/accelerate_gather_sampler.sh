#!/usr/bin/env bash
# Accelerate: gather_for_metrics loses samples if a sampler selects a part of the data set.
#
# Versions: accelerate 1.15.0, torch 2.15.0 with gloo, on CPUs
# Expected: Two processes with batches of two gather the eight samples that the sampler selects. A
#   torch.utils.data.Subset of the same samples does.
# Seen: The last two samples are missing. Accelerate computes how many samples repeat from the
#   length of the data set, which is 10 here, and not from that of the sampler.
# Output:
#   sampler: [7, 6, 5, 4, 3, 2]
#   Subset:  [7, 6, 5, 4, 3, 2, 1, 0]
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
import sys
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, Subset

data, selected = range(10), [7, 6, 5, 4, 3, 2, 1, 0]
accelerator = Accelerator(cpu=True)
seen = []
for loader in (
    DataLoader(data, batch_size=2, sampler=selected),
    DataLoader(Subset(data, selected), batch_size=2),
):
    batches = [accelerator.gather_for_metrics(batch) for batch in accelerator.prepare(loader)]
    seen.append([sample for batch in batches for sample in batch.tolist()])
if accelerator.is_main_process:
    print("sampler:", seen[0])
    print("Subset: ", seen[1])
dist.destroy_process_group()
if seen != [selected[:6], selected]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 check.py
