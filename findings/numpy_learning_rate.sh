#!/usr/bin/env bash
# NumPy and PyTorch: a learning rate from a NumPy array makes checkpoints unloadable.
#
# Versions: torch 2.15.0, numpy 2.4.6
# Expected: Torch.load reads what torch.save wrote, or the optimizer converts or refuses the number.
# Seen: The optimizer keeps numpy.float64 in its groups. Training and saving succeed. The error
#   comes when the run resumes, because torch.load allows no NumPy scalars by default.
# Output:
#   float: loads
#   float64: UnpicklingError
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
import pickle
import sys
import numpy as np
import torch

parameter = torch.nn.Parameter(torch.ones(1))
for rate in (0.1, np.logspace(-3, -1, 3)[2]):
    torch.save(torch.optim.SGD([parameter], lr=rate).state_dict(), sys.argv[1])
    try:
        torch.load(sys.argv[1])
        outcome = "loads"
    except pickle.UnpicklingError:
        outcome = "UnpicklingError"
    print(f"{type(rate).__name__}: {outcome}")
    if outcome != ("loads" if type(rate) is float else "UnpicklingError"):
        sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py "$folder/file"
