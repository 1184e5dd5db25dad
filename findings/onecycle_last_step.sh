#!/usr/bin/env bash
# OneCycleLR: the learning rate rises again in the last of total_steps steps.
#
# Versions: torch 2.15.0
# Expected: After exactly total_steps calls of step(), the rate is the lowest one of the schedule.
# Seen: The first rate counts as a step. Call 9 of 10 reaches the lowest rate, and call 10 returns
#   to the rate before it. Whatever trains next uses a rate that is 12,000 times too high.
# Output:
#   rates after calls 8, 9, 10: 0.0495, 4e-06, 0.0495
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

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
rates = []
for _ in range(10):
    optimizer.step()
    schedule.step()
    rates.append(schedule.get_last_lr()[0])
print("rates after calls 8, 9, 10:", ", ".join(f"{rate:.3g}" for rate in rates[-3:]))
if not rates[-1] > 10_000 * rates[-2] or abs(rates[-1] - rates[-3]) > 1e-9:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
