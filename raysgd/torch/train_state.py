"""The training state of a PyTorch operator."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from raysgd._internal.nested import preserving
from raysgd._internal.step_timing import StepTiming
from raysgd.loop.train_state import TrainState
from raysgd.torch.collectives import TorchCollectives
from raysgd.torch.features.micro_batching import TorchMicroBatching, num_rows
from raysgd.torch.features.rollback import BufferCopies
from raysgd.torch.frozen_parameters import FrozenParameters
from raysgd.torch.input.loading import TorchSources
from raysgd.torch.options import OperatorSettings
from raysgd.torch.precision import PRECISIONS
from raysgd.torch.strategies.exchange import GradientExchange
from raysgd.torch.tensors import copy_leaf


class TorchTrainState(TrainState):
    """The registered objects, and what ``register`` has made of them. Features use it."""

    settings: OperatorSettings
    models: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    data: TorchSources

    def __init__(self, settings: OperatorSettings) -> None:
        super().__init__(settings, seed=torch.initial_seed() % 2**62)
        self.data = TorchSources(settings, self.position.seed)
        self.collectives = TorchCollectives(settings.device)
        if settings.device.type == "cuda":
            self.timing = StepTiming(partial(torch.cuda.Event, enable_timing=True))
        options = settings.options
        self.precision = PRECISIONS[options.use_fp16](settings.device, options.amp_dtype)
        self.micro_batching: TorchMicroBatching = TorchMicroBatching(self)
        self.set_features([self.micro_batching])  # `register` sets all features
        self.schedulers: list[Any] = []
        self.criteria: list[Any] = []
        self.buffer_copies = BufferCopies([], self.collectives)
        self.exchange = GradientExchange()
        self.frozen = FrozenParameters()

    def set_mode(self, training: bool) -> None:
        """Set train or eval mode. In training, frozen models keep their mode from `register`."""
        for model in self.models:
            model.train(training)
        if training:
            self.frozen.restore_modes()

    def modules(self) -> Iterator[torch.nn.Module]:
        """Iterate over all modules of the models."""
        return itertools.chain.from_iterable(model.modules() for model in self.models)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.modes = self.modes or [(module, module.training) for module in self.modules()]
        with super().evaluating():
            yield

    @contextlib.contextmanager
    def restoring_models(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(self.roll_back)
            modules = itertools.chain(self.models, self.modules())  # models may be wrappers
            for module in modules if self.has_all_parameters else ():
                if not isinstance(module, LazyModuleMixin):  # which the first batch completes
                    stack.enter_context(preserving(module))
            yield

    @property
    def has_all_parameters(self) -> bool:
        """Whether every worker has all parameters."""
        return all(map(self.replication.is_unsharded, self.models))

    copy_leaf = staticmethod(copy_leaf)
    num_rows = staticmethod(num_rows)
