#!/usr/bin/env bash
# Ray: an actor without GPUs sees all GPUs of the node.
#
# Versions: ray 2.60.0; needs no GPU
# Expected: An actor with num_gpus=0 gets an empty CUDA_VISIBLE_DEVICES, because another actor has
#   reserved both GPUs.
# Seen: It keeps the variable of the node. CUDA code in it uses a GPU that Ray gave to the other
#   actor.
# Output:
#   num_gpus=2: Ray assigns ['0', '1'], CUDA_VISIBLE_DEVICES is 0,1
#   num_gpus=0: Ray assigns [], CUDA_VISIBLE_DEVICES is 0,1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(ray==2.60.0)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export HOME=$folder RAY_TMPDIR=$folder
unset RAY_ADDRESS
export RAY_AUTH_MODE=disabled CUDA_VISIBLE_DEVICES=0,1
cat > check.py <<'PYTHON'
import logging
import os
import sys
import ray

logging.disable(logging.WARNING)
ray.init("local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)


@ray.remote
class Actor:
    def devices(self):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        return sorted(ray.get_gpu_ids()), ",".join(sorted(visible.split(",")))  # in any order


actors = {gpus: Actor.options(num_gpus=gpus).remote() for gpus in (2, 0)}
seen = {gpus: ray.get(actor.devices.remote()) for gpus, actor in actors.items()}
for gpus, (ids, visible) in seen.items():
    print(f"num_gpus={gpus}: Ray assigns {ids}, CUDA_VISIBLE_DEVICES is {visible}")
if seen != {2: (["0", "1"], "0,1"), 0: ([], "0,1")}:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
