#!/usr/bin/env bash
# Horovod: broadcast_optimizer_state changes the parameters.
#
# Versions: horovod 0.28.1 with gloo, torch 2.13.0 built for CPUs; needs a C++ compiler
# Expected: The call copies the state of the optimizer of rank 0. Parameters keep their values.
# Seen: For an optimizer without state, the call takes a step with gradients of zero, to create the
#   state. Weight decay moves the parameters, and the step counts in the bias correction of Adam.
# Output:
#   [0]<stdout>:after the broadcast: parameter = 0.95, steps = 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
export PATH=$folder/venv/bin:$PATH CMAKE_BUILD_PARALLEL_LEVEL=2 MAKEFLAGS=-j2
packages=(torch==2.13.0 numpy==2.4.6 cmake==3.31.6 setuptools==84.2.1 wheel==0.48.0)
packages+=(cffi==2.1.1 cloudpickle==3.1.2 packaging==26.3 psutil==7.2.2 pyyaml==6.0.3)
timeout 1800 pip install --quiet --no-compile "${packages[@]}"
# PyPI has only the sources, and the headers of PyTorch need C++17. The build takes minutes.
timeout 300 pip download --quiet --no-binary :all: --no-deps --no-build-isolation horovod==0.28.1
tar xf horovod-0.28.1.tar.gz
sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' \
    horovod-0.28.1/CMakeLists.txt horovod-0.28.1/horovod/torch/CMakeLists.txt
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_PYTORCH=1 \
    HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
timeout 1800 pip install --quiet --no-deps --no-build-isolation ./horovod-0.28.1
export OMP_NUM_THREADS=1
cat > check.py <<'PYTHON'
import sys
import horovod.torch as hvd
import torch

hvd.init()
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
value, steps = round(parameter.item(), 4), int(optimizer.state[parameter]["step"])
if hvd.rank() == 0:
    print(f"after the broadcast: parameter = {value}, steps = {steps}")
if (value, steps) != (0.95, 1):
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 "$folder/venv/bin/horovodrun" --gloo -np 2 venv/bin/python check.py
