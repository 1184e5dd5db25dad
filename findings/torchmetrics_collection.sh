#!/usr/bin/env bash
# TorchMetrics: in a MetricCollection, a threshold counts or not, depending on the first batch.
#
# Versions: torchmetrics 1.9.0, torch 2.15.0
# Expected: Each metric of a collection has the value that it has alone, in any order of batches.
# Seen: After the first batch, the collection joins metrics whose states are equal, without a look at
#   their arguments. The joined metrics then use the arguments of the first one. The same happens to
#   other arguments that make no difference in the first batch.
# Output:
#   alone: strict 1.0, loose 0.5
#   collection, clear batch first: strict 0.5, loose 0.5
#   collection, unclear batch first: strict 1.0, loose 0.5
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
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy

clear = torch.tensor([0.95, 0.1]), torch.tensor([1, 0])
unclear = torch.tensor([0.7, 0.6]), torch.tensor([0, 0])


def make():
    return {"strict": BinaryAccuracy(threshold=0.9), "loose": BinaryAccuracy(threshold=0.5)}


def values_of(metrics, batches):
    for batch in batches:
        for metric in metrics:
            metric.update(*batch)
    return [metric.compute() for metric in metrics]


metrics = make()
alone = dict(zip(metrics, map(float, values_of(list(metrics.values()), [clear, unclear]))))
(first,) = values_of([MetricCollection(make())], [clear, unclear])
(last,) = values_of([MetricCollection(make())], [unclear, clear])
print("alone: strict {strict}, loose {loose}".format(**alone))
print("collection, clear batch first: strict {strict}, loose {loose}".format(**first))
print("collection, unclear batch first: strict {strict}, loose {loose}".format(**last))
if (alone, first, last) != (
    {"strict": 1.0, "loose": 0.5},
    {"strict": 0.5, "loose": 0.5},
    {"strict": 1.0, "loose": 0.5},
):
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
