#!/usr/bin/env bash
# warmup-scheduler: after a resume, GradualWarmupScheduler never changes the learning rate.
#
# Versions: warmup-scheduler 0.3, torch 2.15.0
# Expected: A scheduler that loads its state continues with the rates of one that was not stopped.
# Seen: The state has `after_scheduler` as an object. A pickle of it has a copy of the optimizer, and
#   after the resume, the inner scheduler changes the rates of this copy. The rate stays as it was.
# Output:
#   not stopped: 0.05 0.025 0.025 0.0125 0.0125
#   resumed: 0.05 0.05 0.05 0.05 0.05
#   rates of the copy: 0.05 0.025 0.025 0.0125 0.0125
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6 warmup-scheduler==0.3)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
cat > check.py <<'PYTHON'
import io
import sys

import torch
from warmup_scheduler import GradualWarmupScheduler


def make():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    after = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return optimizer, GradualWarmupScheduler(optimizer, 1, total_epoch=2, after_scheduler=after)


def step(optimizer, scheduler):
    optimizer.step()
    scheduler.step()
    return optimizer.param_groups[0]["lr"]


optimizer, scheduler = make()
for _ in range(5):
    step(optimizer, scheduler)
file = io.BytesIO()
torch.save([optimizer.state_dict(), scheduler.state_dict()], file)
file.seek(0)
expected = [step(optimizer, scheduler) for _ in range(5)]

resumed, loaded = make()
states = torch.load(file, weights_only=False)
resumed.load_state_dict(states[0])
loaded.load_state_dict(states[1])
copied = loaded.after_scheduler.optimizer
pairs = [(step(resumed, loaded), copied.param_groups[0]["lr"]) for _ in range(5)]
seen, of_copy = map(list, zip(*pairs))
print("not stopped:", *expected)
print("resumed:", *seen)
print("rates of the copy:", *of_copy)
if seen != [0.05] * 5 or expected == seen or of_copy != expected:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
