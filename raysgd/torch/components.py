"""What an operator registered, and where its training stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raysgd.context import WorkerContext
from raysgd.data import Dataset
from raysgd.errors import CheckpointError
from raysgd.metrics import AverageMeterCollection
from raysgd.timers import TimerCollection
from raysgd.torch import replica
from raysgd.torch.fitting import check_fits
from raysgd.torch.loading import Source, dataset_loader, wrap_loader
from raysgd.torch.precision import create_precision
from raysgd.torch.updates import Updates

__all__ = ["Components", "OperatorSettings"]


@dataclass
class OperatorSettings:
    """What the trainer's arguments and the worker's place mean for an operator."""

    context: WorkerContext = field(default_factory=WorkerContext)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    wrap_ddp: bool = True
    add_dist_sampler: bool = True
    scheduler_step_freq: str | None = None
    use_tqdm: bool = False
    use_fp16: bool | str = False
    amp_dtype: torch.dtype | None = None
    batch_share: int | None = None
    """This worker's share of ``config[BATCH_SIZE]``."""


class Components:
    """The registered parts of one operator, their state, and the place in the data."""

    def __init__(self, settings: OperatorSettings) -> None:
        self.settings = settings
        self.timers = TimerCollection()
        self.timers.disable()
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.registered = False
        self.epoch = 0
        self.offset = 0
        self.validation_offset = 0
        self.global_step = 0
        self.seed = torch.initial_seed() % 2**62
        self.meters: AverageMeterCollection | None = None
        self._sources: dict[str, Source] = {}
        self._trains_on = "train"
        self._wrapping: list[dict[str, Any] | None] = []
        self._buffer_slots: list[tuple[torch.nn.Module, str]] = []
        self._committed_buffers: list[torch.Tensor] = []
        self.updates = Updates(
            create_precision(settings.use_fp16, settings.device, settings.amp_dtype)
        )

    # ---- registering

    def register(
        self,
        models: Any,
        optimizers: Any,
        criterion: Any,
        schedulers: Any,
        ddp_args: Any,
        apex_args: Any = None,
        accumulation_steps: Any = 1,
        max_grad_norm: Any = None,
    ) -> Any:
        """See :meth:`TrainingOperator.register`."""
        if self.registered:
            raise RuntimeError(
                "register() was called twice; pass lists to register several models."
            )
        if criterion is not None and not callable(criterion):
            raise TypeError(f"register(criterion=...) must be callable, but it is {criterion!r}.")
        for name, given in (("ddp_args", ddp_args), ("apex_args", apex_args)):
            if given is not None and not isinstance(given, dict):
                raise TypeError(f"register({name}=...) must be a dict, but it is {given!r}.")
        self.models = [self._placed(m) for m in _checked("models", models, torch.nn.Module)]
        self.optimizers = _checked("optimizers", optimizers, torch.optim.Optimizer)
        if schedulers is not None:
            self.schedulers = _checked("schedulers", schedulers, None)
            if self.settings.scheduler_step_freq is None:
                raise ValueError(
                    "register(schedulers=...) needs to know when to step them: pass "
                    'scheduler_step_freq="batch", "epoch" or "manual" to the trainer.'
                )
            _check_plateau(self.schedulers, self.settings.scheduler_step_freq)
        self.updates.register(self.optimizers, accumulation_steps, max_grad_norm)
        self.models = self.updates.precision.prepare(self.models, self.optimizers, apex_args)
        if self.settings.wrap_ddp and self.settings.context.distributed:
            self.models = [self._wrapped(model, ddp_args or {}) for model in self.models]
        if isinstance(criterion, torch.nn.Module):
            criterion = criterion.to(self.settings.device)
        self._buffer_slots = [
            (module, name)
            for model in self.models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.registered = True
        self.commit_buffers()
        given = [_shaped_like(models, self.models), optimizers]
        return tuple(
            given
            + ([criterion] if criterion is not None else [])
            + ([schedulers] if schedulers is not None else [])
        )

    def adopt_wrappers(self, attributes: Iterable[Any]) -> None:
        """Find models that user code wrapped after registering them, among its attributes."""
        wrapped = {
            id(value.module): value
            for attribute in attributes
            for value in (attribute if isinstance(attribute, list | tuple) else [attribute])
            if isinstance(value, DistributedDataParallel)
        }
        self.models = [wrapped.get(id(model), model) for model in self.models]
        self._wrapping = [
            replica.wrapping_arguments(m) if isinstance(m, DistributedDataParallel) else None
            for m in self.models
        ]

    def register_data(self, train_loader: Any, validation_loader: Any) -> None:
        """See :meth:`TrainingOperator.register_data`."""
        for name, loader in (("train", train_loader), ("validation", validation_loader)):
            if loader is None:
                continue
            if not isinstance(loader, Iterable):
                raise TypeError(
                    f"register_data({name}_loader=...) must be iterable, but it is {loader!r}."
                )
            self._sources[name] = self.wrap(loader, training=name == "train")

    def wrap(self, loader: Any, training: bool) -> Source:
        """Return the source of batches for a loader."""
        context, share = self.settings.context, self.settings.batch_share
        return wrap_loader(
            loader,
            training=training,
            shard=self.settings.add_dist_sampler,
            world_size=context.world_size,
            rank=context.world_rank,
            seed=self.seed,
            batch_share=share,
        )

    def source(self, name: str) -> Source:
        """Return the registered train or validation loader.

        Raises:
            RuntimeError: if there is none.
        """
        if name not in self._sources:
            raise RuntimeError(
                f"There is no {name} loader. Call self.register_data({name}_loader=...) in setup."
            )
        return self._sources[name]

    def training_source(self, dataset: Dataset | None) -> tuple[Source, bool]:
        """Return what to train on, and whether that is another source than before.

        A data set given with the call takes the place of the registered loader. An epoch that is
        part-finished on one of them is given up when the other is used.
        """
        name = "train" if dataset is None else f"dataset {dataset.uid}"
        if dataset is not None and name not in self._sources:
            for old in [key for key in self._sources if key.startswith("dataset ")]:
                del self._sources[old]
            self._sources[name] = self.wrap(dataset_loader(dataset), training=True)
        changed = name != self._trains_on
        if changed:
            self._trains_on, self.offset = name, 0
        return self.source(name), changed

    def _placed(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.to(self.settings.device)

    def _wrapped(self, model: torch.nn.Module, arguments: dict[str, Any]) -> torch.nn.Module:
        if isinstance(model, DistributedDataParallel) or not any(
            parameter.requires_grad for parameter in model.parameters()
        ):
            return model  # DistributedDataParallel refuses a model that is not trained
        index = self.settings.device.index
        device_ids = None if index is None else [index]
        given = {"device_ids": device_ids, **arguments}
        if replica.only_running_statistics(model) and "broadcast_buffers" not in given:
            given.setdefault("forward_sync_buffers", False)
        return replica.ReplicatedModel(model, **given)

    # ---- committed steps

    @property
    def updated(self) -> bool:
        """Whether every optimizer has stepped since the last commit."""
        return self.updates.updated

    def begin_batch(self, position: int, planned: int, is_last: bool) -> None:
        """Begin a batch of an accumulation group, see :meth:`Updates.begin_batch`."""
        self.updates.begin_batch(self.models, position, planned, is_last)

    def commit(self, num_batches: int = 1) -> None:
        """Count batches whose update is done, and remember what a failed one must not change.

        Raises:
            RuntimeError: if the update was left out although gradients wait for it.
        """
        self.updates.check_complete()
        self.updates.commit()
        self.global_step += num_batches
        if self._buffer_slots:
            self.commit_buffers()

    def commit_buffers(self) -> None:
        """Remember the buffers: a forward pass changes them also in a step that then fails."""
        buffers = self._buffers()
        if [b.shape for b in self._committed_buffers] != [b.shape for b in buffers]:
            self._committed_buffers = [torch.empty_like(buffer) for buffer in buffers]
        if buffers:
            torch._foreach_copy_(self._committed_buffers, buffers)

    def roll_back(self) -> None:
        """Take back what a step that was not committed left behind."""
        for (module, name), committed in zip(
            self._buffer_slots, self._committed_buffers, strict=True
        ):
            buffer = module._buffers[name]
            if buffer is not None and buffer.shape == committed.shape:
                buffer.detach().copy_(committed)
            else:
                module._buffers[name] = committed.clone()
        self.updates.roll_back()

    def _buffers(self) -> list[torch.Tensor]:
        """Return the buffers; by name, since a forward pass may put another tensor in a place."""
        found = [module._buffers[name] for module, name in self._buffer_slots]
        return [buffer.detach() for buffer in found if buffer is not None]

    def sync_buffers(self) -> None:
        """Give every rank the buffers of rank 0, as the next training step would."""
        buffers = [b for m in self.models if replica.replicated(m) for b in m.buffers()]
        if buffers:
            replica.broadcast_tensors(buffers, source=0)
            self.commit_buffers()

    # ---- generations

    def enter(self, context: WorkerContext, batch_share: int | None) -> None:
        """Take a place in a new generation: rebuild the models' wrappers, share data out anew."""
        self.settings.context = context
        self.settings.batch_share = batch_share
        for model, arguments in zip(self.models, self._wrapping, strict=True):
            if isinstance(model, DistributedDataParallel) and arguments is not None:
                replica.rebuild(model, arguments)
        for source in self._sources.values():
            source.reshard(context.world_size, context.world_rank, batch_share)

    @property
    def replicated(self) -> bool:
        """Whether the models are the same on every rank."""
        return any(replica.replicated(model) for model in self.models)

    # ---- state

    def new_meters(self) -> AverageMeterCollection:
        """Return fresh meters, which the runner can read while an epoch is under way."""
        self.meters = AverageMeterCollection()
        return self.meters

    def training_state(self) -> dict[str, Any]:
        """Return models, optimizers, schedulers and scaler, as they are on this device."""
        state: dict[str, Any] = {
            "models": [replica.unwrap(model).state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        if self.schedulers:
            state["schedulers"] = [scheduler.state_dict() for scheduler in self.schedulers]
        precision = self.updates.precision
        if precision.scales and precision.state_key is not None:
            state[precision.state_key] = precision.state_dict()
        return state

    def check_training_state(self, state: dict[str, Any]) -> None:
        """Check that models, optimizers, schedulers and scaler fit what is registered.

        Raises:
            CheckpointError: if they do not.
        """
        for name, objects in self._stateful():
            check_fits(name, objects, state.get(name, []))
        key = self._scaler_key(state)
        if key is not None and (problem := self.updates.precision.problem_with(state[key])):
            raise CheckpointError(f"The state's {key!r} is no state of a scaler: {problem}.")

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Take over models, optimizers and schedulers, and the scaler where both sides have one."""
        for name, objects in self._stateful():
            for held, saved in zip(objects, state.get(name, []), strict=True):
                held.load_state_dict(saved)
        if (key := self._scaler_key(state)) is not None:
            self.updates.precision.load_state_dict(state[key])
        self.commit_buffers()

    def _scaler_key(self, state: dict[str, Any]) -> str | None:
        """Return where in a state there is something for this precision's scaler."""
        precision = self.updates.precision
        return precision.state_key if precision.scales and precision.state_key in state else None

    def _stateful(self) -> list[tuple[str, list[Any]]]:
        return [
            ("models", [replica.unwrap(model) for model in self.models]),
            ("optimizers", self.optimizers),
            ("schedulers", self.schedulers),
        ]

    def place(self) -> dict[str, Any]:
        """Return where training stands in the data."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "validation_offset": self.validation_offset,
            "seed": self.seed,
        }

    def move_to(self, place: dict[str, Any], global_step: int) -> None:
        """Go to a place in the data."""
        self.epoch, self.offset = place["epoch"], place["offset"]
        self.validation_offset = place.get("validation_offset", 0)
        self.global_step = global_step
        self.reseed(place.get("seed", self.seed))

    def fingerprint(self) -> dict[str, str]:
        """Return what the loaders that are shared out must have in common on all workers."""
        return {name: s.fingerprint() for name, s in self._sources.items() if s.sharded}

    def release(self) -> None:
        """Let go of the loaders' worker processes."""
        for source in self._sources.values():
            source.renew()

    def reseed(self, seed: int) -> None:
        """Let the order of the epochs follow from `seed`."""
        self.seed = seed
        for source in self._sources.values():
            source.reseed(seed)


def _check_plateau(schedulers: list[Any], frequency: str) -> None:
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau) and frequency != "manual":
            raise ValueError(
                f"ReduceLROnPlateau steps with a metric, which scheduler_step_freq={frequency!r} "
                'does not give it. Use "manual", and call trainer.update_scheduler(metric).'
            )


def _checked(name: str, given: Any, kind: type | None) -> list[Any]:
    """Return what was given as a list, each of its members checked."""
    members = list(given) if isinstance(given, list | tuple) else [given]
    for member in members:
        fits = isinstance(member, kind) if kind else hasattr(member, "step")
        if not fits:
            expected = f"torch {kind.__name__} objects" if kind else "learning-rate schedulers"
            raise TypeError(
                f"register({name}=...) must be one or a list of {expected}, but got {member!r}."
            )
    if not members:
        raise ValueError(f"register({name}=...) is empty; at least one is needed.")
    return members


def _shaped_like(given: Any, members: list[Any]) -> Any:
    """Return `members` in the shape of `given`: a single one, a list or a tuple."""
    if isinstance(given, tuple):
        return tuple(members)
    return members if isinstance(given, list) else members[0]
