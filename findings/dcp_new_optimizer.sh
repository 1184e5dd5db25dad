#!/usr/bin/env bash
# torch.distributed.checkpoint: reading the state of a new optimizer changes the training.
#
# Versions: torch 2.15.0
# Expected: get_optimizer_state_dict returns the state, and the run continues as without the call.
# Seen: To create the state, the call takes a step with gradients of zero and a rate of zero, and
#   keeps the result. Adam continues with step 2, so its first updates are smaller. Rprop keeps the
#   rate of zero, and never moves. A checkpoint before the first step, for example as a test of the
#   disk, changes the run. Open since 2025:
#   https://github.com/pytorch/pytorch/issues/164929
# Output:
#   Adam: the parameter is 0.9, 0.8, 0.7; after a read of the state 0.9256, 0.8397, 0.7488
#   Rprop: the parameter is 0.9, 0.78, 0.636; after a read of the state 1.0, 1.0, 1.0
#   ASGD: the parameter is 0.9, 0.8, 0.7; after a read of the state 1.0, 0.9, 0.8
#   SGD: the parameter is 0.9, 0.71, 0.439; after a read of the state 0.9, 0.71, 0.439
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
cat > check.py <<'PYTHON'
import sys
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

OPTIMIZERS = {"Adam": {}, "Rprop": {}, "ASGD": {}, "SGD": {"momentum": 0.9}}


def train(name, read):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **OPTIMIZERS[name])
    if read:
        get_optimizer_state_dict(model, optimizer)
    values = []
    for _ in range(3):
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
        values.append(round(model.weight.item(), 4))
    return values


changed = []
for name in OPTIMIZERS:
    expected, seen = train(name, False), train(name, True)
    texts = [", ".join(map(str, values)) for values in (expected, seen)]
    print(f"{name}: the parameter is {texts[0]}; after a read of the state {texts[1]}")
    if seen != expected:
        changed.append(name)
if changed != ["Adam", "Rprop", "ASGD"]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
