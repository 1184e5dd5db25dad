#!/usr/bin/env bash
# datasets: float64 columns become float32 for PyTorch, and for NumPy if there are several rows.
#
# Versions: datasets 5.2.0, torch 2.15.0, numpy 2.4.6
# Expected: Formats keep the type of the column, as rows without a format do, because NumPy and
#   PyTorch have float64.
# Seen: Only one row with_format("numpy") is float64. Slices, batches, and with_format("torch") are
#   float32. A time in seconds since 1970 is wrong by 32 s. There is no warning.
# Output:
#   column: float64
#   None, DataLoader: torch.float64, 1764237600.5
#   numpy, one row: float64, 1764237600.5
#   numpy, slice: float32, 1764237568.0
#   numpy, DataLoader: torch.float32, 1764237568.0
#   torch, one row: torch.float32, 1764237568.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6 datasets==5.2.0)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export HF_HUB_OFFLINE=1
cat > check.py <<'PYTHON'
import sys
from datasets import Dataset
from torch.utils.data import DataLoader

data = Dataset.from_dict({"time": [1764237600.5]})
numpy = data.with_format("numpy")
values = {
    "None, DataLoader": next(iter(DataLoader(data)))["time"],
    "numpy, one row": numpy[0]["time"],
    "numpy, slice": numpy[:1]["time"],
    "numpy, DataLoader": next(iter(DataLoader(numpy)))["time"],
    "torch, one row": data.with_format("torch")[0]["time"],
}
print("column:", data.features["time"].dtype)
for name, value in values.items():
    print(f"{name}: {value.dtype}, {value.item()}")
exact, rounded = 1764237600.5, 1764237568.0
if [value.item() for value in values.values()] != [exact, exact, rounded, rounded, rounded]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
