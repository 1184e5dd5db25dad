#!/usr/bin/env bash
# PyTorch: DataLoader processes, safetensors, and gloo ignore a lazy conjugation or negation.
#
# Versions: torch 2.15.0, safetensors 0.8.0, on CPUs
# Expected: A tensor has the same values after a DataLoader, a file, or all_reduce; or an error.
# Seen: The imaginary part of a conjugated tensor is a view with the flag "negative". A DataLoader
#   with processes (without stacking) and safetensors pass the memory without the flag, so that the
#   sign is wrong. The same happens to conjugated tensors. all_reduce in gloo sends the right values
#   and does not write the result, so that the ranks differ.
# Output:
#   values: [-2.0]
#   DataLoader, num_workers=0: [-2.0]
#   DataLoader, num_workers=1: [2.0]
#   torch.save and load: [-2.0]
#   safetensors: [2.0]
#   all_reduce with [1.0] of rank 1, on rank 0: [-2.0]
#   all_reduce with [1.0] of rank 1, on rank 1: [-1.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6 safetensors==0.8.0)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
cat > check.py <<'PYTHON'
import io
import sys
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

RIGHT, WRONG = [-2.0], [2.0]


def imaginary(index=0):
    return torch.tensor([1 + 2j]).conj().imag


class Spectra(torch.utils.data.Dataset):
    __getitem__ = staticmethod(imaginary)

    def __len__(self):
        return 1


def reduce(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    tensor = imaginary() if rank == 0 else torch.ones(1)
    dist.all_reduce(tensor)
    for each in range(2):
        dist.barrier()
        if rank == each:
            values = tensor.tolist()
            print(f"all_reduce with [1.0] of rank 1, on rank {rank}: {values}", flush=True)
    if tensor.tolist() != [RIGHT, [-1.0]][rank]:
        sys.exit("The behavior has changed.")


if __name__ == "__main__":
    seen = {"values": imaginary()}
    for number in (0, 1):
        (sample,) = DataLoader(Spectra(), batch_size=None, num_workers=number)
        seen[f"DataLoader, num_workers={number}"] = sample
    file = io.BytesIO()
    torch.save(imaginary(), file)
    file.seek(0)
    seen["torch.save and load"] = torch.load(file)
    saved = safetensors.torch.save({"x": imaginary()})
    seen["safetensors"] = safetensors.torch.load(saved)["x"]
    seen = {name: tensor.resolve_neg().tolist() for name, tensor in seen.items()}
    for name, values in seen.items():
        print(f"{name}: {values}", flush=True)
    if list(seen.values()) != [RIGHT, RIGHT, WRONG, RIGHT, WRONG]:
        sys.exit("The behavior has changed.")
    mp.spawn(reduce, (sys.argv[1],), nprocs=2)
PYTHON
timeout 120 venv/bin/python check.py "$folder/file"
