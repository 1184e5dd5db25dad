"""States to save, and what must not be run when they are loaded."""

import os

import torch

STATE = {
    "epoch": 2,
    "models": [{"weight": torch.arange(4.0)}],
    "optimizers": [{"state": {}, "param_groups": [{"lr": 0.1}]}],
    "operator": {"best": 0.5, "names": ["a", ("b", None)]},
}


class Code:
    """What runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def state_at(step, epoch=1):
    """A state whose content says of which step it is, in every tensor of it."""
    return {
        "epoch": epoch,
        "global_step": step,
        "models": [{f"layer{i}.weight": torch.full((50,), float(step)) for i in range(3)}],
        "optimizers": [{"state": {0: {"momentum": torch.full((50,), float(step))}}}],
        "operator": {"step": step},
    }


def step_of(state):
    """The step that a state of `state_at` is of, if every part of it says the same."""
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
