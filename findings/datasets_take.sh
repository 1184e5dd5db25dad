#!/usr/bin/env bash
# datasets: take(n) and skip(n) of a stream select other examples on each number of nodes.
#
# Versions: datasets 5.2.0
# Expected: Take(4) selects the first four examples, and split_dataset_by_node divides these four.
# Seen: Each node takes from its own shards. Two nodes take 0, 1, 3, and 4. A validation set of
#   take(4) in one process and a training set of skip(4) on two nodes have an example in common.
# Output:
#   take(4), one node: [0, 1, 2, 3]
#   take(4), two nodes: [0, 1, 3, 4]
#   skip(4), two nodes: [2, 5, 6, 7, 8, 9, 10, 11]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(datasets==5.2.0 numpy==2.4.6)
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
from datasets.distributed import split_dataset_by_node

stream = Dataset.from_dict({"id": list(range(12))}).to_iterable_dataset(num_shards=4)


def ids(stream, nodes):
    parts = [split_dataset_by_node(stream, rank, nodes) for rank in range(nodes)]
    return sorted(row["id"] for part in parts for row in part)


taken = {nodes: ids(stream.take(4), nodes) for nodes in (1, 2)}
skipped = ids(stream.skip(4), 2)
print("take(4), one node:", taken[1])
print("take(4), two nodes:", taken[2])
print("skip(4), two nodes:", skipped)
if taken != {1: [0, 1, 2, 3], 2: [0, 1, 3, 4]} or not set(taken[1]) & set(skipped):
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
