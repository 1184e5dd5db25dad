"""The random number generators of Python, NumPy, and PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from raysgd.loop.generators import Generators


class TorchGenerators(Generators):
    def state(self) -> dict[str, Any]:
        state = super().state()
        kind, keys, *rest = state["numpy"]
        # Use a tensor, because `weights_only` loading rejects arrays.
        state["numpy"] = (kind, torch.from_numpy(keys.astype(np.int64)), *rest)
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def set(self, state: Mapping[str, Any]) -> None:
        super().set(state)
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
