#!/usr/bin/env bash
# torch.utils.data: a reference cycle around a loader makes its end take 5 s for each process.
#
# Versions: torch 2.15.0
# Expected: The processes of a loader end as fast in a garbage collection as when the last reference
#   to its iterator goes.
# Seen: In a collection, Python first finalizes the queues of the iterator, so the request to end
#   does not reach the processes. The collection waits for each of them for 5 s, wherever it happens
#   to run: in another epoch, or in the middle of a step.
# Output:
#   without a cycle: less than 2 s
#   in a cycle: 4 s or more
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
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
cat > check.py <<'PYTHON'
import gc
import sys
import time
from types import SimpleNamespace

from torch.utils.data import DataLoader


def seconds_to_end(in_cycle):
    batches = iter(DataLoader(range(60), num_workers=1))
    next(batches)
    owner = SimpleNamespace(batches=batches)
    owner.self = owner if in_cycle else None
    began = time.perf_counter()
    del batches, owner
    gc.collect()
    return time.perf_counter() - began


if __name__ == "__main__":
    plain, in_cycle = seconds_to_end(False), seconds_to_end(True)
    print("without a cycle:", "less than 2 s" if plain < 2 else plain)
    print("in a cycle:", "4 s or more" if in_cycle >= 4 else in_cycle)
    if plain >= 2 or in_cycle < 4:
        sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
