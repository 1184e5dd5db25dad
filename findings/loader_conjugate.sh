#!/usr/bin/env bash
# PyTorch: a DataLoader with processes returns conjugated tensors without the conjugation.
#
# Versions: torch 2.13.0, on a machine without GPUs
# Expected: num_workers changes the speed of a loader, and not its samples.
# Seen: A conjugation, and the negation of `conj().imag`, are lazy: a flag of the tensor says so. A
#   tensor that moves to another process through shared memory loses the flag. Samples that the
#   loader does not stack, with batch_size=None or an own collate_fn, have the wrong sign.
# Output:
#   num_workers=0: conjugate [(1-2j), (3+4j)], imaginary part [-2.0, 4.0]
#   num_workers=1: conjugate [(1+2j), (3-4j)], imaginary part [2.0, -4.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.13.0 numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
cat > check.py <<'PYTHON'
import sys
import torch
from torch.utils.data import DataLoader, Dataset


class Spectra(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        spectrum = torch.tensor([1 + 2j, 3 - 4j]).conj()
        return spectrum, spectrum.imag


if __name__ == "__main__":
    seen = []
    for num_workers in (0, 1):
        (sample,) = DataLoader(Spectra(), batch_size=None, num_workers=num_workers)
        conjugate, imaginary = (each.resolve_conj().resolve_neg().tolist() for each in sample)
        print(f"num_workers={num_workers}: conjugate {conjugate}, imaginary part {imaginary}")
        seen.append((conjugate, imaginary))
    expected = ([1 - 2j, 3 + 4j], [-2.0, 4.0])
    if seen != [expected, ([1 + 2j, 3 - 4j], [2.0, -4.0])]:
        sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
