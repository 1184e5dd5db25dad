"""Warnings about changes that neither checkpoints nor new workers have."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch

from raysgd._internal.nested import map_leaves
from raysgd.loop.feature import StepFeature
from raysgd.torch import ddp
from raysgd.torch.register_checks import held_by, is_metric
from raysgd.torch.state import version_of


class Untracked(StepFeature):
    """Compares what an operator holds besides the training state."""

    def __init__(self, operator: Any) -> None:
        self._operator, self._state = operator, operator._train_state
        # Tensors that train_batch creates later may be caches.
        self._tensors = [n for n, each in self._identities().items() if isinstance(each, tuple)]
        self._before: dict[str, Any] = {}

    def begin_call(self, logs_steps: bool) -> None:
        identities = self._identities()
        self._before = {name: identities.get(name) for name in self._tensors}

    def check_trained(self) -> None:
        before, self._before = self._before, {}
        self._warn("train_batch", before, before)

    @contextlib.contextmanager
    def applying(self) -> Iterator[None]:
        before = self._identities()
        yield
        context = self._state.context
        if not (context.in_driver and context.world_size == 1):
            self._warn("apply_all_operators", before, before | self._identities())

    def _identities(self) -> dict[str, Any]:
        """Return what identifies each attribute of the operator and of its modules, by name.

        Leave out metrics, and parameters and buffers of registered models.
        """
        registered = {id(each) for m in self._state.models for each in ddp.plain(m).modules()}
        identities: dict[str, Any] = {}
        for place, attribute in held_by(self._operator):
            identities[place] = _identity(attribute)
            if not isinstance(attribute, torch.nn.Module) or is_metric(attribute):
                continue
            for path, module in ddp.plain(attribute).named_modules(prefix=place):
                own = {} if id(module) in registered else {**module._parameters, **module._buffers}
                for key, each in {**vars(module), **own}.items():
                    if key[0] != "_" and key != "training":
                        identities[f"{path}.{key}"] = _identity(each)
        return identities

    def _warn(self, by: str, before: dict[str, Any], names: Collection[str]) -> None:
        now = self._identities() if names else {}
        changed = [name for name in names if before.get(name) != now.get(name)]
        if not changed:
            return
        state, kept = self._operator.state_dict(), set()
        map_leaves(state, lambda leaf: kept.add(_identity(leaf)))
        lost = [n for n in changed if now.get(n) not in kept and re.split(r"\W", n)[1] not in state]
        if lost:
            self._state.settings.warn_once(
                by if by == "train_batch" else str(lost),
                "%s changed %s. Checkpoints and workers that start later, such as replacements, do "
                "not have this change. Register modules, also frozen ones, as models; or return "
                "the values from state_dict() of the operator, and set them in load_state_dict().",
                by,
                ", ".join(lost[:5]) + ", …" * (len(lost) > 5),
            )


def _identity(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_inference():
        has_address = value.layout is torch.strided
        return value.data_ptr() if has_address else id(value), version_of(value)
    return repr(value) if isinstance(value, int | float | str | tuple) else id(value)
