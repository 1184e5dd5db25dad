"""Averages of the weights, which replace the weights in validation and exports.

`WeightAveraging` computes them, and some optimizers have their own.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from raysgd.errors import CheckpointError
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.update import Update
from raysgd.torch.modules import can_require_grad, user_module
from raysgd.torch.object_states import model_problem
from raysgd.torch.precision import to_full_precision
from raysgd.torch.strategies import conflicts
from raysgd.torch.tensors import copy_all, parameters_of
from raysgd.torch.train_state import TorchTrainState


class WeightAveraging(UpdateFeature):
    """Averages the parameters, but not the buffers, if a callback requests it.

    Each worker has the averages on its device, and all workers make the same updates. Averages of
    16-bit weights have 32 bits, because small changes of an average would be rounded away.
    """

    def __init__(self, train_state: TorchTrainState) -> None:
        self._train_state = train_state
        self.averages: list[dict[str, torch.Tensor]] | None = None
        """Averages of each model, by parameter name. None before a callback requests averages."""
        self._decay: float | None = None
        self._start_epoch = self._count = 0

    @property
    def schedule_free(self) -> list[Any]:
        """Optimizers with other weights for evaluation than for training, as in schedule-free."""
        optimizers: list[Any] = self._train_state.optimizers
        return [o for o in optimizers if hasattr(o, "train") and hasattr(o, "eval")]

    def use_training_weights(self) -> None:
        for optimizer in self.schedule_free:
            optimizer.train()

    def begin_call(self, logs_steps: bool) -> None:
        self.use_training_weights()

    def start(self, decay: float | None, start_epoch: int) -> None:
        """Average the models from now on, or continue with averages of the same kind.

        Args:
            decay: weight of the old average in each update, for an exponential moving average. None
                for the mean of the parameters at the ends of epochs.
            start_epoch: the first epoch in the mean. Epochs count from 1.
        """
        if not self._train_state.has_all_parameters:
            conflicts.refuse('register(sharding="full")', "averages of the weights")
        if self.averages is None or (self._decay is None) != (decay is None):
            self._count = 0
            self.averages = [
                {name: to_full_precision(p.detach()).clone() for name, p in named.items()}
                for named in self._parameters()
            ]
        self._decay, self._start_epoch = decay, start_epoch

    def _parameters(self) -> list[dict[str, torch.nn.Parameter]]:
        """Return what has averages. Others, such as quantized weights, are never trained."""
        named = (user_module(model).named_parameters() for model in self._train_state.models)
        return [{name: p for name, p in each if can_require_grad(p)} for each in named]

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each parameter with its average. List a shared parameter once."""
        pairs = {
            parameter: averages[name]
            for named, averages in zip(self._parameters(), self.averages or (), strict=True)
            for name, parameter in named.items()
        }
        return [(parameter.detach(), average) for parameter, average in pairs.items()]

    @torch.no_grad()
    def _update_averages(self) -> None:
        parameters, averages = map(list, zip(*self._pairs(), strict=True))
        decay = self._decay if self._count else None  # the first average is a copy
        update = get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)
        update(averages, list(map(to_full_precision, parameters)), self._count)
        self._count += 1

    def commit(self, update: Update) -> None:
        steps = update.optimizer_steps
        is_unchanged = steps.are_skipped or update.bad_step is not None or not steps.counts
        if self.averages is not None and self._decay is not None and not is_unchanged:
            self._update_averages()

    def end_epoch(self, epoch: int) -> None:
        if self.averages is not None and self._decay is None and epoch >= self._start_epoch:
            self._update_averages()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Replace the weights with the averages within the context, if averages exist.

        Restore the bits of the weights, which ``train`` of an optimizer does not.
        """
        pairs, switched = self._pairs() if self.averages and self._count else [], self.schedule_free
        changed = [p for p, _ in pairs] + [p.detach() for o in switched for p in parameters_of(o)]
        weights = [(parameter, parameter.clone()) for parameter in changed]
        options = [(owner, dict(owner)) for o in switched for owner in (vars(o), *o.param_groups)]
        try:
            for optimizer in switched:
                optimizer.eval()
            copy_all(pairs)
            yield
        finally:
            copy_all(weights)
            for owner, before in options:
                owner.update(before)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        if self.averages is None:
            return {}
        settings = {"decay": self._decay, "start_epoch": self._start_epoch, "count": self._count}
        return {"averages": {**settings, "models": self.averages}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        if "averages" not in state:
            return
        saved = state["averages"]
        try:
            fits = saved["decay"] is None or 0 < saved["decay"] < 1
            fits &= all(type(saved[k]) is int and saved[k] >= 0 for k in ("count", "start_epoch"))
            for parameters, averages in zip(self._parameters(), saved["models"], strict=True):
                fits &= not model_problem(parameters, averages)
        except (AttributeError, KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise CheckpointError(
                "Cannot load 'averages' of the state: they are damaged, or of other models."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "averages" in state:
            loaded = state["averages"]
            self._decay, self._start_epoch = loaded["decay"], loaded["start_epoch"]
            self._count = loaded["count"]
            self.averages = [
                {k: saved[k].to(to_full_precision(p.detach()), copy=True) for k, p in named.items()}
                for named, saved in zip(self._parameters(), loaded["models"], strict=True)
            ]
        elif self.averages is not None:
            self._count = 0  # start again from the loaded weights
