#!/usr/bin/env bash
# PyTorch: a second scheduler starts from the learning rate of the first one.
#
# Versions: torch 2.15.0
# Expected: After pretraining with a rate of 0.1, a scheduler for fine-tuning starts from the rate
#   0.0001 that the optimizer has now.
# Seen: The first scheduler stored 0.1 as `initial_lr` in the parameter groups, and the second one
#   keeps this value. LambdaLR multiplies it, and trains with a rate that is 1,000 times too high.
#   ExponentialLR multiplies the present rate.
# Output:
#   ExponentialLR: rates 0.0001, 0.0001
#   LambdaLR: rates 0.1, 0.1
#   LambdaLR without initial_lr: rates 0.0001, 0.0001
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
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, StepLR


def rates(make, forget=False):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    StepLR(optimizer, step_size=10)  # of the pretraining
    (group,) = optimizer.param_groups
    group["lr"] = 0.0001
    if forget:
        del group["initial_lr"]
    schedule = make(optimizer)
    seen = [group["lr"]]
    optimizer.step()
    schedule.step()
    return [*seen, group["lr"]]


seen = {
    "ExponentialLR": rates(lambda optimizer: ExponentialLR(optimizer, gamma=1.0)),
    "LambdaLR": rates(lambda optimizer: LambdaLR(optimizer, lambda step: 1.0)),
    "LambdaLR without initial_lr": rates(lambda o: LambdaLR(o, lambda step: 1.0), forget=True),
}
for name, (first, second) in seen.items():
    print(f"{name}: rates {first}, {second}")
if list(seen.values()) != [[0.0001] * 2, [0.1] * 2, [0.0001] * 2]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
