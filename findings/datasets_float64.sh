#!/usr/bin/env bash
# datasets: float64 columns become float32 for PyTorch, and stay float64 for NumPy.
#
# Versions: datasets 5.2.0, torch 2.13.0, numpy 2.4.6
# Expected: With_format("torch") keeps the type of the column, as with_format("numpy") does, because
#   PyTorch has float64.
# Seen: It returns float32. A time in seconds since 1970 is wrong by 32 s. There is no warning.
# Output:
#   column: float64, numpy: float64, 1764237600.5
#   column: float64, torch: torch.float32, 1764237568.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.13.0 numpy==2.4.6 datasets==5.2.0)
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

data = Dataset.from_dict({"time": [1764237600.5]})
seen = {}
for kind in ("numpy", "torch"):
    value = data.with_format(kind)[0]["time"]
    seen[kind] = (str(value.dtype), float(value))
    print(f"column: {data.features['time'].dtype}, {kind}: {value.dtype}, {float(value)}")
if seen != {"numpy": ("float64", 1764237600.5), "torch": ("torch.float32", 1764237568.0)}:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
