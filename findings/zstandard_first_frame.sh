#!/usr/bin/env bash
# zstandard: decompress, decompressobj, and read_to_iter return the first frame of a file only.
#
# Versions: zstandard 0.25.0, pyarrow 26.0.1
# Expected: A file of two frames, as `cat a.zst b.zst` or pzstd writes it, has the data of both, as
#   in the zstd command, or its rest is an error.
# Seen: Three of five ways to read the file end after the first frame, without an error. pzstd
#   writes a frame per block, so that most of a large file is lost.
# Output:
#   zstandard.open: 2 lines
#   stream_reader: 2 lines
#   decompress: 1 line
#   decompressobj: 1 line
#   read_to_iter: 1 line
#   pyarrow: 2 lines
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(zstandard==0.25.0 pyarrow==26.0.1)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
cat > check.py <<'PYTHON'
import sys
from pathlib import Path
import pyarrow
import zstandard

frames = [zstandard.compress(line) for line in (b'{"x": 1}\n', b'{"x": 2}\n')]
file = Path("rows.jsonl.zst")
file.write_bytes(b"".join(frames))
data = file.read_bytes()
reader = zstandard.ZstdDecompressor()
seen = {
    "zstandard.open": zstandard.open(file).read(),
    "stream_reader": reader.stream_reader(file.open("rb")).read(),
    "decompress": reader.decompress(data),
    "decompressobj": reader.decompressobj().decompress(data),
    "read_to_iter": b"".join(reader.read_to_iter(file.open("rb"))),
    "pyarrow": pyarrow.input_stream(str(file)).read(),
}
counts = {name: content.count(b"\n") for name, content in seen.items()}
for name, count in counts.items():
    print(f"{name}: {count} line{'s' * (count > 1)}")
if list(counts.values()) != [2, 2, 1, 1, 1, 2]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
