#!/usr/bin/env bash
# PyTorch and cloudpickle: one element of a tensor is sent as the whole tensor.
#
# Versions: torch 2.15.0, cloudpickle 3.1.3, numpy 2.4.6
# Expected: A view of one element needs about as many bytes as a tensor of one element. A NumPy view
#   does.
# Seen: The pickle has the whole memory of the tensor, 10,000 times as much. A worker that sends the
#   first row of a batch sends all rows.
# Output:
#   NumPy view: 131 bytes
#   tensor of one element: 398 bytes
#   view of one element: 4000409 bytes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6 cloudpickle==3.1.3)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
cat > check.py <<'PYTHON'
import sys
import cloudpickle
import numpy as np
import torch

values = {
    "NumPy view": np.zeros(1_000_000, "float32")[:1],
    "tensor of one element": torch.zeros(1_000_000)[:1].clone(),
    "view of one element": torch.zeros(1_000_000)[:1],
}
sizes = {name: len(cloudpickle.dumps(value)) for name, value in values.items()}
for name, size in sizes.items():
    print(f"{name}: {size} bytes")
if max(list(sizes.values())[:2]) > 1000 or sizes["view of one element"] < 4_000_000:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
