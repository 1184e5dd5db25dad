#!/usr/bin/env bash
# DTensor: the gradient of mse_loss is too large by the number of ranks.
#
# Versions: torch 2.15.0 with gloo, on CPUs
# Expected: A sharded batch has the loss and the gradient of the whole batch, as with l1_loss.
# Seen: Two ranks double the gradients of mse_loss, smooth_l1_loss, and huber_loss, because each of
#   them divides by the size of its own shard. The same formula with mean() is right. If the shards
#   have two samples and one, the losses are wrong, too: they are the mean of the ranks' means.
# Output:
#   mean of squares: gradient 15.0, one process 15.0; three samples: loss 4.6667, one process 4.6667
#   mse_loss: gradient 30.0, one process 15.0; three samples: loss 5.75, one process 4.6667
#   smooth_l1_loss: gradient 5.0, one process 2.5; three samples: loss 1.75, one process 1.5
#   huber_loss: gradient 5.0, one process 2.5; three samples: loss 1.75, one process 1.5
#   l1_loss: gradient 2.5, one process 2.5; three samples: loss 2.0, one process 2.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
cat > check.py <<'PYTHON'
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

LOSSES = {
    "mean of squares": lambda outputs, targets: ((outputs - targets) ** 2).mean(),
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "l1_loss": F.l1_loss,
}
WRONG = ["mse_loss", "smooth_l1_loss", "huber_loss"]


def run(loss_of, num_samples, mesh=None):
    batch = torch.arange(1.0, num_samples + 1)
    weight, targets = torch.ones(1), torch.zeros(num_samples)
    if mesh:
        batch = distribute_tensor(batch, mesh, [Shard(0)])
        targets = distribute_tensor(targets, mesh, [Shard(0)])
        weight = distribute_tensor(weight, mesh, [Replicate()])
    loss = loss_of(batch * weight.requires_grad_(), targets)
    loss.backward()
    values = (loss, weight.grad)
    return [round((each.full_tensor() if mesh else each).item(), 4) for each in values]


def train(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    for name, loss_of in LOSSES.items():
        gradient, gradient_of_one = run(loss_of, 4, mesh)[1], run(loss_of, 4)[1]
        loss, loss_of_one = run(loss_of, 3, mesh)[0], run(loss_of, 3)[0]
        if gradient == 2 * gradient_of_one and loss != loss_of_one:
            wrong.append(name)
        if rank == 0:
            parts = f"gradient {gradient}, one process {gradient_of_one}; three samples:"
            print(f"{name}: {parts} loss {loss}, one process {loss_of_one}", flush=True)
    dist.destroy_process_group()
    if wrong != WRONG:
        sys.exit("The behavior has changed.")


if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), nprocs=2)
PYTHON
timeout 120 venv/bin/python check.py "$folder/file"
