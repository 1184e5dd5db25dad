"""Averages of the weights over training, which are validated and handed out in their place."""

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

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState

__all__ = ["Averages", "Averaging"]

_SWAPPED_AT_ONCE = 2**20
"""Elements; a row may have more."""


class Averaging(StepFeature):
    """Averages the weights if a callback asks for it, and evaluates the averages."""

    def __init__(self, state: TorchTrainState) -> None:
        self._state = state
        self.averages: Averages | None = None
        """None before a callback asks for them."""

    def begin(self, decay: float | None, start_epoch: int) -> None:
        """Average the models from now on, or continue with averages of the same kind."""
        if any(feature.is_fully_sharded for feature in self._state.sharded):
            raise ValueError(
                'Averages of the models do not work with register(sharding="full"): no worker has '
                "the whole models. Leave out the callback, or the sharding."
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
        elif self.averages is not None:  # again, from these weights
            self.averages = Averages.of(self._models, {**self.averages.state_dict(), "count": 0})


class Averages:
    """The average of each parameter of some models, on its device; as torch's AveragedModel has it.

    All workers update theirs alike, after each update of the models, or each epoch. Buffers are not
    averaged: those of the models go with the averages.

    Args:
        models: without the wrappers that average gradients.
        decay: what the average so far counts for at each update, an exponential moving average;
            None for the plain mean over epochs.
        start_epoch: the first epoch whose end counts in a mean over epochs, from 1.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], decay: float | None, start_epoch: int = 1
    ) -> None:
        self._models = models
        self.change(decay, start_epoch)
        self._count = 0
        self._num_added = 0
        self._averages = [
            {saved_name(name): p.detach().clone() for name, p in model.named_parameters()}
            for model in models
        ]

    def change(self, decay: float | None, start_epoch: int) -> None:
        """Go on with another decay, or start."""
        self.decay, self._start_epoch = decay, start_epoch
        self._update = get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)

    def note_update(self) -> None:
        """See that the models have been updated."""
        if self.decay is not None:
            self._add()

    def note_epoch(self, epoch: int) -> None:
        """See that so many epochs are completed."""
        if self.decay is None and epoch >= self._start_epoch:
            self._add()

    @torch.no_grad()
    def _add(self) -> None:
        """Add the models; where that has failed half-way, what was left of it."""
        pairs = list(self._pairs())
        own, given = [average for _, average in pairs], [p.detach() for p, _ in pairs]
        # on a CPU one by one, as torch does; a GPU does all, or nothing
        at_once = 1 if any(each.device.type == "cpu" for each in own) else max(1, len(own))
        for start in range(self._num_added, len(own), at_once):
            averages, parameters = own[start : start + at_once], given[start : start + at_once]
            if self._count == 0:
                for average, parameter in zip(averages, parameters, strict=True):
                    average.copy_(parameter)
            else:
                self._update(averages, parameters, self._count)
            self._num_added = start + at_once
        self._count, self._num_added = self._count + 1, 0

    def _pairs(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        seen: set[int] = set()  # models may share some
        for model, averages in zip(self._models, self._averages, strict=True):
            for name, parameter in model.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter, averages[saved_name(name)]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the models have the averages for a while, once there are some."""
        if not self._count:
            yield
            return
        room, swapped = self._room(), 0
        pairs = [pair for each in self._pairs() for pair in zip(*map(_in_rows, each), strict=True)]
        try:
            for rows, average in pairs:
                _swap(rows, average, room)
                swapped += 1
            yield
        finally:
            for rows, average in pairs[:swapped]:
                _swap(rows, average, room)

    def _room(self) -> dict[Any, torch.Tensor]:
        """Return memory to swap by, of each kind, so that nothing else is asked for midway."""
        sizes: dict[Any, int] = {}
        for parameter, _ in self._pairs():
            for rows in _in_rows(parameter):
                sizes[_kind(rows)] = max(rows.numel(), sizes.get(_kind(rows), 0))
        return {
            (dtype, device): torch.empty(size, dtype=dtype, device=device)
            for (dtype, device), size in sizes.items()
        }

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, and what they are of."""
        return {
            "decay": self.decay,
            "start_epoch": self._start_epoch,
            "count": self._count,
            "models": self._averages,
        }

    @classmethod
    def of(cls, models: Sequence[torch.nn.Module], state: Mapping[str, Any]) -> Averages:
        """Return those of a state that `Averaging.check_state` accepts."""
        made = cls(models, state["decay"], state["start_epoch"])
        made._count = state["count"]
        for own, given in zip(made._averages, state["models"], strict=True):
            for name, average in own.items():
                average.copy_(given[name])
        return made


@torch.no_grad()
def _swap(rows: torch.Tensor, other: torch.Tensor, room: Mapping[Any, torch.Tensor]) -> None:
    held = room[_kind(rows)][: rows.numel()].view(rows.shape)
    held.copy_(rows)
    rows.copy_(other)
    other.copy_(held)


def _in_rows(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a tensor as some rows of it at a time."""
    rows = tensor.detach()
    if not rows.numel() or not rows.dim():
        return [rows]
    at_once = max(1, _SWAPPED_AT_ONCE * len(rows) // rows.numel())
    return [rows[start : start + at_once] for start in range(0, len(rows), at_once)]


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def _problem(models: Sequence[torch.nn.Module], state: Any) -> str:
    """Say why a state of averages does not fit some models; nothing if it does."""
    if not isinstance(state, Mapping) or not isinstance(state.get("models"), list | tuple):
        return "it is no state of them"
    decay = state.get("decay")
    counts = [state.get(name) for name in ("count", "start_epoch")]
    if not (decay is None or (isinstance(decay, float) and 0 < decay < 1)) or not all(
        type(count) is int and 0 <= count < 2**62 for count in counts
    ):
        return "its decay is no number between 0 and 1, or its counts are none"
    held = [{saved_name(n): p for n, p in model.named_parameters()} for model in models]
    fits = len(held) == len(state["models"]) and all(
        isinstance(given, Mapping)
        and given.keys() == own.keys()
        and all(is_like(given[n], p) and given[n].shape == p.shape for n, p in own.items())
        for own, given in zip(held, state["models"], strict=True)
    )
    return "" if fits else "they are of other models, or no dense tensors"
