#!/usr/bin/env bash
# PyArrow, pandas, and DuckDB: filters on a Parquet file lose the rows with NaN.
#
# Versions: pyarrow 26.0.1, pandas 3.1.1, duckdb 2.0.1, polars 2.1.0, numpy 2.4.6
# Expected: A filter finds the same rows in a file as in memory. With Polars, it does.
# Seen: The statistics of a file leave out NaN, and readers conclude that no row can match. A search
#   for losses that are not 2.0, or not below 10, misses the run that diverged. In DuckDB, where NaN
#   is the largest number, even isnan() finds nothing, unless DuckDB wrote the file. Known there:
#   https://github.com/duckdb/duckdb/issues/25521
# Output:
#   pyarrow, != 2.0: rows in memory 1, in the file 0
#   pyarrow, not < 10.0: rows in memory 1, in the file 0
#   pandas, != 2.0: rows in memory 1, in the file 0
#   duckdb, > 10.0: rows in memory 1, in the file 0
#   duckdb, isnan: rows in memory 1, in the file 0
#   polars, != 2.0: rows in memory 1, in the file 1
#   polars, > 10.0: rows in memory 1, in the file 1
#   polars, is_nan: rows in memory 1, in the file 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(pyarrow==26.0.1 pandas==3.1.1 duckdb==2.0.1 polars==2.1.0 numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
cat > check.py <<'PYTHON'
import sys
import duckdb
import pandas
import polars
import pyarrow
import pyarrow.dataset as dataset
import pyarrow.parquet as parquet

losses = pyarrow.table({"loss": [2.0, float("nan"), 2.0]})
parquet.write_table(losses, "losses.parquet")
frame = losses.to_pandas()
loss = dataset.field("loss")
filters = {"pyarrow, != 2.0": loss != 2.0, "pyarrow, not < 10.0": ~(loss < 10.0)}
seen = {}
for name, each in filters.items():
    in_file = parquet.read_table("losses.parquet", filters=each)
    seen[name] = (losses.filter(each).num_rows, in_file.num_rows)
read = pandas.read_parquet("losses.parquet", filters=[("loss", "!=", 2.0)])
seen["pandas, != 2.0"] = (len(frame[frame["loss"] != 2.0]), len(read))
for name, condition in {"> 10.0": "loss > 10.0", "isnan": "isnan(loss)"}.items():
    sources = ("losses", "'losses.parquet'")
    queries = [f"select count(*) from {source} where {condition}" for source in sources]
    seen[f"duckdb, {name}"] = tuple(duckdb.sql(query).fetchall()[0][0] for query in queries)
loss = polars.col("loss")
for name, each in {"!= 2.0": loss != 2.0, "> 10.0": loss > 10.0, "is_nan": loss.is_nan()}.items():
    in_file = polars.scan_parquet("losses.parquet").filter(each).collect()
    seen[f"polars, {name}"] = (polars.from_arrow(losses).filter(each).height, in_file.height)
for name, (in_memory, in_file) in seen.items():
    print(f"{name}: rows in memory {in_memory}, in the file {in_file}")
if list(seen.values()) != [(1, 0)] * 5 + [(1, 1)] * 3:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
