#!/usr/bin/env bash
# safetensors: a conjugated tensor is saved without its conjugation.
#
# Versions: safetensors 0.8.0, torch 2.13.0
# Expected: load(save(...)) returns the values, as torch.load does after torch.save, or save raises
#   an error, as for tensors that are not contiguous.
# Seen: A conjugation, and the negation of `conj().imag`, are lazy: a flag of the tensor says so. The
#   file has the memory without the flag, so that imaginary parts have the wrong sign.
# Output:
#   saved [(1-2j), (3+4j)] and [-2.0]
#   torch: [(1-2j), (3+4j)] and [-2.0]
#   safetensors: [(1+2j), (3-4j)] and [2.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.13.0 numpy==2.4.6 safetensors==0.8.0)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
cat > check.py <<'PYTHON'
import io
import sys
import torch
from safetensors.torch import load, save

tensors = {
    "wave": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "imaginary": torch.tensor([1 + 2j]).conj().imag,
}


def values(tensors):
    return [each.resolve_conj().resolve_neg().tolist() for each in tensors.values()]


file = io.BytesIO()
torch.save(tensors, file)
file.seek(0)
saved, by_torch = values(tensors), values(torch.load(file))
by_safetensors = load(save(tensors))
by_safetensors = values({name: by_safetensors[name] for name in tensors})
print("saved {} and {}".format(*saved))
print("torch: {} and {}".format(*by_torch))
print("safetensors: {} and {}".format(*by_safetensors))
if (saved, by_safetensors) != (by_torch, [[1 + 2j, 3 - 4j], [2.0]]):
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
