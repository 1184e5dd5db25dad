"""What is saved of a PyTorch operator, and sent to new workers."""

import contextlib
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from raysgd._internal.nested import load_or_restore, map_leaves
from raysgd.cluster.large_values import IncomingValue
from raysgd.errors import CheckpointError
from raysgd.loop.state_access import StateAccess, check_objects
from raysgd.torch.features.frozen_parameters import FROZEN_KEY
from raysgd.torch.modules import grad_flags, set_grad_flags, user_module
from raysgd.torch.object_states import (
    load_optimizer,
    load_scheduler,
    optimizer_state,
    reuse_memory,
    scheduler_state,
    state_problem,
)
from raysgd.torch.tensors import copy_to_cpu, parameters_of, state_digest, version_of
from raysgd.torch.train_state import TorchTrainState

_SAVES_FROZEN = (
    "frozen=False: %s of model %d is saved, although it is frozen, because it has changed since "
    "setup, or was frozen after it."
)


class TorchStateAccess(StateAccess):
    """Reads and loads the registered objects, when ``setup`` has ended."""

    _train_state: TorchTrainState

    def __init__(self, train_state: TorchTrainState) -> None:
        super().__init__(train_state)
        self._train_state = train_state
        self._frozen_parameters = self._train_state.frozen_parameters
        self._initially_trained = list(map(grad_flags, self._models))
        """By model and name, whether ``setup`` has left a parameter trainable."""

    @property
    def _models(self) -> list[torch.nn.Module]:
        """The models without wrappers."""
        return list(map(user_module, self._train_state.models))

    def read(self, frozen: bool = True) -> dict[str, Any]:
        models = [(model, model.state_dict()) for model in self._models]
        state: dict[str, Any] = {
            "models": list(itertools.starmap(self._unsharded_of, models)),
            "optimizers": list(map(optimizer_state, self._train_state.optimizers)),
        }
        if self._train_state.schedulers:
            state["schedulers"] = list(map(scheduler_state, self._train_state.schedulers))
        state["requires_grad"] = self._changed_since_setup()
        for feature in self._train_state.features:
            state |= feature.state_dict()
        state["parameters"] = list(map(self._names_and_shapes, self._train_state.optimizers))
        if frozen:
            return state
        state = self._frozen_parameters.remove_unchanged(state)
        removed = state.get(FROZEN_KEY, itertools.repeat(()))
        for index, (model, names) in enumerate(zip(self._models, removed, strict=False)):
            for name, parameter in model.named_parameters():
                if not (parameter.requires_grad or name in names):
                    self._train_state.settings.warn_once("frozen", _SAVES_FROZEN, name, index)
        return state

    def read_for_workers(self) -> dict[str, Any]:
        return self._frozen_parameters.remove_unchanged(self.read(), for_workers=True)

    def check(self, state: dict[str, Any]) -> None:
        state = self._frozen_parameters.complete(state)
        for name, objects, saved in self._objects_and_states(state):
            check_objects(name, objects, saved, state_problem)
        if "parameters" in state:  # older files lack it
            parameters, optimizers = state["parameters"], self._train_state.optimizers
            check_objects("optimizers", optimizers, parameters, self._order_problem)
        if state.get("schedulers") and not self._train_state.schedulers:
            self._train_state.settings.warn_once(
                "schedulers",
                "The loaded state has schedulers, which are ignored because the operator has none.",
            )
        if not all(isinstance(each, Mapping) for each in state.get("requires_grad", ())):
            raise CheckpointError(
                "The state's 'requires_grad' must be a list of dicts from the names of parameters."
            )
        for feature in self._train_state.features:
            feature.check_state(state)

    def load(self, state: dict[str, Any]) -> None:
        kinds = self._objects_and_states(state)
        _, models, of_models = kinds[0]
        keeps_dtypes = all(
            tensor.dtype == saved[name].dtype
            for model, saved in zip(models, of_models, strict=True)
            for name, tensor in model.named_parameters()
            if name in saved
        )
        with contextlib.ExitStack() as undoing:
            # Load models last, because loading changes their tensors in place.
            for kind, objects, states in reversed(kinds):
                for index, (each, saved) in enumerate(zip(objects, states, strict=True)):
                    load, old = None, each.state_dict()
                    if kind == "optimizers":
                        load = functools.partial(load_optimizer, each, is_exact=keeps_dtypes)
                        old = optimizer_state(each)
                        if not self._train_state.placement.is_unsharded(each):
                            saved = {**saved, "state": {}}  # whose shards are loaded later
                    elif kind == "schedulers":
                        load = functools.partial(load_scheduler, each)
                        old = scheduler_state(each)
                    elif FROZEN_KEY in state or not self._train_state.placement.is_unsharded(each):
                        load = functools.partial(each.load_state_dict, strict=False)
                        old, saved = (self._unsharded_of(each, state) for state in (old, saved))
                    name = f"{kind}[{index}]"
                    undoing.enter_context(load_or_restore(each, old, saved, name, load))
        changed = state.get("requires_grad", ())  # older files lack it
        for model, first, now in zip(self._models, self._initially_trained, changed, strict=False):
            set_grad_flags(model, {**first, **now})
        for feature in self._train_state.features:
            feature.load_state_dict(state)

    def copy_from(self, leader_rank: int, follows: bool) -> None:
        """Load the state of the leader if this rank `follows`. Every rank must call it.

        Parameters and optimizer states are sent only if they differ. After a worker loss, the other
        workers usually differ only in buffers.
        """
        train_state, lacks = self._train_state, follows
        group = self._train_state.collectives
        # Do not read a large state if no other worker can have it.
        if group.any_rank(follows and not train_state.lacks_state):
            state = self._frozen_parameters.remove_unchanged(self.read())
            for index, model in enumerate(self._models):
                buffers, of_model = dict(model.named_buffers()), state["models"][index]
                state["models"][index] = {k: v for k, v in of_model.items() if k not in buffers}
            digest = state_digest((train_state.position.global_step, state))
            expected = group.broadcast(lambda: digest, leader_rank)
            lacks = follows and digest != expected
        if group.any_rank(lacks):
            self._frozen_parameters.sync_initial_state(leader_rank)
            state = group.broadcast(self.read_for_workers, leader_rank, wanted=lacks)
        # Receive shards last: they are valid from then on. Apply in the order of hooks.
        features = reversed(self._train_state.features)
        received = [feature.receive(leader_rank) for feature in features][::-1]
        # Apply the state only if all of it has arrived: the leader may be lost meanwhile.
        if lacks:
            self.load(state)
        for apply in received if follows else ():
            apply()

    def unsharded_models(self, only_weights: bool = False) -> list[torch.nn.Module]:
        train_state, num_models = self._train_state, len(self._train_state.registered_models)
        train_state.check_undamaged()
        if (copies := self._train_state.placement.export_models(num_models)) is not None:
            return copies
        if train_state.context.world_rank != 0:
            return []
        with train_state.evaluating():
            return list(map(copy_to_cpu, self._models[:num_models]))

    def user_settings(self) -> Any:
        groups = [group for each in self._train_state.optimizers for group in each.param_groups]
        states = [feature.state_dict() for feature in self._train_state.features]
        return (
            [str({k: v for k, v in group.items() if k != "params"}) for group in groups],
            [version_of(parameter) for model in self._models for parameter in model.parameters()],
            map_leaves(states, lambda leaf: id(leaf) if isinstance(leaf, torch.Tensor) else leaf),
            self._changed_since_setup(),
        )

    def module_modes(self) -> Any:
        before = dict(self._train_state.saved_modes)
        return [[before.get(m, m.training) for m in model.modules()] for model in self._models]

    def set_module_modes(self, modes: Any) -> None:
        for model, of_model in zip(self._models, modes, strict=True):
            for module, training in zip(model.modules(), of_model, strict=True):
                module.training = training

    def reuse_memory(self, state: dict[str, Any], incoming: IncomingValue) -> dict[str, Any]:
        current = self.read()
        tensors = {key: current[key] for key in ("optimizers", "models")}
        return dict(reuse_memory(state, tensors, incoming))

    # ---- helpers

    def _objects_and_states(self, state: Mapping[str, Any]) -> list[tuple[str, list[Any], Any]]:
        """Return the registered objects of each kind, and their states in `state`."""
        models, saved = self._models, state.get("models", [])
        if self._train_state.num_trained_criteria and isinstance(saved, list | tuple):
            # Older files lack the criterion.
            models = models[: max(len(saved), len(self._train_state.registered_models))]
        kinds: list[tuple[str, list[Any], Any]] = [
            ("models", models, saved),
            ("optimizers", self._train_state.optimizers, state.get("optimizers", [])),
        ]
        if self._train_state.schedulers:
            kinds.append(("schedulers", self._train_state.schedulers, state.get("schedulers", [])))
        return kinds

    def _unsharded_of(self, model: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entries of a model's state that every worker has."""
        if self._train_state.placement.is_unsharded(model):
            return state
        sharded = dict(model.named_parameters(remove_duplicate=False))
        return {key: value for key, value in state.items() if key not in sharded}

    def _changed_since_setup(self) -> list[dict[str, bool]]:
        """Return which parameters user code has frozen or thawed after ``setup``, by model."""
        pairs = zip(self._models, self._initially_trained, strict=True)
        return [
            {k: v for k, v in grad_flags(model).items() if v != first.get(k)}
            for model, first in pairs
        ]

    def _names_and_shapes(self, optimizer: torch.optim.Optimizer) -> dict[str, list[int]]:
        """Return name and shape of each parameter of an optimizer, in the order of its state."""
        names: dict[Any, str] = {}
        for index, model in enumerate(self._models):
            for name, parameter in model.named_parameters():
                names.setdefault(parameter, f"models[{index}].{name}")
        parameters = enumerate(parameters_of(optimizer))
        return {names.get(each, f"number {n}"): list(each.shape) for n, each in parameters}

    def _order_problem(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> str:
        pairs = itertools.zip_longest(self._names_and_shapes(optimizer).items(), saved.items())
        for now, then in pairs:
            if now != then:
                return (
                    f"its next parameter was {then} (name and shape), and is {now} now. Pass the "
                    "same parameters in the same order. If you renamed them on purpose, also "
                    "delete state['parameters']"
                )
        return ""
