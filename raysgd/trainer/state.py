"""The state of a trainer: collect it from the workers, save it, and load it."""

from __future__ import annotations

import copy
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

from raysgd import checkpoint
from raysgd._internal.context import Request
from raysgd.callbacks.values import scalars, shown_config
from raysgd.checkpoint.file import OpenFile
from raysgd.checkpoint.location import Location
from raysgd.checkpoint.manifest import HashingFile
from raysgd.cluster.streams import Content, ReceivedFile, ReceivedValue, StorageError
from raysgd.elastic.call import Call, LoadRequest
from raysgd.elastic.snapshots import with_shards
from raysgd.loop.options import Options
from raysgd.loop.requests import ModelsRequest, RngStateRequest, SaveRequest, StateRequest
from raysgd.loop.state_schema import OF_DRIVER, check_state, for_workers, without_call
from raysgd.trainer.dispatcher import Dispatcher
from raysgd.trainer.fit import FitLoop

logger = logging.getLogger(__name__)


def _allows_own_types() -> bool:
    """Return whether ``torch.load`` allows types of the user, which workers may not know."""
    torch = sys.modules.get("torch")
    allowed = torch.serialization.get_safe_globals() if torch else ()
    types = [each[0] if isinstance(each, tuple) else each for each in allowed]
    return not all(each.__module__.startswith("torch.") for each in types)


@dataclass(eq=False)
class TrainerState:
    options: Options
    dispatcher: Dispatcher
    fit_loop: FitLoop

    # ---- methods of each framework

    def assemble(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with all shards merged."""
        return dict(state)

    def weights(self) -> Any:
        models = self.models("save_model")
        return models[0] if len(models) == 1 else models

    # ---- collection from the workers

    def collect(self, method: str = "state_dict") -> dict[str, Any]:
        """Return the state. Errors name the `method` that the user called."""
        with self.dispatcher.controller.speed.saving():
            of_driver = self._of_driver()
            return {**self._collect_from_workers(method), **of_driver}

    def _of_driver(self) -> dict[str, Any]:
        callbacks = self.dispatcher.callback_list.state_dict()
        parts = {"callbacks": callbacks} if callbacks else {}
        parts["config"] = scalars(shown_config(self.options.config))
        if self.fit_loop.lacks_validation:
            # Callbacks need these metrics in the next validation.
            parts["validation_due"] = scalars(self.dispatcher.metrics)
        return parts

    def _collect_from_workers(self, method: str) -> dict[str, Any]:
        controller, snapshot = self.dispatcher.controller, None
        with controller.alone():  # no other thread restarts the workers now
            if not controller.members and controller.can_restart():
                snapshot = controller.snapshots.state()
        if snapshot:
            # Copy the state, because it may be one that the user loaded.
            return copy.deepcopy(without_call(self.assemble(snapshot)))
        generators = self._generators(method)
        state = self.assemble(with_shards(self._fetch(StateRequest(), method)))
        state["data"]["rng"] = generators
        return state

    def models(self, method: str = "get_model") -> Any:
        self._generators(method)  # workers also compare their replicas
        return self._fetch(ModelsRequest(), method)[0]

    def _generators(self, method: str) -> list[Any]:
        request = RngStateRequest()
        return self.dispatcher.make(
            Call(request=request, method=method, max_losses=3, any_size=True)
        )

    def _fetch(
        self, request: Request, method: str, kind: Callable[..., Any] = ReceivedValue
    ) -> list[Any]:
        rank = None if self.dispatcher.controller.progress.is_sharded else 0
        call = Call(
            request=request, method=method, rank=rank, receives=kind, max_losses=3, any_size=True
        )
        return self.dispatcher.make(call)

    # ---- files

    def save(self, path: str | os.PathLike[str]) -> str:
        with self.dispatcher.controller.speed.saving():
            return self._save(path)

    def _save(self, path: str | os.PathLike[str]) -> str:
        self.dispatcher.check_open()
        target, controller = Location(path), self.dispatcher.controller
        manifest = checkpoint.Manifest(
            world_size=len(controller.members),
            operator=self.options.training_operator_cls.__qualname__,
        )
        if controller.progress.is_sharded or not controller.members or _allows_own_types():
            return checkpoint.write_file(self.collect("save"), target.name, manifest)
        of_driver, errors = self._of_driver(), []
        request = SaveRequest(
            of_driver=of_driver, generators=self._generators("save"), shown=target.shown
        )

        def fill(file: IO[bytes]) -> None:
            hashing: Any = HashingFile(file)
            try:
                kind = functools.partial(ReceivedFile, hashing)
                (answer,) = self._fetch(request, "save", kind)
            except StorageError as error:
                raise error.args[0] from None
            except Exception as error:
                errors.append(error)
                raise
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, Content):  # of a worker in this process
                answer.write(hashing)
            hashing.seal(replace(manifest, **answer.facts))

        return target.write(fill, unchanged=errors)

    def save_model(self, path: str | os.PathLike[str]) -> str:
        return checkpoint.save_model(self.weights(), path)

    # ---- loading

    def load_file(self, path: str | os.PathLike[str]) -> None:
        self.dispatcher.check_open(moves=True)
        file = OpenFile(path)
        self.load(file.read(), again=file.read)

    def load(self, state: Mapping[str, Any], again: Callable[[], Any] | None = None) -> None:
        """Load a state. `again` reads it from a file, so that it need not be kept."""
        self.dispatcher.check_open(moves=True)
        check_state(state)
        of_driver = {key: state.get(key, {}) for key in OF_DRIVER}
        of_workers = for_workers(state)
        with self.dispatcher.callback_list.loading(copy.deepcopy(of_driver["callbacks"])):
            call = Call(request=LoadRequest(state=of_workers), max_losses=3)
            self.dispatcher.make(call, moves=True)
        snapshots = self.dispatcher.controller.snapshots
        if again is not None:
            snapshots.keep(lambda: for_workers(again()))
        elif any(member.remote for member in self.dispatcher.controller.members):
            snapshots.store(of_workers)
        else:  # packing needs Ray
            snapshots.keep(lambda: of_workers)
        self.dispatcher.latest.update(of_driver["validation_due"])
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
