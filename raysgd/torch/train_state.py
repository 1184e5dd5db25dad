"""The training state of a PyTorch operator, and its random numbers."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.modules.lazy import LazyModuleMixin

from raysgd._internal.nested import preserving_attributes
from raysgd._internal.step_timing import StepTiming
from raysgd.loop.train_state import RandomGenerators, TrainState
from raysgd.torch.collectives import TorchCollectives
from raysgd.torch.features.buffer_backup import BufferBackup
from raysgd.torch.features.frozen_parameters import FrozenParameters
from raysgd.torch.features.micro_batching import TorchMicroBatching, num_rows
from raysgd.torch.input.sources import TorchSources
from raysgd.torch.object_states import initial_hyperparameters, rescale_hyperparameters
from raysgd.torch.options import TorchSettings
from raysgd.torch.precision import PRECISIONS
from raysgd.torch.strategies.exchange import GradientExchange
from raysgd.torch.tensors import copy_leaf


class TorchTrainState(TrainState):
    """The training state of one worker, which features, exchanges, and placements use too.

    It exists from before ``setup`` to the end of the worker. Only `register`,
    `LightningOperatorMixin`, and `GradientExchange`, which wraps models, replace the registered
    objects. If a feature needs the segment in progress, its caller passes it.
    """

    settings: TorchSettings
    data: TorchSources
    collectives: TorchCollectives
    micro_batching: TorchMicroBatching
    models: list[torch.nn.Module]

    def __init__(self, settings: TorchSettings) -> None:
        super().__init__(settings)
        options, device = settings.options, settings.device
        self.data = TorchSources(settings, torch.initial_seed() % 2**62)
        if device.type == "cuda":
            self.step_timing = StepTiming(functools.partial(torch.cuda.Event, enable_timing=True))
        self.generators = TorchRandomGenerators()
        self.collectives = TorchCollectives(device)
        self.precision = PRECISIONS[options.use_fp16](device, options.amp_dtype)
        self.micro_batching = TorchMicroBatching(self)
        # `register` sets these too. After ``setup``, `models` has wrappers of user code.
        self.scheduler_step_freq = options.scheduler_step_freq  # or that of a LightningModule
        self.schedulers: list[Any] = []
        self.exchange = GradientExchange()
        self.frozen_parameters = FrozenParameters([], self.collectives)
        self.buffer_backup = BufferBackup([], self.collectives)
        self.criteria: list[Any] = []

    @property
    def has_all_parameters(self) -> bool:
        """Whether every worker has all parameters."""
        return all(map(self.placement.is_unsharded, self.models))

    def save_modes(self) -> None:
        modules = (module for model in self.models for module in model.modules())
        self.saved_modes = self.saved_modes or [(m, m.training) for m in modules]

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.save_modes()
        with super().evaluating():
            yield

    @contextlib.contextmanager
    def preserving_models(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            self.buffer_backup.take()  # which the next line restores
            stack.callback(self.roll_back)
            for model in self.models if self.has_all_parameters else ():
                for module in (model, *model.modules()):  # the model may be a wrapper
                    if not isinstance(module, LazyModuleMixin):  # which the first batch completes
                        stack.enter_context(preserving_attributes(module))
            yield

    def can_complete(self, snapshot: Mapping[str, Any]) -> bool:
        return self.frozen_parameters.can_complete(snapshot)

    copy_leaf = staticmethod(copy_leaf)
    num_rows = staticmethod(num_rows)
    initial_hyperparameters = initial_hyperparameters
    rescale_hyperparameters = rescale_hyperparameters


class TorchRandomGenerators(RandomGenerators):
    """The random number generators of Python, NumPy, and PyTorch."""

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
