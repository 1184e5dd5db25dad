#!/usr/bin/env bash
# torch.utils.data: the first number of a batch decides whether the others are rounded.
#
# Versions: torch 2.15.0, numpy 2.4.6
# Expected: A batch of an integer and a float is float64, as a batch of floats is.
# Seen: It is float64 only if the float comes first. If the integer comes first, the batch is
#   float32, and a time in seconds since 1970 is wrong by 32 s. JSON files have both kinds of number
#   in one column, because many writers omit ".0". With shuffling, chance decides.
# Output:
#   [1764237600.5, 1764237600]: torch.float64 [1764237600.5, 1764237600.0]
#   [1764237600, 1764237600.5]: torch.float32 [1764237568.0, 1764237568.0]
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
import json
import sys
from torch.utils.data import DataLoader

lines = ['{"time": 1764237600.5}', '{"time": 1764237600}']
seen = []
for rows in (list(map(json.loads, lines)), list(map(json.loads, reversed(lines)))):
    batch = next(iter(DataLoader(rows, batch_size=2)))["time"]
    seen.append(batch.tolist())
    print(f"{[row['time'] for row in rows]}: {batch.dtype} {seen[-1]}")
if seen != [[1764237600.5, 1764237600.0], [1764237568.0, 1764237568.0]]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
