#!/usr/bin/env bash
# Keras on PyTorch: train() does not turn on dropout and batch normalization.
#
# Versions: keras 3.15.1, torch 2.15.0
# Expected: With PyTorch as its backend, a Keras layer is a torch.nn.Module, so that train() and
#   eval() decide, as they do for the layers of PyTorch.
# Seen: In a training loop for PyTorch, dropout drops nothing, and batch normalization neither uses
#   nor collects the mean of the batches, although the layers report training=True. Only the
#   argument of the call counts. A layer in a torch.nn.Sequential never gets it.
# Output:
#   torch.nn: training=True, dropout is on, the moving mean is 0.25
#   keras: training=True, dropout is off, the moving mean is 0.0
#   keras, called with training=True: training=True, dropout is on, the moving mean is 0.025
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(keras==3.15.1 torch==2.15.0 numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export KERAS_BACKEND=torch CUDA_VISIBLE_DEVICES= PYTHONWARNINGS=ignore
cat > check.py <<'PYTHON'
import sys
import keras
import torch

batch = torch.ones(4, 100) + torch.arange(4.0)[:, None]


def run(name, dropout, normalization, mean_of, **arguments):
    model = torch.nn.ModuleList([dropout, normalization])
    model.train()
    outputs = dropout(normalization(batch, **arguments), **arguments)
    training = dropout.training and normalization.training
    dropped, mean = bool((outputs == 0).any()), round(mean_of(normalization)[0].item(), 4)
    state = "on" if dropped else "off"
    print(f"{name}: training={training}, dropout is {state}, the moving mean is {mean}")
    return training, dropped, mean


def run_keras(name, **arguments):
    dropout, normalization = keras.layers.Dropout(0.5), keras.layers.BatchNormalization()
    return run(name, dropout, normalization, lambda each: each.moving_mean.value, **arguments)


of_torch = torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(100)
seen = [
    run("torch.nn", *of_torch, lambda each: each.running_mean),
    run_keras("keras"),
    run_keras("keras, called with training=True", training=True),
]
if seen != [(True, True, 0.25), (True, False, 0.0), (True, True, 0.025)]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 300 venv/bin/python check.py
