"""The training state of a PyTorch operator."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from raysgd._internal.nested import loading
from raysgd.loop.state_schema import check_objects
from raysgd.torch import collectives, ddp
from raysgd.torch.features.averaging import Averaging
from raysgd.torch.features.equal_bits import EqualBitsMicroBatching, EqualBitsTransaction
from raysgd.torch.features.micro_batching import TorchMicroBatching, num_rows
from raysgd.torch.features.schedules import Schedules
from raysgd.torch.features.step_checks import StepChecks
from raysgd.torch.features.untracked import Untracked
from raysgd.torch.optimization import Optimization
from raysgd.torch.precision import create_precision
from raysgd.torch.registered_state import OperatorSettings, RegisteredState
from raysgd.torch.tensors import (
    Places,
    copy_leaf,
    copy_to_cpu,
    load_optimizer,
    state_problem,
    to_cpu,
    version_of,
)


class TorchTrainState(RegisteredState):
    """The features of a PyTorch operator, and its state for checkpoints and new workers."""

    def __init__(self, settings: OperatorSettings) -> None:
        super().__init__(settings)
        options = settings.options
        if options.num_shards is not None:
            self.transaction = EqualBitsTransaction()
        precision = create_precision(options.use_fp16, settings.device, options.amp_dtype)
        kind = TorchMicroBatching if options.num_shards is None else EqualBitsMicroBatching
        self.micro_batching: TorchMicroBatching = kind(self)
        self.untracked = Untracked(self)
        self.features = [self.micro_batching, self.untracked]  # `register` adds the others
        self.checks = StepChecks(self, precision)
        self.optimization = Optimization(self, precision, self.checks)
        self.schedules = Schedules(self, self.checks.check_complete)
        self.averaging = Averaging(self)

    # ---- the other workers

    def copy_training_state(self, leader: int, follows: bool) -> None:
        """Load the state of rank `leader` if this rank `follows`. Every rank must call it.

        Parameters and optimizer states are sent only if they differ. After a worker loss, the other
        workers usually differ only in buffers.
        """
        device, lacks = self.settings.device, follows
        # Do not read a large state if no other worker can have it.
        if self.minimum(-int(follows and not self.is_new)) < 0:
            state = self.training_state()
            for index, model in enumerate(map(ddp.plain, self.models)):
                buffers, of_model = dict(model.named_buffers()), state["models"][index]
                state["models"][index] = {k: v for k, v in of_model.items() if k not in buffers}
            own = collectives.fingerprint((self.global_step, state))
            expected = collectives.broadcast_object(own, leader)
            lacks = follows and own != expected
        if self.minimum(-int(lacks)) < 0:
            state = collectives.broadcast_state(self.training_state, leader, device, lacks)
        # Receive shards last, because they are valid from then on.
        received = [feature.receive(leader) for feature in reversed(self.features)][::-1]
        # Apply the state only if all of it has arrived: `leader` may be lost meanwhile.
        if lacks:
            self._load(state)
        for apply in received if follows else ():
            apply()

    # ---- state

    def whole_models(self) -> list[torch.nn.Module]:
        """Return copies of the models on the CPU. If models are sharded, only rank 0 gets any."""
        if (full := self.fully_sharded) is not None:
            return full.copies(len(self.given_models))
        if self.sharded_features and self.context.world_rank != 0:
            return []
        with self.evaluating():
            return [copy_to_cpu(ddp.plain(model)) for model in self.given_models]

    def copy_leaf(self, leaf: Any, on_host: bool = False) -> Any:
        return copy_leaf(leaf, on_host)

    def num_rows(self, batch: Any) -> int:
        return num_rows(batch)

    def to_cpu(self, state: Any) -> Any:
        # No copy is needed for another process, because pickling copies the state.
        return to_cpu(state, shares=not self.context.in_driver)

    def user_settings(self) -> Any:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return (
            [str({k: v for k, v in group.items() if k != "params"}) for group in groups],
            [version_of(parameter) for model in self.models for parameter in model.parameters()],
            [feature.user_settings() for feature in self.features],
        )

    def flags(self) -> Any:
        return [
            ([p.requires_grad for p in model.parameters()], [m.training for m in model.modules()])
            for model in map(ddp.plain, self.models)
        ]

    def set_flags(self, flags: Any) -> None:
        for model, (required, modes) in zip(map(ddp.plain, self.models), flags, strict=True):
            for parameter, requires_grad in zip(model.parameters(), required, strict=True):
                parameter.requires_grad_(requires_grad)
            for module, training in zip(model.modules(), modes, strict=True):
                module.training = training

    def training_state(self) -> dict[str, Any]:
        models = [ddp.plain(model).state_dict() for model in self.models]
        state: dict[str, Any] = {
            "models": list(map(self._without_shards, models, itertools.count())),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        if self.schedulers:
            state["schedulers"] = [scheduler.state_dict() for scheduler in self.schedulers]
        for feature in self.features:
            state |= feature.state_dict()
        return state

    def _without_shards(self, state: Mapping[str, Any], index: int) -> Mapping[str, Any]:
        """Return the state of a model without sharded parameters."""
        if (full := self.fully_sharded) is None:
            return state
        return {k: value for k, value in state.items() if k not in full.parameter_names[index]}

    def check_training_state(self, state: dict[str, Any]) -> None:
        for name, objects, saved in self._stateful(state):
            check_objects(name, objects, saved, state_problem)
        if state.get("schedulers") and not self.schedulers:
            self.settings.warn_once(
                "schedulers",
                "The loaded state has schedulers, which are ignored because the operator has none.",
            )
        for feature in self.features:
            feature.check_state(state)

    def places_of(
        self, state: dict[str, Any], addresses: set[int]
    ) -> tuple[dict[str, Any], dict[int, Any]]:
        if self.sharded_features:
            return state, {}
        places, own = Places(addresses), self.training_state()
        adopted = {key: places.adopt(state[key], own[key]) for key in ("optimizers", "models")}
        return state | adopted, places.memory

    def load_training_state(self, state: dict[str, Any]) -> None:
        shared: Mapping[str, Any] = state
        for feature in self.sharded_features:
            shared = feature.without_shards(shared)
        self._load(shared)
        for feature in self.sharded_features:
            feature.load_shards(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        stateful = self._stateful(state)
        _, models, of_models = stateful[0]
        keeps_dtypes = all(
            tensor.dtype == saved[name].dtype
            for model, saved in zip(models, of_models, strict=True)
            for name, tensor in model.named_parameters()
            if name in saved
        )
        with contextlib.ExitStack() as undoing:
            # Load models last, because loading changes their tensors in place.
            for kind, objects, states in reversed(stateful):
                for index, (each, saved) in enumerate(zip(objects, states, strict=True)):
                    load, own = None, each.state_dict()
                    if kind == "optimizers" and keeps_dtypes:
                        load = functools.partial(load_optimizer, each)
                    elif kind == "models" and self.fully_sharded is not None:
                        load = functools.partial(each.load_state_dict, strict=False)
                        own, saved = (self._without_shards(s, index) for s in (own, saved))
                    place = f"{kind}[{index}]"
                    undoing.enter_context(loading(each, own, saved, place, load))
        for feature in self.features:
            feature.load_state_dict(state)
        self.transaction.is_partial = False

    def _stateful(self, state: Mapping[str, Any]) -> list[tuple[str, list[Any], Any]]:
        """Return the registered objects of each kind, and their states in `state`."""
        models, saved = [ddp.plain(model) for model in self.models], state.get("models", [])
        if self.num_criteria and isinstance(saved, list | tuple):
            # Older files lack the criterion.
            models = models[: max(len(saved), len(models) - self.num_criteria)]
        kinds: list[tuple[str, list[Any], Any]] = [
            ("models", models, saved),
            ("optimizers", self.optimizers, state.get("optimizers", [])),
        ]
        if self.schedulers:
            kinds.append(("schedulers", self.schedulers, state.get("schedulers", [])))
        return kinds
