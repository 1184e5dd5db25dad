"""The training state of a PyTorch operator, and its random numbers."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.modules.lazy import LazyModuleMixin

from raysgd._internal.forwarding import forward_to
from raysgd._internal.nested import preserving
from raysgd._internal.step_timing import StepTiming
from raysgd.loop.state_placement import StatePlacement
from raysgd.loop.train_state import RandomGenerators, TrainState
from raysgd.torch.features.micro_batching import num_rows
from raysgd.torch.input.sources import TorchSources
from raysgd.torch.object_states import initial_options, rescale_options
from raysgd.torch.options import TorchSettings
from raysgd.torch.registered import RegisteredObjects
from raysgd.torch.tensors import copy_leaf


class TorchTrainState(TrainState):
    """The `RegisteredObjects`, which features use, and the segment in progress."""

    settings: TorchSettings
    data: TorchSources
    given_models: list[torch.nn.Module] = forward_to("registered.given_models")
    accumulation_steps: int = forward_to("registered.accumulation_steps")
    placement: StatePlacement = forward_to("registered.placement")

    def __init__(self, settings: TorchSettings) -> None:
        super().__init__(settings, seed=torch.initial_seed() % 2**62)
        self.data = TorchSources(settings, self.position.seed)
        if settings.device.type == "cuda":
            self.timing = StepTiming(functools.partial(torch.cuda.Event, enable_timing=True))
        self.registered = RegisteredObjects(settings, self.data, self)
        self.collectives = self.registered.collectives
        self.micro_batching = self.registered.micro_batching
        self.generators = TorchRandomGenerators()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        modules = (module for model in self.registered.models for module in model.modules())
        self.saved_modes = self.saved_modes or [(m, m.training) for m in modules]
        with super().evaluating():
            yield

    @contextlib.contextmanager
    def restoring_models(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(preserving(registered := self.registered))
            registered.buffer_copies.take()  # which the next line restores
            stack.callback(self.roll_back)
            for model in registered.models if registered.has_all_parameters else ():
                for module in (model, *model.modules()):  # the model may be a wrapper
                    if not isinstance(module, LazyModuleMixin):  # which the first batch completes
                        stack.enter_context(preserving(module))
            yield

    copy_leaf = staticmethod(copy_leaf)
    num_rows = staticmethod(num_rows)
    initial_options = initial_options
    rescale_options = rescale_options


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
