#!/usr/bin/env bash
# PEFT: an adapter with init_lora_weights="pissa_niter_4" loads as another model.
#
# Versions: peft 0.21.2, torch 2.15.0
# Expected: PeftModel.from_pretrained on the same base model returns the model that was saved.
# Seen: PiSSA moves a part of the base weights into the adapter. from_pretrained splits the base
#   weights again, with a randomized SVD, and then loads the adapter of the first split. With
#   "pissa", the SVD is exact, and the outputs agree.
# Output:
#   True: the outputs agree
#   pissa: the outputs agree
#   pissa_niter_4: the outputs differ
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(torch==2.15.0 numpy==2.4.6 peft==0.21.2)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
cat > check.py <<'PYTHON'
import copy
import sys
import torch
from peft import LoraConfig, PeftModel, get_peft_model

torch.manual_seed(0)
base = torch.nn.Sequential(torch.nn.Linear(64, 64))
data = torch.randn(4, 64)
seen = {}
for init in (True, "pissa", "pissa_niter_4"):
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=init)
    model = get_peft_model(copy.deepcopy(base), config)
    model.save_pretrained(f"adapter-{init}")
    torch.manual_seed(2)  # the process that loads has other random numbers
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), f"adapter-{init}")
    difference = (model(data) - loaded(data)).abs().max().item()
    seen[init] = difference < 1e-4 or difference > 1e-2 and "differ"
    print(f"{init}: the outputs {'agree' if difference < 1e-4 else 'differ'}")
if list(seen.values()) != [True, True, "differ"]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 300 venv/bin/python check.py
