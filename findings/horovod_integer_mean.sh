#!/usr/bin/env bash
# Horovod: the mean of integers is rounded toward zero.
#
# Versions: horovod 0.28.1 with gloo, torch 2.13.0 built for CPUs; needs a C++ compiler
# Expected: Allreduce, whose default is the mean, returns 1.5 for 1 and 2, or refuses integers.
# Seen: It returns 1, and -1 for -1 and -2. Counts and sums of squares in integer tensors are wrong
#   by up to one, without a warning.
# Output:
#   [0]<stdout>:the mean of 1 and 2 is 1
#   [0]<stdout>:the mean of -1 and -2 is -1
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
seen = []
for values in ((1, 2), (-1, -2)):
    seen.append(hvd.allreduce(torch.tensor([values[hvd.rank()]])).item())
    if hvd.rank() == 0:
        print(f"the mean of {values[0]} and {values[1]} is {seen[-1]}")
if seen != [1, -1]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 "$folder/venv/bin/horovodrun" --gloo -np 2 venv/bin/python check.py
