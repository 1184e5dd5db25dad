#!/usr/bin/env bash
# NumPy: a generator that is restored from its state spawns the same children again.
#
# Versions: numpy 2.4.6
# Expected: After a resume, a generator continues as if it had not stopped, also with spawn().
# Seen: bit_generator.state does not have the number of children. A run that spawns a generator for
#   each epoch, and resumes with its seed and the saved state, augments epoch 2 like epoch 0. With
#   another seed, it gets children of that seed. A pickle of the generator has the number.
# Output:
#   not stopped: the children begin with 0.943, 0.677, 0.838
#   resumed from bit_generator.state: child 2 begins with 0.943
#   resumed from a pickle: child 2 begins with 0.838
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(numpy==2.4.6)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
cat > check.py <<'PYTHON'
import pickle
import sys
import numpy as np


def spawn(generator):
    return round(generator.spawn(1)[0].random(), 3)


generator = np.random.default_rng(0)
children = [spawn(generator) for _ in range(2)]
state = generator.bit_generator.state
file = pickle.dumps(generator)
children.append(spawn(generator))

resumed = np.random.default_rng(0)
resumed.bit_generator.state = state
from_state, from_pickle = spawn(resumed), spawn(pickle.loads(file))
print("not stopped: the children begin with", ", ".join(map(str, children)))
print("resumed from bit_generator.state: child 2 begins with", from_state)
print("resumed from a pickle: child 2 begins with", from_pickle)
if (from_state, from_pickle) != (children[0], children[2]) or children[0] == children[2]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
