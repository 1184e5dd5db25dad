"""Collect the state of a trainer from the workers, save it, and load it."""

import copy
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import IO, Any

from raysgd import checkpoint
from raysgd._internal.arguments import check_flags
from raysgd._internal.nested import map_leaves, try_copy
from raysgd._internal.provenance import process_provenance, without_homes
from raysgd._internal.runner import Request
from raysgd._internal.values import flatten_scalars, redact_config
from raysgd.checkpoint.file import CheckpointFile
from raysgd.checkpoint.location import Location
from raysgd.checkpoint.manifest import HashingFile
from raysgd.checkpoint.shards import collect_shards, merge_shards
from raysgd.checkpoint.weights import check_suffix
from raysgd.cluster.large_values import Inbox, StorageError
from raysgd.driver.dispatcher import Dispatcher
from raysgd.elastic.call import LoadRequest
from raysgd.errors import CheckpointError, WorkerLostError
from raysgd.loop.options import Options
from raysgd.loop.requests import ModelsRequest, PrepareExportRequest, SaveRequest, StateRequest
from raysgd.loop.state_dict import DRIVER_KEYS, check_state, entries_for_workers, without_call

logger = logging.getLogger(__name__)


def _allows_user_types() -> bool:
    """Return whether ``torch.load`` allows types of the user, which workers may not know."""
    torch = sys.modules.get("torch")
    allowed = torch.serialization.get_safe_globals() if torch else ()
    types = [each[0] if isinstance(each, tuple) else each for each in allowed]
    return not all(each.__module__.startswith("torch.") for each in types)


