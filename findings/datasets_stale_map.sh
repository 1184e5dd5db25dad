#!/usr/bin/env bash
# datasets: map returns the results of an old version of your function.
#
# Versions: datasets 5.2.0
# Expected: A changed function runs again. A function in the script itself does.
# Seen: The key of the cache has the name of an imported function, and not its code. After an edit
#   of the module, the next run loads the rows of the old code, without a message. The same holds
#   for functions that a lambda calls, and for filter. Open since 2021:
#   https://github.com/huggingface/datasets/issues/3297
# Output:
#   in the script, times 10: [10, 20]
#   in the script, times 100: [100, 200]
#   in a module, times 10: [10, 20]
#   in a module, times 100: [10, 20]
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
cat > check.py <<'PYTHON'
import json
import os
import subprocess
import sys
from pathlib import Path

FUNCTION = "def scale(row):\n    return {{'x': row['x'] * {factor}}}\n"
READ = """
import datasets
datasets.disable_progress_bars()
{function}
rows = datasets.load_dataset("json", data_files="rows.jsonl", split="train")
print(rows.map(scale)["x"][:])
"""
environment = {**os.environ, "HF_HOME": os.path.abspath("home"), "PYTHONDONTWRITEBYTECODE": "1"}
Path("rows.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
seen = []
for place in ("the script", "a module"):
    for factor in (10, 100):
        function = FUNCTION.format(factor=factor)
        if place == "a module":
            Path("cleaning.py").write_text(function)
            function = "from cleaning import scale"
        Path("read.py").write_text(READ.format(function=function))
        command = [sys.executable, "read.py"]
        output = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
        seen.append(json.loads(output))
        print(f"in {place}, times {factor}: {seen[-1]}")
if seen != [[10, 20], [100, 200], [10, 20], [10, 20]]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 300 venv/bin/python check.py
