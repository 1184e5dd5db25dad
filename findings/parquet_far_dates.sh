#!/usr/bin/env bash
# PyArrow and pandas: dates after 2262 in Parquet files of Spark are wrong by centuries.
#
# Versions: pyarrow 26.0.1, pandas 3.1.1, fastparquet 2026.9.0, polars 2.1.0
# Expected: 9999-12-31, the usual date for "no end", is read as it was written, or is an error.
# Seen: The type INT96, the default of Spark, has nanoseconds. PyArrow reads it as 64-bit
#   nanoseconds since 1970, which end in 2262, and wraps around. Polars reads microseconds.
# Output:
#   pyarrow: 1816-03-29
#   pyarrow, coerce_int96_timestamp_unit="us": 9999-12-31
#   pandas: 1816-03-29
#   pandas with fastparquet: 1816-03-29
#   polars: 9999-12-31
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(pyarrow==26.0.1 pandas==3.1.1 fastparquet==2026.9.0 polars==2.1.0 numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export PYTHONWARNINGS=ignore
cat > check.py <<'PYTHON'
import datetime
import sys
import pandas
import polars
import pyarrow
import pyarrow.parquet as parquet

end = pyarrow.array([datetime.datetime(9999, 12, 31)], pyarrow.timestamp("us"))
file = "rows.parquet"
parquet.write_table(pyarrow.table({"end": end}), file, use_deprecated_int96_timestamps=True)
unit = {"coerce_int96_timestamp_unit": "us"}
seen = {
    "pyarrow": parquet.read_table(file)["end"][0].as_py(),
    'pyarrow, coerce_int96_timestamp_unit="us"': parquet.read_table(file, **unit)["end"][0].as_py(),
    "pandas": pandas.read_parquet(file)["end"][0],
    "pandas with fastparquet": pandas.read_parquet(file, engine="fastparquet")["end"][0],
    "polars": polars.read_parquet(file)["end"][0],
}
for name, date in seen.items():
    print(f"{name}: {date:%Y-%m-%d}")
if [date.year for date in seen.values()] != [1816, 9999, 1816, 1816, 9999]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
