#!/usr/bin/env bash
# TorchMetrics: the metrics of logits depend on the batch size.
#
# Versions: torchmetrics 1.9.0, torch 2.15.0
# Expected: All logits become probabilities, or none do, so batches give the result of all samples.
# Seen: `update` applies the sigmoid only if a logit of its batch is below 0 or above 1. In a batch
#   of small logits, 0.3 counts as a probability below the threshold. There is no warning.
# Output:
#   BinaryAccuracy, batches of 4: 1.0
#   BinaryAccuracy, batches of 2: 0.5
#   BinaryAUROC, batches of 4: 1.0
#   BinaryAUROC, batches of 2: 0.6667
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
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

logits = torch.tensor([2.0, -1.0, 0.3, 0.2])
labels = torch.tensor([1, 0, 1, 1])
seen = []
for kind in (BinaryAccuracy, BinaryAUROC):
    for size in (4, 2):
        metric = kind()
        for batch in zip(logits.split(size), labels.split(size)):
            metric.update(*batch)
        seen.append(round(metric.compute().item(), 4))
        print(f"{kind.__name__}, batches of {size}: {seen[-1]}")
if seen != [1.0, 0.5, 1.0, 0.6667]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
