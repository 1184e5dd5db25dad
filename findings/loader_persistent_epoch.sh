#!/usr/bin/env bash
# torch.utils.data: with persistent_workers=True, set_epoch of a data set changes nothing.
#
# Versions: torch 2.15.0
# Expected: A loader reads the data set as it is when an epoch begins, as it does with new
#   processes.
# Seen: Persistent processes keep the copy of the first epoch. A data set that shuffles, augments,
#   or grows by its epoch repeats the first epoch forever, so that an option for speed changes the
#   training. There is no warning.
# Output:
#   persistent_workers=False: epochs [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
#   persistent_workers=True: epochs [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
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
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
cat > check.py <<'PYTHON'
import sys
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(10 * self.epoch, 10 * self.epoch + 3))


if __name__ == "__main__":
    seen = []
    for persistent in (False, True):
        stream = Stream()
        loader = DataLoader(stream, None, num_workers=1, persistent_workers=persistent)
        epochs = []
        for epoch in range(3):
            stream.set_epoch(epoch)
            epochs.append(list(loader))
        print(f"persistent_workers={persistent}: epochs {epochs}")
        seen.append(epochs)
    if seen != [[[0, 1, 2], [10, 11, 12], [20, 21, 22]], [[0, 1, 2]] * 3]:
        sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
