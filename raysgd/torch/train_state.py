"""The training state of a PyTorch operator."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from raysgd._internal.nested import load_or_restore
from raysgd.cluster.large_values import Incoming
from raysgd.errors import CheckpointError
from raysgd.loop.state_schema import check_objects
from raysgd.torch import collectives
from raysgd.torch.features.averaging import Averaging
from raysgd.torch.features.micro_batching import TorchMicroBatching, num_rows
from raysgd.torch.features.schedules import Schedules
from raysgd.torch.features.step_checks import StepChecks
from raysgd.torch.features.untracked import Untracked
from raysgd.torch.frozen import KEY, complete, without
from raysgd.torch.optimization import Optimization
from raysgd.torch.options import OperatorSettings
from raysgd.torch.precision import PRECISIONS
from raysgd.torch.registered_state import RegisteredState
from raysgd.torch.strategies import ddp
from raysgd.torch.tensors import (
    copy_leaf,
    copy_to_cpu,
    load_optimizer,
    optimizer_state,
    parameters_of,
    reuse_memory,
    state_problem,
    version_of,
)


class TorchTrainState(RegisteredState):
    """The features of a PyTorch operator, and its state for checkpoints and new workers."""

    def __init__(self, settings: OperatorSettings) -> None:
        super().__init__(settings)
        options = settings.options
        precision = PRECISIONS[options.use_fp16](settings.device, options.amp_dtype)
        self.micro_batching: TorchMicroBatching = TorchMicroBatching(self)
        self.untracked = Untracked(self)
        self.set_features([self.micro_batching, self.untracked])  # `register` adds the others
        self.checks = StepChecks(self, precision)
        self.optimization = Optimization(self, precision, self.checks)
        self.schedules = Schedules(self, self.checks.check_complete)
        self.averaging = Averaging(self)

    # ---- the other workers

    def copy_training_state(self, leader_rank: int, follows: bool) -> None:
        """Load the state of the leader if this rank `follows`. Every rank must call it.

        Parameters and optimizer states are sent only if they differ. After a worker loss, the other
        workers usually differ only in buffers.
        """
        device, lacks = self.settings.device, follows
        # Do not read a large state if no other worker can have it.
        if self.collectives.is_any(follows and not self.is_new):
            state = without(self.training_state(), self._unchanged_digests())
            for index, model in enumerate(map(ddp.plain, self.models)):
                buffers, of_model = dict(model.named_buffers()), state["models"][index]
                state["models"][index] = {k: v for k, v in of_model.items() if k not in buffers}
            own = collectives.fingerprint((self.global_step, state))
            expected = collectives.broadcast_object(own, leader_rank)
            lacks = follows and own != expected
        if self.collectives.is_any(lacks):
            self.compare_setup(leader_rank)
            state = collectives.broadcast_state(
                lambda: self.without_frozen(self.training_state(), True), leader_rank, device, lacks
            )
        # Receive shards last, because they are valid from then on.
        received = [feature.receive(leader_rank) for feature in reversed(self.features)][::-1]
        # Apply the state only if all of it has arrived: the leader may be lost meanwhile.
        if lacks:
            self._load(state)
        for apply in received if follows else ():
            apply()

    def compare_setup(self, leader_rank: int) -> None:
        own = self._unchanged_digests()
        pairs = zip(self.collectives.broadcast(lambda: own, leader_rank), own, strict=True)
        has_all = all(leaders.items() <= mine.items() for leaders, mine in pairs)
        self.frozen.are_reproducible = self.collectives.minimum(has_all) > 0

    def _unchanged_digests(self) -> list[dict[str, int]]:
        self.frozen.forget()
        return self.frozen.digests_of_unchanged(list(map(ddp.plain, self.models)))

    # ---- state

    def without_frozen(self, state: dict[str, Any], for_workers: bool) -> dict[str, Any]:
        if for_workers:
            known = self.frozen.digests_of_unchanged(list(map(ddp.plain, self.models)))
            return without(state, known if self.frozen.are_reproducible else [])
        digests = self._unchanged_digests()
        changed = [
            f"{name} of model {index}"
            for index, (model, kept) in enumerate(zip(self.models, digests, strict=False))
            for name, parameter in ddp.plain(model).named_parameters()
            if not (parameter.requires_grad or name in kept)
        ]
        if changed:
            self.settings.warn_once(
                "frozen",
                "frozen=False: %s is saved, although it is frozen, because it has changed since "
                "setup, or was frozen after it.",
                changed[0],
            )
        return without(state, digests)

    def unsharded_models(self) -> list[torch.nn.Module]:
        self.check_undamaged()
        if (copies := self.replication.export_models(len(self.given_models))) is not None:
            return copies
        if self.context.world_rank != 0:
            return []
        with self.evaluating():
            return [copy_to_cpu(ddp.plain(model)) for model in self.given_models]

    def copy_leaf(self, leaf: Any, on_host: bool = False, may_alias: bool = False) -> Any:
        return copy_leaf(leaf, on_host, may_alias)

    def num_rows(self, batch: Any) -> int:
        return num_rows(batch)

    def user_settings(self) -> Any:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return (
            [str({k: v for k, v in group.items() if k != "params"}) for group in groups],
            [version_of(parameter) for model in self.models for parameter in model.parameters()],
            [feature.user_settings() for feature in self.features],
            self._changed_since_setup(),
        )

    def module_modes(self) -> Any:
        return [[m.training for m in model.modules()] for model in map(ddp.plain, self.models)]

    def set_module_modes(self, modes: Any) -> None:
        for model, own in zip(map(ddp.plain, self.models), modes, strict=True):
            for module, training in zip(model.modules(), own, strict=True):
                module.training = training

    def training_state(self) -> dict[str, Any]:
        models = [(model, model.state_dict()) for model in map(ddp.plain, self.models)]
        state: dict[str, Any] = {
            "models": list(itertools.starmap(self._unsharded_part, models)),
            "optimizers": list(map(optimizer_state, self.optimizers)),
        }
        if self.not_finite:
            state["not_finite"] = self.not_finite
        if self.schedulers:
            state["schedulers"] = [scheduler.state_dict() for scheduler in self.schedulers]
        state["requires_grad"] = self._changed_since_setup()
        for feature in self.features:
            state |= feature.state_dict()
        return state | {"parameters": list(map(self._parameters_of, self.optimizers))}

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> dict[str, list[int]]:
        """Return name and shape of each parameter of an optimizer, in the order of its state."""
        names: dict[Any, str] = {}
        for index, model in enumerate(map(ddp.plain, self.models)):
            for name, parameter in model.named_parameters():
                names.setdefault(parameter, f"models[{index}].{name}")
        parameters = enumerate(parameters_of(optimizer))
        return {names.get(each, f"number {n}"): list(each.shape) for n, each in parameters}

    def _order_problem(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> str:
        pairs = itertools.zip_longest(self._parameters_of(optimizer).items(), saved.items())
        for own, then in pairs:
            if own != then:
                return (
                    f"its next parameter was {then} (name and shape), and is {own} now. Pass the "
                    "same parameters in the same order. If you renamed them on purpose, also "
                    "delete state['parameters']"
                )
        return ""

    def _changed_since_setup(self) -> list[dict[str, bool]]:
        """Return which parameters user code has frozen or thawed after ``setup``, by model."""
        pairs = zip(self.models, self.trained_at_first, strict=False)
        return [
            dict(ddp.required_gradients(ddp.plain(model)).items() - first.items())
            for model, first in pairs
        ]

    def _unsharded_part(self, model: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a model's state that every worker has."""
        if self.replication.is_unsharded(model):
            return state
        sharded = dict(model.named_parameters(remove_duplicate=False))
        return {key: value for key, value in state.items() if key not in sharded}

    def check_training_state(self, state: dict[str, Any]) -> None:
        state = complete(state, self._unchanged_digests(), list(map(ddp.plain, self.models)))
        for name, objects, saved in self._stateful(state):
            check_objects(name, objects, saved, state_problem)
        if "parameters" in state:  # older files lack it
            check_objects("optimizers", self.optimizers, state["parameters"], self._order_problem)
        if state.get("schedulers") and not self.schedulers:
            self.settings.warn_once(
                "schedulers",
                "The loaded state has schedulers, which are ignored because the operator has none.",
            )
        if not all(isinstance(each, Mapping) for each in state.get("requires_grad", ())):
            raise CheckpointError(
                "The state's 'requires_grad' must be a list of dicts from the names of parameters."
            )
        for feature in self.features:
            feature.check_state(state)

    def reuse_memory(self, state: dict[str, Any], incoming: Incoming) -> dict[str, Any]:
        own = self.training_state()
        tensors = {key: own[key] for key in ("optimizers", "models")}
        return dict(reuse_memory(state, tensors, incoming))

    def load_training_state(self, state: dict[str, Any]) -> None:
        self._load(self.replication.unsharded_state(state))
        self.replication.load(state)

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
                    if kind == "optimizers":
                        load = functools.partial(load_optimizer, each, is_exact=keeps_dtypes)
                        own = optimizer_state(each)
                    elif kind == "models" and (
                        KEY in state or not self.replication.is_unsharded(each)
                    ):
                        load = functools.partial(each.load_state_dict, strict=False)
                        own, saved = (self._unsharded_part(each, state) for state in (own, saved))
                    place = f"{kind}[{index}]"
                    undoing.enter_context(load_or_restore(each, own, saved, place, load))
        changed = state.get("requires_grad", ())  # older files lack it
        for model, first, now in zip(self.models, self.trained_at_first, changed, strict=False):
            ddp.require_gradients(ddp.plain(model), {**first, **now})
        for feature in self.features:
            feature.load_state_dict(state)
        self.transaction.is_damaged = False

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
