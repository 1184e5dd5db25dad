#!/usr/bin/env bash
# datasets: JSON lines with dates or large identifiers load with other values.
#
# Versions: datasets 5.2.0, pyarrow 26.0.1
# Expected: Rows have the values of `json.loads`.
# Seen: If all strings of a column look like a date or a time stamp, they become datetime objects. If
#   one other string is there, all stay strings. Integers above 2**63, such as hashes of documents,
#   become floats, so that different identifiers are equal. `features` converts these wrong values.
# Output:
#   json: ["2020-01-01", "2021-05-06"]; datasets: [datetime(2020-01-01), datetime(2021-05-06)]
#   json: ["2020-01-01", "unknown"]; datasets: ["2020-01-01", "unknown"]
#   json: [9223372036854775809, 9223372036854775810]; datasets: [9.223372036854776e+18, 9.223372036854776e+18]
#   with features: ["2020-01-01 00:00:00", "2021-05-06 00:00:00"]
#   with features: [9223372036854775808, 9223372036854775808]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(datasets==5.2.0 pyarrow==26.0.1 numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
cat > check.py <<'PYTHON'
import datetime
import json
import os
import sys

os.environ["HF_HOME"] = os.path.abspath("home")
import datasets

datasets.disable_progress_bars()


def shown(value):
    if isinstance(value, datetime.datetime):
        return f"datetime({value:%Y-%m-%d})"
    return json.dumps(value)


seen = []
columns = (["2020-01-01", "2021-05-06"], ["2020-01-01", "unknown"], [2**63 + 1, 2**63 + 2])
for number, column in enumerate(columns):
    with open(f"{number}.jsonl", "w") as file:
        file.writelines(json.dumps({"value": value}) + "\n" for value in column)
    rows = datasets.load_dataset("json", data_files=f"{number}.jsonl", split="train")
    values = [shown(row["value"]) for row in rows]
    print("json: {}; datasets: [{}]".format(json.dumps(column), ", ".join(values)))
    seen.append(values)
for number, kind in ((0, "string"), (2, "uint64")):
    features = datasets.Features(value=datasets.Value(kind))
    path = f"{number}.jsonl"
    rows = datasets.load_dataset("json", data_files=path, split="train", features=features)
    values = [shown(row["value"]) for row in rows]
    print("with features: [{}]".format(", ".join(values)))
    seen.append(values)
dates = ["datetime(2020-01-01)", "datetime(2021-05-06)"]
if seen != [
    dates,
    ["\"2020-01-01\"", "\"unknown\""],
    ["9.223372036854776e+18"] * 2,
    ["\"2020-01-01 00:00:00\"", "\"2021-05-06 00:00:00\""],
    ["9223372036854775808"] * 2,
]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
