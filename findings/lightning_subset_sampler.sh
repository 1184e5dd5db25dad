#!/usr/bin/env bash
# Lightning: processes with a SubsetRandomSampler read some samples twice and others never.
#
# Versions: lightning 2.6.6, torch 2.15.0, on CPUs
# Expected: Two processes share the samples of an epoch, as they do with shuffle=True.
# Seen: Each process draws an order with its own random numbers, and reads every second sample of
#   it. Unless all processes have the same random state, the halves overlap. Fabric does the same.
# Output:
#   rank 0: [5, 2, 1, 0]
#   rank 1: [7, 4, 5, 6]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6 lightning==2.6.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
cat > check.py <<'PYTHON'
import sys
import lightning
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler


class Reader(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_index):
        self.seen += batch.int().tolist()
        return self.layer(batch[:, None]).sum()

    def on_train_end(self):
        parts = [None, None]
        torch.distributed.all_gather_object(parts, self.seen)
        self.seen = parts

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(trainer.global_rank)  # without a seed, the random states differ too
    sampler = SubsetRandomSampler(range(8))
    reader = Reader()
    trainer.fit(reader, DataLoader(torch.arange(8.0), batch_size=2, sampler=sampler))
    if trainer.is_global_zero:
        print("rank 0:", reader.seen[0])
        print("rank 1:", reader.seen[1])
    if reader.seen != [[5, 2, 1, 0], [7, 4, 5, 6]]:
        sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
