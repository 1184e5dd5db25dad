#!/usr/bin/env bash
# Keras: with steps_per_epoch=2 of 3 batches, every second epoch has one step.
#
# Versions: keras 3.15.1 with jax 0.10.2
# Expected: Each epoch has two steps, because arrays can be read again.
# Seen: An epoch continues where the last one stopped, and ends with the data: epochs have 2, 1, 2,
#   and 1 steps. Schedules that count steps_per_epoch * epochs updates never end.
# Output:
#   steps of the epochs: [2, 1, 2, 1]
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

steps = []


class Count(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        steps.append(0)

    def on_train_batch_end(self, batch, logs=None):
        steps[-1] += 1


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
ones = np.ones((3, 1), "float32")
model.fit(ones, ones, batch_size=1, epochs=4, steps_per_epoch=2, verbose=0, callbacks=[Count()])
print("steps of the epochs:", steps)
if steps != [2, 1, 2, 1]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
