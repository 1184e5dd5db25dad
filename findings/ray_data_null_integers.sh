#!/usr/bin/env bash
# Ray Data: one missing value changes the integers of its batch.
#
# Versions: ray 2.60.0 with Ray Data, numpy 2.4.6
# Expected: Large integers, such as identifiers, arrive unchanged, or the batch is an error.
# Seen: Iter_batches makes float64 of the column, in batches with a missing value only. 2**53 + 1
#   arrives as 2**53. Other batches of the same column have int64.
# Output:
#   int64 [9007199254740993, 1]
#   float64 [9007199254740992, None]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=('ray[data]==2.60.0' numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export HOME=$folder RAY_TMPDIR=$folder
unset RAY_ADDRESS
export RAY_DATA_DISABLE_PROGRESS_BARS=1 RAY_AUTH_MODE=disabled
cat > check.py <<'PYTHON'
import logging
import sys
import ray

logging.disable(logging.WARNING)
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
rows = [{"id": 2**53 + 1}, {"id": 1}, {"id": 2**53 + 1}, {"id": None}]
data = ray.data.from_items(rows, override_num_blocks=1)
seen = [batch["id"] for batch in data.iter_batches(batch_size=2, batch_format="numpy")]
for batch in seen:
    print(batch.dtype, [int(each) if each == each else None for each in batch])
if [str(batch.dtype) for batch in seen] != ["int64", "float64"] or int(seen[1][0]) != 2**53:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
