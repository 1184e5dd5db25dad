#!/usr/bin/env bash
# Ray Train: prepare_data_loader replaces samplers, so that workers train on samples left out.
#
# Versions: ray 2.60.0 with Ray Train, torch 2.15.0 with gloo, on CPUs
# Expected: Workers divide the samples of the sampler, or an error.
# Seen: With two workers or more, a SubsetRandomSampler and a WeightedRandomSampler become a
#   DistributedSampler of all samples. Half of the samples of each worker are of those that the
#   sampler leaves out. A batch sampler is dropped, so that batches are single samples.
# Output:
#   SubsetRandomSampler of samples 0 to 49: rank 0 gets 50 samples, 25 of them above 49
#   WeightedRandomSampler without samples above 49: rank 0 gets 50 samples, 25 of them above 49
#   batches of two samples: rank 0 gets a batch of shape ()
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=('ray[train]==2.60.0' torch==2.15.0 numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export HOME=$folder RAY_TMPDIR=$folder RAY_AUTH_MODE=disabled
unset RAY_ADDRESS
cat > check.py <<'PYTHON'
import json
import sys
from pathlib import Path

import ray
import torch
from ray.train import ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_data_loader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

OUT = Path("seen.json").resolve()


def train():
    data = TensorDataset(torch.arange(100))
    samplers = {
        "SubsetRandomSampler of samples 0 to 49": SubsetRandomSampler(range(50)),
        "WeightedRandomSampler without samples above 49": WeightedRandomSampler(
            [1.0] * 50 + [0.0] * 50, 100
        ),
    }
    seen = {}
    for name, sampler in samplers.items():
        loader = prepare_data_loader(DataLoader(data, batch_size=10, sampler=sampler))
        samples = [int(each) for (batch,) in loader for each in batch]
        seen[name] = [len(samples), sum(each > 49 for each in samples)]
    pairs = BatchSampler(SequentialSampler(data), 2, False)
    (batch,) = next(iter(prepare_data_loader(DataLoader(data, batch_sampler=pairs))))
    seen["shape"] = list(batch.shape)
    if get_context().get_world_rank() == 0:
        OUT.write_text(json.dumps(seen))


ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False)
TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
seen = json.loads(OUT.read_text())
shape = seen.pop("shape")
for name, (number, others) in seen.items():
    print(f"{name}: rank 0 gets {number} samples, {others} of them above 49")
print(f"batches of two samples: rank 0 gets a batch of shape {tuple(shape)}")
if list(seen.values()) != [[50, 25]] * 2 or shape != []:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
