#!/usr/bin/env bash
# Keras: gradient accumulation speeds up schedules and moving averages.
#
# Versions: keras 3.15.1 with jax 0.10.2; the same with PyTorch
# Expected: Four updates of two batches each train like four updates of one batch, if all batches
#   are equal. This holds for momentum, weight decay, and clipping.
# Seen: A schedule counts batches, so that the rate falls after half of its updates. The
#   documentation says so. The moving average of use_ema=True also changes with each batch, although
#   its frequency counts updates, so that a momentum of 0.9 acts as 0.81.
# Output:
#   SGD: 4 updates of 1 batch: 0.4096; of 2 batches: 0.4096
#   schedule: 4 updates of 1 batch: 0.5018; of 2 batches: 0.753
#   use_ema: 4 updates of 1 batch: 0.7221; of 2 batches: 0.6896
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(keras==3.15.1 jax==0.10.2 numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export KERAS_BACKEND=jax PYTHONWARNINGS=ignore
cat > check.py <<'PYTHON'
import sys
import keras
import numpy as np

schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.01])


def train(batches, **arguments):
    steps = None if batches == 1 else batches
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.ones((1, 1))])
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=steps, **arguments)
    model.compile(optimizer, "mse")
    ones, zeros = np.ones((4 * batches, 1), "float32"), np.zeros((4 * batches, 1), "float32")
    model.fit(ones, zeros, batch_size=1, shuffle=False, verbose=0)
    return round(float(model.get_weights()[0].item()), 4), int(optimizer.iterations)


seen = []
for name, arguments in (
    ("SGD", {"learning_rate": 0.1}),
    ("schedule", {"learning_rate": schedule}),
    ("use_ema", {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.9}),
):
    (one, updates), (two, updates_of_two) = (train(batches, **arguments) for batches in (1, 2))
    print(f"{name}: {updates} updates of 1 batch: {one}; of 2 batches: {two}")
    seen.append((one == two, updates, updates_of_two))
if seen != [(True, 4, 4), (False, 4, 4), (False, 4, 4)]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
