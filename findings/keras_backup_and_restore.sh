#!/usr/bin/env bash
# Keras: BackupAndRestore(save_freq=5) resumes an epoch at its first batch.
#
# Versions: keras 3.15.1 with jax 0.10.2; the same with TensorFlow and PyTorch
# Expected: A fit that stopped in batch 13 of 20 resumes from the backup after batch 10, and the
#   epoch has 20 updates in all.
# Seen: The second fit restores the weights and counters of the backup, and then runs all 20
#   batches. The first 10 batches count twice: the optimizer has made 30 updates.
# Output:
#   first fit, interrupted: updates = 13
#   second fit: first batch = 0, updates = 30
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
export KERAS_BACKEND=jax
cat > check.py <<'PYTHON'
import sys
import keras
import numpy as np


class Batches(keras.callbacks.Callback):
    def __init__(self, stop_in=None):
        super().__init__()
        self.first, self.stop_in = None, stop_in

    def on_train_batch_begin(self, batch, logs=None):
        self.first = batch if self.first is None else self.first

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.stop_in:
            raise InterruptedError


def fit(stop_in=None):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = Batches(stop_in)
    backup = keras.callbacks.BackupAndRestore(sys.argv[1] + ".backup", save_freq=5)
    ones = np.ones((20, 1), "float32")
    try:
        model.fit(ones, ones, batch_size=1, verbose=0, callbacks=[backup, batches])
    except InterruptedError:
        pass
    return batches.first, int(model.optimizer.iterations)


print("first fit, interrupted: updates =", fit(stop_in=12)[1])
first, updates = fit()
print(f"second fit: first batch = {first}, updates = {updates}")
if (first, updates) != (0, 30):
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py "$folder/file"
