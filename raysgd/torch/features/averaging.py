"""Averages of the weights, which replace the weights in validation and exports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from raysgd.errors import CheckpointError
from raysgd.loop.feature import StepFeature
from raysgd.torch import ddp
from raysgd.torch.state import is_like, saved_name
from raysgd.torch.tensors import copy_all

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState

__all__ = ["Averages", "Averaging"]


class Averaging(StepFeature):
    """Averages the weights if a callback requests it, and evaluates the averages."""

    def __init__(self, state: TorchTrainState) -> None:
        self._state = state
        self.averages: Averages | None = None
        """None before a callback asks for them."""

    def begin(self, decay: float | None, start_epoch: int) -> None:
        """Average the models from now on, or continue with averages of the same kind."""
        if any(feature.is_fully_sharded for feature in self._state.sharded):
            raise ValueError(
                'Averages of the weights do not work with register(sharding="full"). Leave out the '
                "callback, or the sharding."
            )
        if self.averages is None or (self.averages.decay is None) != (decay is None):
            self.averages = Averages(self._models, decay, start_epoch)
        else:
            self.averages.change(decay, start_epoch)

    @property
    def _models(self) -> list[torch.nn.Module]:
        return [ddp.unwrap(model) for model in self._state.models]

    def commit(self) -> None:
        if self.averages is not None:
            self.averages.note_update()

    def end_epoch(self, epoch: int) -> None:
        if self.averages is not None:
            self.averages.note_epoch(epoch)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.averages is None else self.averages.in_place()

    def settable(self) -> Any:
        return None if self.averages is None else (id(self.averages), self.averages.decay)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.averages is None else {"averages": self.averages.state_dict()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        problem = "averages" in state and _problem(self._models, state["averages"])
        if problem:
            raise CheckpointError(f"The state's 'averages' cannot be taken: {problem}.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "averages" in state:
            self.averages = Averages.of(self._models, state["averages"])
        elif self.averages is not None:  # start again from the loaded weights
            self.averages = Averages.of(self._models, {**self.averages.state_dict(), "count": 0})


class Averages:
    """The average of each parameter of the models, on its device, like PyTorch's AveragedModel.

    All workers update their averages alike. Buffers are not averaged.

    Args:
        models: the models without wrappers.
        decay: weight of the old average in each update, for an exponential moving average. None
            for the mean of the parameters at the ends of epochs.
        start_epoch: the first epoch of that mean, from 1.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], decay: float | None, start_epoch: int = 1
    ) -> None:
        self._models = models
        self.change(decay, start_epoch)
        self._count = 0
        self._averages = [
            {saved_name(name): p.detach().clone() for name, p in model.named_parameters()}
            for model in models
        ]

    def change(self, decay: float | None, start_epoch: int) -> None:
        self.decay, self._start_epoch = decay, start_epoch
        self._update = get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)

    def note_update(self) -> None:
        if self.decay is not None:
            self._add()

    def note_epoch(self, epoch: int) -> None:
        if self.decay is None and epoch >= self._start_epoch:
            self._add()

    @torch.no_grad()
    def _add(self) -> None:
        parameters, averages = map(list, zip(*self._pairs(), strict=True))
        if self._count == 0:
            copy_all(averages, parameters)
        else:
            self._update(averages, parameters, self._count)
        self._count += 1

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each parameter with its average. List a shared parameter once."""
        pairs = {
            id(parameter): (parameter.detach(), averages[saved_name(name)])
            for model, averages in zip(self._models, self._averages, strict=True)
            for name, parameter in model.named_parameters()
        }
        return list(pairs.values())

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the weights by the averages within the context, if averages exist."""
        pairs = self._pairs() if self._count else []
        held = [parameter.clone() for parameter, _ in pairs]
        try:
            for parameter, average in pairs:
                parameter.copy_(average)
            yield
        finally:
            for (parameter, _), value in zip(pairs, held, strict=True):
                parameter.copy_(value)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "decay": self.decay,
            "start_epoch": self._start_epoch,
            "count": self._count,
            "models": self._averages,
        }

    @classmethod
    def of(cls, models: Sequence[torch.nn.Module], state: Mapping[str, Any]) -> Averages:
        """Return the averages of a state that `Averaging.check_state` accepts."""
        made = cls(models, state["decay"], state["start_epoch"])
        made._count = state["count"]
        for own, given in zip(made._averages, state["models"], strict=True):
            for name, average in own.items():
                average.copy_(given[name])
        return made


def _problem(models: Sequence[torch.nn.Module], state: Any) -> str:
    """Return why a state of averages does not fit the models. Return "" if it does."""
    try:
        decay, counts = state["decay"], (state["count"], state["start_epoch"])
        if not (decay is None or 0 < decay < 1) or not all(
            type(n) is int and n >= 0 for n in counts
        ):
            return "its decay or its counts are no such numbers"
        held = [{saved_name(n): p for n, p in model.named_parameters()} for model in models]
        fits = len(held) == len(state["models"]) and all(
            given.keys() == own.keys()
            and all(is_like(given[n], p) and given[n].shape == p.shape for n, p in own.items())
            for own, given in zip(held, state["models"], strict=True)
        )
    except (AttributeError, KeyError, TypeError):
        return "it is not the state of averages"
    return "" if fits else "they are of other models, or no dense tensors"
