"""States to save, and an object that runs code when it is unpickled."""

import os

import torch

STATE = {
    "epoch": 2,
    "models": [{"weight": torch.arange(4.0)}],
    "optimizers": [{"state": {}, "param_groups": [{"lr": 0.1}]}],
    "operator": {"best": 0.5, "names": ["a", ("b", None)]},
}


class Code:
    """An object that creates a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def state_at(step, epoch=1):
    """Return a state with its step in every tensor."""
    return {
        "epoch": epoch,
        "global_step": step,
        "models": [{f"layer{i}.weight": torch.full((50,), float(step)) for i in range(3)}],
        "optimizers": [{"state": {0: {"momentum": torch.full((50,), float(step))}}}],
        "operator": {"step": step},
    }


def step_of(state):
    """Return the step of a state of `state_at`. Fail if its parts are of different steps."""
    steps = {state["global_step"], state["operator"]["step"]}
    for tensor in (*state["models"][0].values(), state["optimizers"][0]["state"][0]["momentum"]):
        steps |= set(tensor.tolist())
    (step,) = steps
    return step


def flip(path, place, bits=0xFF):
    """Damage one byte of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= bits
    path.write_bytes(content)
