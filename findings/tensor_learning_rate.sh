#!/usr/bin/env bash
# PyTorch: with a tensor as learning rate, a scheduler gives all parameter groups the last rate.
#
# Versions: torch 2.15.0
# Expected: lr=torch.tensor(0.1) and lr=0.1 train in the same way.
# Seen: All groups get the same tensor. A scheduler sets the rates in place, one after the other, so
#   that all groups have the rate of the last one, and no error is raised.
# Output:
#   lr=0.1: the groups have the rates [0.1, 0.01]
#   lr=torch.tensor(0.1): the groups have the rates [0.01, 0.01]
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
from torch.optim.lr_scheduler import LambdaLR

seen = []
for name, rate in (("0.1", 0.1), ("torch.tensor(0.1)", torch.tensor(0.1))):
    body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    groups = [{"params": list(body.parameters())}, {"params": list(head.parameters())}]
    optimizer = torch.optim.SGD(groups, lr=rate)
    LambdaLR(optimizer, [lambda epoch: 1.0, lambda epoch: 0.1])
    rates = [round(float(group["lr"]), 6) for group in optimizer.param_groups]
    print(f"lr={name}: the groups have the rates {rates}")
    seen.append(rates)
if seen != [[0.1, 0.01], [0.01, 0.01]]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
