#!/usr/bin/env bash
# datasets: a filtered stream that continues from its state loses samples.
#
# Versions: datasets 5.0.0 (4.0.0 to 4.8.0: also mapped streams; 5.0.1 continues exactly)
# Expected: A stream that loads the state after two examples gives the third example next.
# Seen: It continues after the whole table that the filter was reading.
# Output:
#   all: [1, 2, 4, 5, 7, 8, 10, 11]
#   after two: [7, 8, 10, 11]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(datasets==5.0.0 numpy==2.4.6)
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


def stream():
    data = Dataset.from_dict({"id": list(range(12))}).to_iterable_dataset(num_shards=2)
    return data.filter(lambda row: row["id"] % 3 != 0)


first = stream()
examples = iter(first)
next(examples), next(examples)
second = stream()
second.load_state_dict(first.state_dict())
rest = [row["id"] for row in second]
print("all:", [row["id"] for row in stream()])
print("after two:", rest)
if rest != [7, 8, 10, 11]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
