"""Warnings about tensors that neither checkpoints nor new workers have."""

from typing import Any

import torch

from raysgd.loop.feature import UpdateFeature
from raysgd.torch.modules import user_module
from raysgd.torch.register_checks import attributes_of, is_metric
from raysgd.torch.tensors import version_of
from raysgd.torch.train_state import TorchTrainState


def _key(value: Any) -> int:
    return id(user_module(value) if isinstance(value, torch.nn.Module) else value)


class UnregisteredTensors(UpdateFeature):
    """Warns if training changes tensors of an operator that are not registered.

    It also warns of objects in place of registered ones.
    """

    def __init__(self, train_state: TorchTrainState) -> None:
        self._train_state = train_state
        self._operator: Any = None
        self._names: set[str] = set()
        self._registered_names: list[str] = []
        self._before: dict[str, Any] | None = None

    def watch(self, operator: Any) -> None:
        """Watch the tensors that ``setup`` created. Tensors of ``train_batch`` may be caches."""
        self._operator = operator
        self._names = {*self._versions()}
        attributes, registered = vars(operator).items(), self._registered_ids()
        self._registered_names = [name for name, value in attributes if _key(value) in registered]

    def _registered_ids(self) -> set[int]:
        state = self._train_state
        return set(map(_key, (*state.models, *state.optimizers, *state.schedulers)))

    def begin_call(self, logs_steps: bool) -> None:
        registered = self._registered_ids()
        for name in self._registered_names:
            value = getattr(self._operator, name, None)
            if value is not None and _key(value) not in registered:
                self._train_state.settings.warn_once(
                    f"replaced {name}",
                    "self.%s was replaced by a %s that is not registered. Checkpoints and workers "
                    "that start later lack it. Change the registered object, or register both in "
                    "setup, as a list.",
                    name,
                    type(value).__name__,
                )
        if self._before is None:  # otherwise, the call has paused
            self._before = self._versions()

    def end_call(self) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        now = self._versions()
        names = [name for name in before | now if name in self._names]
        changed = [name for name in names if before.get(name) != now.get(name)]
        if changed and not self._operator.state_dict():
            self._train_state.settings.warn_once(
                "unregistered tensors",
                "train_batch changed %s. Checkpoints and workers that start later, such as "
                "replacements, do not have this change. Register modules, also frozen ones, as "
                "models; or return the values from state_dict() of the operator, and set them in "
                "load_state_dict(). Ignore this for values that each step computes from scratch.",
                ", ".join(changed[:5]) + ", …" * (len(changed) > 5),
            )

    def _versions(self) -> dict[str, Any]:
        """Return what identifies the content of each unregistered tensor, by its name."""
        tensors: dict[str, torch.Tensor] = {}
        for name, value in attributes_of(self._operator):
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif isinstance(value, torch.nn.Module) and not is_metric(value):
                tensors.update((*value.named_parameters(name), *value.named_buffers(name)))
        registered = {
            id(tensor)
            for model in self._train_state.models
            for tensor in (*model.parameters(), *model.buffers())
        }
        return {
            name: (id(tensor), version_of(tensor), tensor)  # another may reuse the ID of a lost one
            for name, tensor in tensors.items()
            if id(tensor) not in registered and not tensor.is_inference()
        }
