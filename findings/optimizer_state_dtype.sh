#!/usr/bin/env bash
# torch.optim: loading turns the float32 state of Adafactor into bfloat16.
#
# Versions: torch 2.15.0, transformers 5.24.0
# Expected: Loading restores the state as it was saved, so a resumed training has the same state as
#   one without a stop.
# Seen: Adafactor keeps its averages in float32 if parameters are bfloat16. PyTorch casts them to
#   the type of the parameter when it loads them, and they lose 16 of 24 bits of precision.
# Output:
#   saved:  torch.float32 [0.02504885196685791, 0.12539100646972656]
#   loaded: torch.bfloat16 [0.0250244140625, 0.125]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6 transformers==5.24.0)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export HF_HUB_OFFLINE=1
cat > check.py <<'PYTHON'
import sys
import torch
from transformers.optimization import Adafactor

parameter = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))


def make_optimizer():
    return Adafactor([parameter], lr=0.1, scale_parameter=False, relative_step=False)


optimizer = make_optimizer()
parameter.grad = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.bfloat16)
optimizer.step()
loaded = make_optimizer()
loaded.load_state_dict(optimizer.state_dict())
before, after = (each.state[parameter]["exp_avg_sq_row"] for each in (optimizer, loaded))
print("saved: ", before.dtype, before.tolist())
print("loaded:", after.dtype, after.tolist())
if (before.dtype, after.dtype) != (torch.float32, torch.bfloat16) or torch.equal(before, after):
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
