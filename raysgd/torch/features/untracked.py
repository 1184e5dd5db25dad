"""Warnings about tensors that neither checkpoints nor new workers have."""

from __future__ import annotations

from typing import Any

import torch

from raysgd.loop.feature import StepFeature
from raysgd.loop.train_state import TrainState
from raysgd.torch.register_checks import attributes_of, is_metric
from raysgd.torch.tensors import version_of


class Untracked(StepFeature):
    """Warns if training changes tensors of an operator that are not registered.

    Attributes of an optimizer count too, unless its class defines ``state_dict``.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._operator: Any = None
        self._names: list[str] = []
        self._before: dict[str, Any] | None = None

    def watch(self, operator: Any) -> None:
        """Watch the tensors that ``setup`` created. Tensors of ``train_batch`` may be caches."""
        self._operator = operator
        self._names = list(self._versions())

    def begin_call(self, logs_steps: bool) -> None:
        if self._before is None:  # otherwise, the call has paused
            self._before = self._versions()

    def end_call(self) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        now = self._versions()
        names = [n for n in before | now if n in self._names or not n.startswith("self.")]
        changed = [name for name in names if before.get(name) != now.get(name)]
        if changed and not self._operator.state_dict():
            self._state.settings.warn_once(
                "untracked",
                "train_batch changed %s. Checkpoints and workers that start later, such as "
                "replacements, do not have this change. Register modules, also frozen ones, as "
                "models; keep state of an optimizer in optimizer.state; or return the values from "
                "state_dict() of the operator, and set them in load_state_dict().",
                ", ".join(changed[:5]) + ", …" * (len(changed) > 5),
            )

    def _versions(self) -> dict[str, Any]:
        """Return what identifies the content of each unregistered tensor, by its name."""
        tensors: dict[str, torch.Tensor] = {}
        places = [*attributes_of(self._operator)]
        for optimizer in self._state.optimizers:
            if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
                for name, value in vars(optimizer).items():
                    parts = enumerate(value if isinstance(value, list) else [value])
                    places += [(f"{type(optimizer).__name__}.{name}[{n}]", v) for n, v in parts]
        for place, value in places:
            if isinstance(value, torch.Tensor):
                tensors[place] = value
            elif isinstance(value, torch.nn.Module) and not is_metric(value):
                named = (*value.named_parameters(place), *value.named_buffers(place))
                tensors.update(named)
        registered = {
            id(tensor)
            for model in self._state.models
            for tensor in (*model.parameters(), *model.buffers())
        }
        return {
            name: (id(tensor), version_of(tensor), tensor)  # another may reuse the ID of a lost one
            for name, tensor in tensors.items()
            if id(tensor) not in registered and not tensor.is_inference()
        }
