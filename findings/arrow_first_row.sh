#!/usr/bin/env bash
# PyArrow, datasets, and Polars: a column that the first row lacks disappears.
#
# Versions: pyarrow 26.0.1, datasets 5.2.0, polars 2.1.0
# Expected: Rows with different keys become a table with all keys, as in pandas, or an error.
# Seen: PyArrow and datasets take the columns of the first row, and Polars those of the first 100. A
#   label that was added later is gone, without a warning. Exports of JSON omit empty fields, so the
#   first row decides by chance.
# Output:
#   pyarrow, from_pylist: ['text']
#   datasets, from_list: ['text']
#   datasets, from_generator: ['text']
#   polars, from_dicts: ['text']
#   pandas, DataFrame: ['text', 'label']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(pyarrow==26.0.1 datasets==5.2.0 polars==2.1.0 pandas==3.1.1 numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
cat > check.py <<'PYTHON'
import os
import sys

os.environ["HF_HOME"] = os.path.abspath("home")
import datasets
import pandas
import polars
import pyarrow

datasets.disable_progress_bars()
rows = [{"text": "a"}] * 150 + [{"text": "b", "label": 1}] * 150
seen = {
    "pyarrow, from_pylist": pyarrow.Table.from_pylist(rows).column_names,
    "datasets, from_list": datasets.Dataset.from_list(rows).column_names,
    "datasets, from_generator": datasets.Dataset.from_generator(lambda: iter(rows)).column_names,
    "polars, from_dicts": polars.from_dicts(rows).columns,
    "pandas, DataFrame": list(pandas.DataFrame(rows).columns),
}
for name, columns in seen.items():
    print(f"{name}: {columns}")
if list(seen.values()) != [["text"]] * 4 + [["text", "label"]]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
