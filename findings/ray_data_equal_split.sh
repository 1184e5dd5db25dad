#!/usr/bin/env bash
# Ray Data: streaming_split(equal=True) of 2 rows over 3 workers yields no rows.
#
# Versions: ray 2.60.0 with Ray Data
# Expected: An error or a warning, because no worker gets data.
# Seen: All three iterators are empty. A training loop over them ends without a step. Of 11 rows,
#   each worker gets 3, and 2 rows are dropped silently.
# Output:
#   2 rows over 3 workers: [0, 0, 0]
#   11 rows over 3 workers: [3, 3, 3]
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
from concurrent.futures import ThreadPoolExecutor
import ray

logging.disable(logging.WARNING)
ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False)
seen = {}
for rows in (2, 11):
    iterators = ray.data.range(rows).streaming_split(3, equal=True)
    with ThreadPoolExecutor(3) as threads:
        seen[rows] = list(threads.map(lambda each: sum(1 for _ in each.iter_rows()), iterators))
    print(f"{rows} rows over 3 workers: {seen[rows]}")
if seen != {2: [0, 0, 0], 11: [3, 3, 3]}:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
