#!/usr/bin/env bash
# PyTorch: an optimizer that loads a state trains on the tensors of this state.
#
# Versions: torch 2.15.0
# Expected: load_state_dict copies, as that of a module does, so that a copy in memory can be loaded
#   again, for example after each step that diverges.
# Seen: The optimizer keeps the tensors of the state, and its next step changes them. The second load
#   of the same copy restores the parameters, and not the momentum.
# Output:
#   step after load 1: parameter 0.71, momentum 1.9
#   step after load 2: parameter 0.629, momentum 2.71
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
import copy
import sys
import torch

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step():
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    return round(model.weight.item(), 4), round(momentum.item(), 4)


step()
saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
seen = []
for number in (1, 2):
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    parameter, momentum = step()
    print(f"step after load {number}: parameter {parameter}, momentum {momentum}")
    seen.append((parameter, momentum))
if seen != [(0.71, 1.9), (0.629, 2.71)]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
