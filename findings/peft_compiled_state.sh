#!/usr/bin/env bash
# PEFT: the adapter of a compiled model loads as nothing.
#
# Versions: peft 0.21.2, torch 2.15.0
# Expected: set_peft_model_state_dict loads what get_peft_model_state_dict returned, or raises an
#   error because no key matches.
# Seen: The keys of a model in torch.compile begin with "_orig_mod.". Loading ignores all of them,
#   without an error or a warning, and the model keeps the adapter of its start, which changes
#   nothing. The return value names the keys, but also those of the base model, as in each correct
#   load.
# Output:
#   plain model, loaded: output 17.0
#   compiled model: base_model.model.0.lora_A.weight is saved as _orig_mod.base_model.model.0.lora_A.weight
#   compiled model, loaded: output 1.0
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
import sys
import torch
from peft import LoraConfig, get_peft_model
from peft import get_peft_model_state_dict, set_peft_model_state_dict

data = torch.ones(1, 8)


def make(trained=False):
    model = torch.nn.Sequential(torch.nn.Linear(8, 1, bias=False))
    torch.nn.init.constant_(model[0].weight, 1 / 8)
    model = get_peft_model(model, LoraConfig(r=1, lora_alpha=1, target_modules=["0"]))
    for name, parameter in model.named_parameters():
        if trained and "lora" in name:
            torch.nn.init.constant_(parameter, 2.0 if "lora_A" in name else 1.0)
    return model


seen = []
for name, wrap in (("plain", lambda model: model), ("compiled", torch.compile)):
    state = get_peft_model_state_dict(wrap(make(trained=True)))
    if name == "compiled":
        key = next(iter(state))
        print(f"compiled model: {key.removeprefix('_orig_mod.')} is saved as {key}")
    model = make()
    set_peft_model_state_dict(model, state)
    seen.append(round(model(data).item(), 4))
    print(f"{name} model, loaded: output {seen[-1]}")
if seen != [17.0, 1.0]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 300 venv/bin/python check.py
