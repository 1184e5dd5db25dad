#!/usr/bin/env bash
# safetensors: save_file of NumPy arrays reorders an array in Fortran order.
#
# Versions: safetensors 0.8.0, numpy 2.4.6
# Expected: The file has the values of the array, or saving raises an error as for torch tensors
#   that are not contiguous.
# Seen: The elements are written in the order of memory, with the shape of the array. A transposed
#   weight matrix loads with its values in other places. There is no error.
# Output:
#   saved:  [[0, 2, 4], [1, 3, 5]]
#   loaded: [[0, 1, 2], [3, 4, 5]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(safetensors==0.8.0 numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
cat > check.py <<'PYTHON'
import sys
import numpy as np
from safetensors.numpy import load_file, save_file

kernel = np.arange(6).reshape(3, 2).T  # for example, a kernel for Keras from a weight of PyTorch
save_file({"kernel": kernel}, sys.argv[1])
loaded = load_file(sys.argv[1])["kernel"]
print("saved: ", kernel.tolist())
print("loaded:", loaded.tolist())
if loaded.tolist() != [[0, 1, 2], [3, 4, 5]]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py "$folder/file"
