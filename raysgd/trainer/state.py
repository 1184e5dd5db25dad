"""The state of a trainer: collect it from the workers, save it, and load it."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysgd import checkpoint
from raysgd.callbacks.values import scalars, shown_config
from raysgd.checkpoint.location import Location
from raysgd.elastic.call import Call, LoadRequest
from raysgd.elastic.snapshots import with_shares
from raysgd.errors import CheckpointError, WorkerLostError
from raysgd.loop.options import Options
from raysgd.loop.requests import ModelsRequest, RngStateRequest, StateRequest
from raysgd.trainer.calls import Calls
from raysgd.trainer.fit import FitLoop

logger = logging.getLogger(__name__)

_OF_CALL = ("call", "batching", "flags")
"""Keys of a snapshot that a state lacks: the unfinished call, and changes to loaders and models."""


@dataclass(eq=False)
class TrainerState:
    options: Options
    calls: Calls
    fit_loop: FitLoop

    # ---- methods of each framework

    def assemble(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with all shards merged."""
        return dict(state)

    def weights(self) -> Any:
        models = self.models()
        return models[0] if len(models) == 1 else models

    # ---- collection from the workers

    def collect(self, own: bool) -> dict[str, Any]:
        """Return the state. With `own`, the caller may change its tensors and arrays."""
        callbacks = self.calls.callback_list.state_dict()
        state = self._collect_from_workers(own)
        if callbacks:
            state["callbacks"] = callbacks
        state["config"] = scalars(shown_config(self.options.config))
        if self.fit_loop.lacks_validation:
            # Callbacks need these metrics in the next validation.
            state["validation_due"] = scalars(self.calls.metrics)
        return state

    def _collect_from_workers(self, own: bool) -> dict[str, Any]:
        controller = self.calls.controller
        with controller.alone():  # no other thread restarts the workers now
            snapshot = None if controller.members else controller.snapshots.state()
        if snapshot:
            at, now = snapshot.get("global_step", 0), controller.progress.global_step
            if at < now and not controller.policy.keeps_snapshots:
                raise WorkerLostError(
                    f"All workers are lost, and with them steps {at + 1} to {now}. There is no "
                    "snapshot of them (snapshot_every=None). Load a checkpoint to continue."
                )
            # Copy the state, because it may be one that the user loaded.
            state = self.assemble(snapshot)
            return copy.deepcopy(
                {key: value for key, value in state.items() if key not in _OF_CALL}
            )
        generators = self.calls.make(Call(request=RngStateRequest(), max_losses=3, any_size=True))
        rank = None if controller.progress.divided else 0
        call = Call(request=StateRequest(), rank=rank, max_losses=3, any_size=True)
        state = self.assemble(with_shares(self.calls.make(call, own=own)))
        state["data"]["rng"] = generators
        return state

    def models(self) -> Any:
        rank = None if self.calls.controller.progress.divided else 0
        call = Call(request=ModelsRequest(), rank=rank, max_losses=3, any_size=True)
        return self.calls.make(call)[0]

    # ---- files

    def save(self, path: str | os.PathLike[str]) -> str:
        self.calls.check_open()
        target = Location(path)
        state = self.collect(own=False)
        name = self.options.training_operator_cls.__qualname__
        num_workers = len(self.calls.controller.members)
        manifest = checkpoint.Manifest(world_size=num_workers, operator=name)
        return checkpoint.write_file(state, target.name, manifest)

    def save_model(self, path: str | os.PathLike[str]) -> str:
        self.calls.check_open()
        return checkpoint.save_model(self.weights(), path)

    def read(self, path: str | os.PathLike[str]) -> Mapping[str, Any]:
        self.calls.check_open(moves=True)
        return checkpoint.read_file(path)

    # ---- loading

    def load(self, state: Mapping[str, Any]) -> None:
        self.calls.check_open(moves=True)
        missing = [
            key
            for key in ("models", "optimizers", "epoch")
            if not isinstance(state, Mapping) or key not in state
        ]
        if missing:
            raise CheckpointError(f"This is not a trainer state: it lacks {', '.join(missing)}.")
        of_driver = {key: state.get(key, {}) for key in ("callbacks", "config", "validation_due")}
        for key, value in of_driver.items():
            if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
                raise CheckpointError(f"state[{key!r}] must be a dict, but it is {value!r}.")
        # Ignore the unfinished call in a snapshot of another run.
        of_workers = {key: v for key, v in state.items() if key not in (*of_driver, *_OF_CALL)}
        with self.calls.callback_list.loading(copy.deepcopy(of_driver["callbacks"])):
            call = Call(request=LoadRequest(state=of_workers), max_losses=3)
            self.calls.make(call, moves=True)
        snapshots = self.calls.controller.snapshots
        is_local = not any(member.remote for member in self.calls.controller.members)
        keep = snapshots.set if is_local else snapshots.store  # packing needs Ray
        keep(of_workers)
        self.calls.latest.update(of_driver["validation_due"])
        # An empty dict counts too: the state was saved before any metric.
        self.fit_loop.note_owed("validation_due" in state)
        self._warn_of_changes(of_driver["config"])

    def _warn_of_changes(self, saved: Mapping[str, Any]) -> None:
        own = scalars(shown_config(self.options.config))
        changed = [
            f"{name} {saved[name]!r} → {own[name]!r}"
            for name in own
            if name in saved and saved[name] != own[name]
        ]
        if changed:
            logger.warning(
                "The config differs from that of the checkpoint: %s. Optimizers and schedulers "
                "keep the values of the checkpoint, such as learning rates.",
                ", ".join(changed),
            )
