"""What ``register`` makes, and what features, exchanges, and placements use."""

from typing import Any

import torch

from raysgd.loop.state_placement import StatePlacement
from raysgd.loop.train_state import TrainState
from raysgd.torch.collectives import TorchCollectives
from raysgd.torch.features.micro_batching import TorchMicroBatching
from raysgd.torch.features.rollback import BufferCopies
from raysgd.torch.features.setup_baseline import SetupBaseline
from raysgd.torch.input.sources import TorchSources
from raysgd.torch.options import TorchSettings
from raysgd.torch.precision import PRECISIONS
from raysgd.torch.strategies.exchange import GradientExchange


class RegisteredObjects:
    """The registered objects of one worker, and what else features may use of its training state.

    `TorchTrainState` owns it from before ``setup``. Only `register`, `LightningMethods`, and
    `GradientExchange`, which wraps models, replace attributes. No feature has the training state.
    If a feature needs the segment in progress, its caller passes it.
    """

    def __init__(self, settings: TorchSettings, data: TorchSources, state: TrainState) -> None:
        self.settings = settings  # with the context of this generation
        # From before ``setup`` to the end of the worker, these are the same objects.
        self.options, self.device = settings.options, settings.device
        self.warn_once = settings.warn_once
        self.data = data  # the loaders of ``register_data``, and how the workers partition them
        self.position = state.position  # the global step, epoch, and offset
        self.update, self.timing = state.update, state.timing
        self.features, self.features_with = state.features, state.features_with
        self.optimizers: list[torch.optim.Optimizer] = state.optimizers
        self.collectives = TorchCollectives(self.device)
        self.precision = PRECISIONS[self.options.use_fp16](self.device, self.options.amp_dtype)
        self.micro_batching = TorchMicroBatching(settings, self.update, lambda: self.models)
        self.refuse_split = self.micro_batching.refuse_split
        # `register` sets these, in this order. After ``setup``, `models` has wrappers of user code.
        self.scheduler_step_freq = self.options.scheduler_step_freq  # or that of a LightningModule
        self.num_criteria = 0  # criteria with trained parameters, which are the last of `models`
        self.schedulers: list[Any] = []
        self.models: list[torch.nn.Module] = []
        self.placement = StatePlacement()
        self.exchange = GradientExchange()
        self.accumulation_steps = 1
        self.baseline = SetupBaseline([], self.collectives)
        self.buffer_copies = BufferCopies([], self.collectives)
        self.criteria: list[Any] = []

    @property
    def given_models(self) -> list[torch.nn.Module]:
        """The models that the user registered as models, without criteria."""
        return self.models[: len(self.models) - self.num_criteria]

    @property
    def has_all_parameters(self) -> bool:
        """Whether every worker has all parameters."""
        return all(map(self.placement.is_unsharded, self.models))