@dataclass(eq=False)
class StateTransfer:
    """Collects the state of a trainer from its workers, saves it, and loads it."""

    options: Options
    dispatcher: Dispatcher
    provenance: Mapping[str, Any] = field(default_factory=process_provenance)
    """Where the state comes from. Read early, because the files of the script may change later."""

    # ---- collection from the workers

    def collect(self, frozen: bool) -> dict[str, Any]:
        with self.dispatcher.controller.speed.saving():
            driver_entries = self._driver_entries()
            return {**self._collect_from_workers("state_dict", frozen), **driver_entries}

    def _driver_entries(self, provenance: bool = True) -> dict[str, Any]:
        callbacks = self.dispatcher.callback_list.state_dict()
        entries = {"callbacks": callbacks} if callbacks else {}
        entries["config"] = flatten_scalars(redact_config(self.options.config))
        if provenance:
            entries["provenance"] = {**self.provenance}
        return entries | self.dispatcher.reporter.state_dict()

    def _collect_from_workers(self, method: str, frozen: bool) -> dict[str, Any]:
        controller, snapshot = self.dispatcher.controller, None
        if not controller.members and controller.can_restart():
            snapshot = controller.snapshots.load()
        step = self.dispatcher.reporter.position.global_step
        kept_step = (snapshot or {}).get("global_step", 0)
        lacks_frozen = frozen and "frozen" in (snapshot or ())  # which the workers can complete
        if not snapshot or kept_step < step or lacks_frozen:
            try:  # new workers repeat the steps after the snapshot
                generators = self._prepare_export(method)
                states = self._fetch(StateRequest(frozen=frozen), method)
                state = merge_shards(collect_shards(states))
                state["data"]["rng"] = generators
                return state
            except WorkerLostError:
                if not snapshot:
                    raise
                text = "%s(): no worker starts, so the state is that of step %d, not %d."
                logger.warning(text, method, kept_step, step)
        # Copy the state, because it may be one that the user loaded.
        return dict(map_leaves(without_call(merge_shards(snapshot)), try_copy))

    def models(self, method: str = "get_model", only_weights: bool = False) -> Any:
        self._prepare_export(method)
        return self._fetch(ModelsRequest(only_weights=only_weights), method)[0]

    def _prepare_export(self, method: str) -> list[Any]:
        """Let the workers compare their replicas, and return their random number generators."""
        return self.dispatcher.run(PrepareExportRequest(), method=method, allows_any_size=True)

    def _fetch(self, request: Request, method: str, open_inbox: Any = Inbox) -> list[Any]:
        """Return the answers of all workers that have a part of the state."""
        rank = None if self.dispatcher.controller.record.has_shards else 0
        options = {"rank": rank, "open_inbox": open_inbox, "allows_any_size": True}
        return self.dispatcher.run(request, method=method, **options)

    # ---- files

    def save(self, path: str | os.PathLike[str], provenance: bool, frozen: bool) -> str:
        """Write a checkpoint file. Worker 0 streams its content if possible.

        This takes half the time, and no memory of the driver. The driver collects the state and
        writes it if there are shards, no workers, a worker in this process, or types that only this
        process may read.
        """
        check_flags("save", provenance=provenance, frozen=frozen)
        self.dispatcher.check_open()
        target, controller = Location(path), self.dispatcher.controller
        members, has_shards = controller.members, controller.record.has_shards
        is_remote = bool(members) and all(member.is_remote for member in members)
        with controller.speed.saving():
            driver_entries = self._driver_entries(provenance)
            if is_remote and not (has_shards or _allows_user_types()):
                request = SaveRequest(
                    driver_entries=driver_entries,
                    generator_states=self._prepare_export("save"),
                    label=target.label,
                    frozen=frozen,
                )
                return self._stream(target, self._manifest(), request)
            state = {**self._collect_from_workers("save", frozen), **driver_entries}
            return checkpoint.write_file(state, target.path, self._manifest())

    def _manifest(self) -> checkpoint.Manifest:
        """Return the manifest of a file, after the workers have answered: some may be lost."""
        return checkpoint.Manifest(
            world_size=len(self.dispatcher.controller.members),
            operator_name=self.options.training_operator_cls.__qualname__,
        )

    def _stream(self, target: Location, manifest: checkpoint.Manifest, request: SaveRequest) -> str:
        errors: list[Exception] = []

        def fill(file: IO[bytes]) -> None:
            hashing: Any = HashingFile(file)
            try:
                open_inbox = functools.partial(Inbox, open_file=hashing.restart)
                (answer,) = self._fetch(request, "save", open_inbox=open_inbox)
            except StorageError as error:
                raise error.args[0] from None
            except Exception as error:
                errors.append(error)
                raise
            if isinstance(answer, Exception):
                raise answer
            hashing.seal(replace(manifest, **answer))

        return target.write(fill, reraised=errors)

    def save_model(self, path: str | os.PathLike[str], frozen: bool) -> str:
        check_suffix(path)
        check_flags("save_model", frozen=frozen)
        models, left_out = self.models("save_model", only_weights=True), set()
        if not frozen:
            names = self._collect_from_workers("save_model", frozen).get("frozen", ())
            many = len(models) > 1
            left_out = {f"{i}.{n}" if many else n for i, own in enumerate(names) for n in own}
        return checkpoint.save_model(models if len(models) > 1 else models[0], path, left_out)

    # ---- loading

    def load_file(self, path: str | os.PathLike[str]) -> None:
        self.dispatcher.check_open(changes_state=True)
        file = CheckpointFile(path)
        self.load(file.read(), reread=file.read)

    def load(self, state: Mapping[str, Any], reread: Callable[[], Any] | None = None) -> None:
        """Load a state. `reread` reads it from a file, so that it need not be kept."""
        self.dispatcher.check_open(changes_state=True)
        check_state(state)
        driver_entries = {key: state.get(key, {}) for key in DRIVER_KEYS}
        worker_entries = entries_for_workers(state)
        path, callbacks = driver_entries["parent"].get("path"), self.dispatcher.callback_list
        try:
            with callbacks.load_states(copy.deepcopy(driver_entries["callbacks"])):
                self.dispatcher.run(LoadRequest(state=worker_entries), changes_state=True)
        except CheckpointError as error:
            what = f"{path or 'the state'} into {self.options.training_operator_cls.__name__}"
            error.args = (f"Cannot load {what}. Use the same model and config. {error}",)
            raise
        parent = {} if path is None else {"parent": without_homes(path)}
        self.provenance = {**process_provenance(), **parent}
        snapshots = self.dispatcher.controller.snapshots
        if reread is not None:
            snapshots.replace_with(lambda: entries_for_workers(reread()))
        elif any(member.is_remote for member in self.dispatcher.controller.members):
            snapshots.store(worker_entries)
        else:  # packing needs Ray
            snapshots.replace_with(lambda: worker_entries)
        self.dispatcher.reporter.load_state_dict(state)
        self._warn_of_changes(driver_entries["config"])

    def _warn_of_changes(self, saved: Mapping[str, Any]) -> None:
        own = flatten_scalars(redact_config(self.options.config))
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
