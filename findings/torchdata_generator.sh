#!/usr/bin/env bash
# torchdata: a resumed StatefulDataLoader shuffles later epochs in another way.
#
# Versions: torchdata 0.11.0, torch 2.15.0
# Expected: A loader with a seeded generator resumes as if it had not stopped: the rest of the epoch
#   and the next epochs are the same.
# Seen: The rest of the epoch is the same. The next epoch has another order, because state_dict() of
#   the loader does not restore its generator for later epochs.
# Output:
#   without a stop: [[5, 4], [2, 6], [7, 3], [1, 0]] [[0, 5], [1, 4], [7, 6], [2, 3]]
#   after a stop:   [[2, 6], [7, 3], [1, 0]] [[5, 1], [2, 6], [0, 3], [7, 4]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6 torchdata==0.11.0)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
cat > check.py <<'PYTHON'
import sys
import torch
from torchdata.stateful_dataloader import StatefulDataLoader


def make_loader():
    generator = torch.Generator().manual_seed(1)
    return StatefulDataLoader(range(8), batch_size=2, shuffle=True, generator=generator)


def epoch(loader):
    return [batch.tolist() for batch in loader]


loader = make_loader()
whole = [epoch(loader), epoch(loader)]
loader = make_loader()
next(iter(loader))
state = loader.state_dict()
loader = make_loader()
loader.load_state_dict(state)
resumed = [epoch(loader), epoch(loader)]
print("without a stop:", *whole)
print("after a stop:  ", *resumed)
if resumed[0] != whole[0][1:] or resumed[1] == whole[1]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
