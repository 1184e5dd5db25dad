#!/usr/bin/env bash
# ReduceLROnPlateau: with a negative loss, the learning rate never falls.
#
# Versions: torch 2.15.0
# Expected: A loss of -100 that does not improve for 20 epochs reduces the rate, as a loss of 100
#   does.
# Seen: The default threshold multiplies the best loss by 0.9999. This bound is above a negative
#   loss, so an equal or slightly worse loss counts as the best one. Log-likelihoods, ELBO, and
#   SI-SDR are negative. Open since 2020: https://github.com/pytorch/pytorch/issues/47513
# Output:
#   loss 100: rate 1e-06, best 100.0
#   loss -100: rate 1, best -100.0
#   loss from -100 to -99.92: rate 1, best -99.92
#   loss -100, threshold_mode="abs": rate 1e-06, best -100.0
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
from torch.optim.lr_scheduler import ReduceLROnPlateau

seen = []
for name, losses, arguments in (
    ("100", [100.0] * 20, {}),
    ("-100", [-100.0] * 20, {}),
    ("from -100 to -99.92", [-100 + 0.004 * epoch for epoch in range(21)], {}),
    ('-100, threshold_mode="abs"', [-100.0] * 20, {"threshold_mode": "abs"}),
):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = ReduceLROnPlateau(optimizer, patience=2, **arguments)
    for loss in losses:
        schedule.step(loss)
    rate, best = optimizer.param_groups[0]["lr"], round(schedule.best, 4)
    print(f"loss {name}: rate {rate:.3g}, best {best}")
    seen.append((f"{rate:.3g}", best))
if seen != [("1e-06", 100.0), ("1", -100.0), ("1", -99.92), ("1e-06", -100.0)]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
