"""Mixed precision with NVIDIA Apex, for older scripts."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from raysgd.torch.precision.base import Precision

_KEY = "amp_apex"


class ApexAmp(Precision):
    """Passes models and optimizers to ``apex.amp``, whose ``opt_level`` selects the dtype.

    Apex keeps its state in Python modules, so a process can use only one `ApexAmp`.
    """

    name: ClassVar[str] = 'Apex (use_fp16="apex")'
    scales_loss = True

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        super().__init__(device)
        try:
            self._amp: Any = importlib.import_module("apex.amp")
        except ImportError as error:
            raise ImportError(
                f'use_fp16="apex" needs NVIDIA Apex on every worker, but importing it failed here: '
                f"{error}. The apex of the package index is another project: pip uninstall apex. "
                "Build a version with apex.amp from https://github.com/NVIDIA/apex, or pass "
                "use_fp16=True for the mixed precision of PyTorch."
            ) from error

    def prepare(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        arguments: Mapping[str, Any] | None,
    ) -> list[torch.nn.Module]:
        self._optimizers = optimizers
        patched, _ = self._amp.initialize(models, optimizers, **(arguments or {}))
        return list(patched)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        # Accumulated gradients stay scaled until the last backward pass.
        with self._amp.scale_loss(loss, self._optimizers, delay_unscale=not is_last) as scaled:
            scaled.backward()

    def parameters(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        return list(self._amp.master_params(optimizer))

    def state_dict(self) -> dict[str, Any]:
        return {_KEY: dict(self._amp.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if _KEY in state:
            self._amp.load_state_dict(dict(state[_KEY]))
