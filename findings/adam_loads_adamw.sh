#!/usr/bin/env bash
# PyTorch: Adam trains as AdamW after it loads the state of AdamW.
#
# Versions: torch 2.15.0
# Expected: The class decides how weight decay works: Adam adds it to the gradient.
# Seen: AdamW is Adam with `decoupled_weight_decay=True`. This flag is in the state, and loading
#   copies it, so the Adam that continues the run still decouples the decay. Its class and its
#   arguments say otherwise.
# Output:
#   Adam(weight_decay=0.1): the parameter moves from 1.0 to 0.9
#   Adam(weight_decay=0.1) after loading AdamW: the parameter moves from 1.0 to 0.99
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

seen = []
for name, load in (("", False), (" after loading AdamW", True)):
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([parameter], lr=0.1, weight_decay=0.1)
    if load:
        saved = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1)
        optimizer.load_state_dict(saved.state_dict())
    parameter.grad = torch.zeros(1)
    optimizer.step()
    seen.append(round(parameter.item(), 4))
    print(f"Adam(weight_decay=0.1){name}: the parameter moves from 1.0 to {seen[-1]}")
if seen != [0.9, 0.99]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
