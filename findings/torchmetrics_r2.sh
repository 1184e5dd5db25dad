#!/usr/bin/env bash
# TorchMetrics: R2Score is wrong if the targets are far from zero.
#
# Versions: torchmetrics 1.9.0, torch 2.15.0
# Expected: The score does not change if a constant is added to all targets and predictions.
# Seen: The metric subtracts two large float32 sums. For targets near 10,000 with a deviation of 1,
#   a score of 0.75 becomes 0.99. ExplainedVariance has the same fault. float64 inputs help only
#   after `metric.set_dtype(torch.float64)`.
# Output:
#   targets near 0: R2Score 0.75, ExplainedVariance 0.75
#   targets near 10000: R2Score 0.99, ExplainedVariance 0.99
#   targets near 10000, set_dtype(float64): R2Score 0.75, ExplainedVariance 0.75
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6 torchmetrics==1.9.0)
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
from torchmetrics.regression import ExplainedVariance, R2Score

generator = torch.Generator().manual_seed(0)
targets = torch.randn(10_000, generator=generator, dtype=torch.float64)
predictions = targets + 0.5 * torch.randn(10_000, generator=generator, dtype=torch.float64)
seen = []
for name, shift, dtype in (
    ("0", 0, torch.float32),
    ("10000", 10_000, torch.float32),
    ("10000, set_dtype(float64)", 10_000, torch.float64),
):
    values = []
    for metric in (R2Score(), ExplainedVariance()):
        metric.set_dtype(dtype)
        pairs = ((each + shift).to(dtype).split(100) for each in (predictions, targets))
        for batch in zip(*pairs):
            metric.update(*batch)
        values.append(metric.compute().item())
    print("targets near {}: R2Score {:.2f}, ExplainedVariance {:.2f}".format(name, *values))
    seen.append(values)
right, wrong, exact = seen
errors = [[abs(value - 0.75) for value in values] for values in (right + exact, wrong)]
if max(errors[0]) > 0.02 or min(errors[1]) < 0.1:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
