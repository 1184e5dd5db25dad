"""What an operator registered, and where its training stands."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd._internal.context import WorkerContext
from raysgd._internal.nested import loading
from raysgd.data.partition import MicroBatch
from raysgd.data.source import BatchSource
from raysgd.errors import CheckpointError
from raysgd.loop.registration import Registration, Settings, check_parts, listed, shaped_like
from raysgd.torch import collectives, ddp
from raysgd.torch.features.averaging import Averaging
from raysgd.torch.features.buffers import BufferCopies
from raysgd.torch.features.compilation import (
    Compilation,
    checked_compile,
    uncompile,
    warn_of_idle_compilers,
)
from raysgd.torch.features.idle_optimizers import IdleOptimizers
from raysgd.torch.features.micro_batches import TorchMicroBatches
from raysgd.torch.features.rollback import Rollback
from raysgd.torch.features.schedules import Schedules
from raysgd.torch.features.sharded_optimizer import ShardedOptimizer, is_divided
from raysgd.torch.interop.horovod import HorovodExchange, check_horovod_args
from raysgd.torch.loading import wrap_loader
from raysgd.torch.meta import Init, checked_init, make_whole, moved
from raysgd.torch.optimization import Optimization
from raysgd.torch.options import TorchOptions
from raysgd.torch.precision import create_precision
from raysgd.torch.precision.native import NativeAmp
from raysgd.torch.register_checks import (
    check_divisible,
    check_same_parameters,
    check_shardable,
    check_static_graphs,
    check_step_freq,
    check_untrained,
    checked,
    checked_sharding,
    has_static_graph,
    is_trained,
    warn_of_order,
    warn_of_strangers,
)
from raysgd.torch.sharded_files import hash_in, named_tensors, write
from raysgd.torch.state import (
    copied,
    copied_to_cpu,
    load_optimizer,
    model_state,
    on_cpu,
    renamed,
    state_problem,
    to_cpu,
)

if TYPE_CHECKING:
    from raysgd.torch.features.fully_sharded import FullyShardedModel

__all__ = ["OperatorSettings", "TorchRegistration"]

logger = logging.getLogger(__name__)


@dataclass
class OperatorSettings(Settings):
    """The trainer's arguments, and where this worker is."""

    options: TorchOptions = field(default_factory=TorchOptions)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class TorchRegistration(Registration):
    """What an operator registered, its state, and the position in the data."""

    settings: OperatorSettings
    models: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]

    def __init__(self, settings: OperatorSettings) -> None:
        super().__init__(settings, seed=torch.initial_seed() % 2**62)
        self.schedulers: list[Any] = []
        self.criteria: list[Any] = []
        self._num_criteria = 0
        self._required: dict[int, dict[str, bool]] = {}
        self._parameters: list[list[tuple[torch.nn.Parameter, torch.dtype]]] = []
        self._averaged: list[dict[str, bool] | None] = []
        self._comm_hooks: list[list[tuple[Any, Any]]] = []
        self._frozen: list[tuple[int, torch.nn.Parameter]] = []
        self._frozen_modes: list[tuple[torch.nn.Module, list[tuple[torch.nn.Module, bool]]]] = []
        self._buffers = BufferCopies()
        self._rollback = Rollback(self.step, [], [])
        self.parts: TorchMicroBatches = TorchMicroBatches(self)
        self.averaging = Averaging(self)
        self.compilation = Compilation(self)
        self.schedules = Schedules(self)
        self._divided: list[ShardedOptimizer] = []
        self._full: FullyShardedModel | None = None
        self.sharding: str | None = None
        self.optimization = Optimization(
            create_precision(
                settings.options.use_fp16, settings.device, settings.options.amp_dtype
            ),
            self.parts,
            self.step,
        )
        self.optimization.mean_over_workers = self._mean_over_workers

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
        horovod_args: Any = None,
        compile: Any = None,
        sharding: Any = None,
        sharding_args: Any = None,
    ) -> Any:
        """See :meth:`TrainingOperator.register`."""
        self.check_unregistered()
        compile_args = checked_compile(compile)
        criteria = [] if criterion is None else listed(criterion)
        for each in criteria:
            if isinstance(each, type):
                raise TypeError(
                    f"register(criterion=...) must be an object, not a class: {each.__name__}()."
                )
            if not callable(each):
                raise TypeError(
                    "register(criterion=...) must be callable, or a list of what is, but got "
                    f"{each!r}."
                )
        own_arguments = {"ddp_args": ddp_args, "apex_args": apex_args, "horovod_args": horovod_args}
        for name, given in own_arguments.items():
            if given is not None and not isinstance(given, dict):
                raise TypeError(f"register({name}=...) must be a dict, but it is {given!r}.")
        modules = checked("models", models, torch.nn.Module)
        self.optimizers = checked("optimizers", optimizers, torch.optim.Optimizer)
        options = self.settings.options
        sharding_args = checked_sharding(sharding, sharding_args, options, self.optimizers)
        warn_of_strangers(self.optimizers, [*modules, *criteria])
        trained = [each for each in criteria if is_trained(each, self.optimizers, modules)]
        self._num_criteria = len(trained)
        init = checked_init(modules, self.optimizers, sharding_args.pop("init_fn", None), sharding)
        on_cpu = self.context.distributed and sharding_args.get("offload", False)
        device = self.settings.device
        self.models = [moved(model, device, on_cpu) for model in [*modules, *trained]]
        if apex_args and self.settings.options.use_fp16 != "apex" and self.context.world_rank == 0:
            logger.warning(
                "register(apex_args=%r) does nothing: the trainer uses %s. Apex, which takes them, "
                'is used with use_fp16="apex".',
                apex_args,
                self.optimization.precision.name,
            )
        self.sharding = sharding
        if sharding is not None:
            check_divisible(sharding, self.optimizers, self.models)
        if sharding == "full":
            check_shardable(
                self.models,
                self.optimizers,
                compile=compile_args is not None,
                ddp_args=bool(ddp_args),
                scales=self.optimization.precision.scales,
            )
            if self.context.distributed:
                self._divide_models(sharding_args, init)
            elif init is not None:
                make_whole(self.models, init, self.settings.device)
        elif sharding is not None:
            copies = sharding_args.get("copies")
            if self.context.distributed:
                self._divided = [
                    ShardedOptimizer(optimizer, copies, lambda: self.optimization.in_helper)
                    for optimizer in self.optimizers
                    if any(p.requires_grad for g in optimizer.param_groups for p in g["params"])
                ]
        if schedulers is not None:
            self.schedulers = checked("schedulers", schedulers, None)
            check_step_freq(self.schedulers, options.scheduler_step_freq, options.monitor)
        may_come_in_parts = (self.settings.full_size or 1) > 1
        self.optimization.register(
            self.optimizers, accumulation_steps, max_grad_norm, may_come_in_parts
        )
        self.accumulation_steps = accumulation_steps
        self.scales = self.optimization.precision.scales
        self.models = self.optimization.precision.prepare(self.models, self.optimizers, apex_args)
        uncompile(self.given_models)
        if compile_args is not None:
            self.compilation.compile(compile_args)
        check_horovod_args(horovod_args or {})
        if self.context.distributed:
            self._average(ddp_args or {}, horovod_args or {})
        self.optimization.begin()
        for divided in self._divided:
            divided.begin()
        # now, since setup may go on to freeze some
        self._required = {
            id(model): ddp.required_gradients(ddp.unwrap(model)) for model in self.models
        }
        if self.context.distributed and options.wrap_ddp and self._full is None:
            self._parameters = [[(p, p.dtype) for p in m.parameters()] for m in self.models]
        wrapped = dict(zip(map(id, trained), self.models[len(modules) :], strict=True))
        self.criteria = criteria = [
            wrapped.get(id(c), c.to(self.settings.device) if isinstance(c, torch.nn.Module) else c)
            for c in criteria
        ]
        self._frozen_modes = [
            (model, [(module, module.training) for module in model.modules()])
            for model in self.models
            if not any(parameter.requires_grad for parameter in model.parameters())
        ]
        self.step.optimizers = self.optimizers
        self._buffers = BufferCopies(self.models)
        watched = (self.optimizers, self.models) if self._full is None else ([], [])
        self._rollback = Rollback(self.step, *watched, updates_late=bool(self._divided))
        self.features = [
            self._buffers,
            self._rollback,
            self.parts,
            self.averaging,
            self.compilation,
            self.schedules,
            IdleOptimizers(self),
        ]
        if self._full is not None:
            for each in self.models:
                if not ddp.only_running_statistics(each):
                    self._full.models.call_before(each, self._share_buffers)
        self.registered = True
        given = [shaped_like(models, self.given_models), optimizers]
        return tuple(
            given
            + ([shaped_like(criterion, criteria)] if criterion is not None else [])
            + ([schedulers] if schedulers is not None else [])
        )

    def set_mode(self, training: bool) -> None:
        """Put the models into train or eval mode; frozen ones train as they were registered."""
        for model in self.models:
            model.train(training)
        for model, modes in self._frozen_modes if training else ():
            if not any(parameter.requires_grad for parameter in model.parameters()):
                for module, mode in modes:
                    module.training = mode

    @property
    def given_models(self) -> list[torch.nn.Module]:
        """The models that were registered as such; criteria that are trained are some besides."""
        return self.models[: len(self.models) - self._num_criteria]

    def _average(self, ddp_args: dict[str, Any], horovod_args: dict[str, Any]) -> None:
        """Let the workers average the gradients of what is registered."""
        if self.settings.options.use_horovod:
            self.optimization.exchanges = {
                id(optimizer): HorovodExchange(
                    optimizer, self.models, horovod_args, self.accumulation_steps
                )
                for optimizer in self.optimizers
            }
        elif self.settings.options.wrap_ddp and self._full is None:
            device, count = self.settings.device, len(self.given_models)
            self.models = [
                *(ddp.wrapped(model, device, ddp_args) for model in self.models[:count]),
                *(
                    ddp.wrapped(criterion, device, ddp_args, is_criterion=True)
                    for criterion in self.models[count:]
                ),
            ]
            ddp.check_exchanged(self.optimizers, self.models)

    def _divide_models(self, arguments: dict[str, Any], init: Init | None) -> None:
        """Divide the models over the workers, and the optimizer with them."""
        from raysgd.torch.features.fully_sharded import (
            FullyShardedModel,  # takes a second to import
        )

        precision, (optimizer,) = self.optimization.precision, self.optimizers
        self._full = FullyShardedModel(
            optimizer,
            self.models,
            arguments,
            precision.dtype if isinstance(precision, NativeAmp) else None,
            lambda: self.optimization.in_helper,
            self.settings.device,
            init,
            is_alone=self.context.world_size > collectives.size(),
        )
        self._divided = [self._full]
        self.optimization.rows = self._full.rows
        self.optimization.whole_norm = self._full.whole_norm
        self.optimization.sums_each_batch = True
        if self.parts.batch_norms:
            self.parts.why_not = "batch normalization may need other parts on other workers"

    def _share_buffers(self, model: torch.nn.Module, *_: Any) -> None:
        """Broadcast buffers before a forward pass, as DistributedDataParallel does."""
        if torch.is_grad_enabled():
            collectives.broadcast_tensors(list(model.buffers()), source=0)

    def adopt_wrappers(self, attributes: Iterable[Any]) -> None:
        """Find models that user code wrapped after registering them, among its attributes."""
        wrapped = {
            id(value.module): value
            for attribute in attributes
            for value in (attribute if isinstance(attribute, list | tuple) else [attribute])
            if isinstance(value, DistributedDataParallel)
        }
        self.models = [wrapped.get(id(model), model) for model in self.models]
        self._averaged = [
            ddp.averaged_parameters(m, self._required.get(id(m)))
            if isinstance(m, DistributedDataParallel)
            else None
            for m in self.models
        ]
        self._comm_hooks = [
            ddp.communication_hooks(model) if isinstance(model, DistributedDataParallel) else []
            for model in self.models
        ]
        if self.context.world_rank == 0:
            warn_of_idle_compilers(self.models)
        wraps = self.settings.options.wrap_ddp and self.context.distributed and self._full is None
        self._frozen = self._not_averaged() if wraps and not self.optimization.exchanges else []
        if self.accumulation_steps > 1:
            check_static_graphs(self.models)
        elif has_static_graph(self.models):
            self.parts.why_not = "DistributedDataParallel(static_graph=True) cannot accumulate"

    def _not_averaged(self) -> list[tuple[int, torch.nn.Parameter]]:
        """Return the parameters that no wrapper averages, each with the index of its model."""
        averaged = {
            id(parameter)
            for model, names in zip(self.models, self._averaged, strict=True)
            if names is not None
            for name, parameter in ddp.unwrap(model).named_parameters()
            if names.get(name, True)
        }
        return [
            (index, parameter)
            for index, model in enumerate(self.models)
            for parameter in model.parameters()
            if id(parameter) not in averaged
        ]

    def check_averaged(self) -> None:
        """Refuse to train what the workers do not average, also before others join."""
        if self._parameters:
            check_same_parameters(self._unwrapped, self._parameters)
        unfrozen = {id(p): index for index, p in self._frozen if p.requires_grad}
        if unfrozen:
            check_untrained(unfrozen, [ddp.unwrap(m) for m in self.models], self.optimizers)
        if self._full is not None:
            self._full.check_trained()

    def share_initial_state(self) -> None:
        """Give every rank the state of rank 0 that DistributedDataParallel has not shared yet.

        Every rank must call it.
        """
        if self.settings.options.use_horovod:
            self.load_training_state(self.from_rank(self.training_state, 0))
            return
        for divided in self._divided:
            divided.begin_together()
        if self._full is not None:
            self._buffers.set(self.from_rank(self._buffers.tensors, 0))
            return
        models = [model for model in self.models if not ddp.replicated(model)]
        if self.settings.options.wrap_ddp and models:
            held = [t.detach() for m in models for t in (*m.parameters(), *m.buffers())]
            given = self.from_rank(lambda: held, 0)
            for own, value in zip(held, given, strict=False):
                if own.shape == value.shape:  # else it is a cache that setup has filled
                    own.copy_(value)
            self._buffers.commit()

    def register_data(self, train_loader: Any, validation_loader: Any) -> None:
        super().register_data(train_loader, validation_loader)
        # one of those that start
        is_first = self.context.world_rank == 0 and self.context.generation <= 1
        if train_loader is not None and is_first and self.settings.options.num_workers > 1:
            warn_of_order(self.data.source("train"))

    def by_name(self, loader: Any) -> Mapping[str, Any]:
        """Return several loaders by their names; a single one by the empty name."""
        if not isinstance(loader, Mapping):
            return {"": loader}
        if not loader or not all(isinstance(name, str) and name for name in loader):
            raise TypeError(
                f"Several loaders must be a dict of them by name, such as {{'a': loader_a, 'b': "
                f"loader_b}}, but it is {loader!r}."
            )
        return loader

    def wrap(self, loader: Any, training: bool) -> BatchSource:
        """Return the source of batches for a loader, or for a data set of items."""
        return wrap_loader(
            loader,
            training=training,
            shard=self.settings.options.add_dist_sampler,
            seed=self.seed,
            batch_share=self.settings.batch_share,
            **self.settings.placing,
        )

    # ---- committed steps

    @property
    def num_skipped(self) -> int:
        return self.optimization.precision.num_skipped

    def end_segment(self) -> None:
        super().end_segment()
        self.optimization.end()

    def begin_batch(self, place: MicroBatch) -> None:
        if place.share != 1.0 and not self.replicated:
            place = replace(place, share=1.0)  # nobody averages
        super().begin_batch(place)
        self.optimization.begin_batch(self.models, place)

    def commit(self, num_batches: int = 1) -> None:
        """Count batches whose update is done, and remember what a failed one must not change.

        Raises:
            RuntimeError: if the update was left out although gradients wait for it.
        """
        self.optimization.check_complete()
        self.optimization.commit()
        for divided in self._divided:
            divided.commit()
        super().commit(num_batches)

    def measure_norms(self, wanted: bool) -> None:
        self.optimization.measures_norms = wanted
        if not wanted:
            self.optimization.norms.clear()

    def gradient_norms(self) -> dict[str, float]:
        norms = [self.optimization.norms.get(id(optimizer)) for optimizer in self.optimizers]
        return {
            "grad_norm" if len(norms) == 1 else f"grad_norm-{number}": float(norm)
            for number, norm in enumerate(norms)
            if norm is not None
        }

    def roll_back(self) -> None:
        for divided in self._divided:
            divided.abandon()  # before others give back what they know of the optimizers
        has_copies = self._rollback.has_copies
        self.optimization.roll_back()
        super().roll_back()
        for divided in self._divided if has_copies else ():
            divided.note_undone()

    def sync_buffers(self) -> None:
        """Give every rank the buffers of rank 0, as the next training step would."""
        with_horovod = bool(self.optimization.exchanges)
        buffers: list[torch.Tensor] = []
        for model in self.models:
            if with_horovod or ddp.replicated(model) or self._full is not None:
                buffers += model.buffers()
            elif self.settings.options.wrap_ddp:
                buffers += ddp.running_statistics(model)
        if buffers:
            collectives.broadcast_tensors(buffers, source=0)
            self._buffers.commit()

    def minimum(self, value: int) -> int:
        return collectives.minimum(value, self.settings.device)

    def _mean_over_workers(self, value: float) -> float:
        if not self.context.distributed or not self.replicated:
            return value
        return collectives.mean(value, self.settings.device)

    def from_rank(self, make: Callable[[], Any], rank: int) -> Any:
        return collectives.broadcast_state(make, rank, self.settings.device)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        modes = [(module, module.training) for each in self.models for module in each.modules()]
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            self.roll_back()

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        full = self._full
        on_demand = contextlib.nullcontext() if full is None else full.models.on_demand()
        with ddp.no_forward_sync(self.models), self.evaluating(), on_demand:
            yield
        super().end_segment()

    # ---- compiled models

    @property
    def compiling(self) -> bool:
        return self.compilation.is_compiling

    @property
    def needs_warm_up(self) -> bool:
        if self._full is not None:  # a replacement has no model before it joins
            return False
        compiled = any(
            module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
            for model in self.models
            for module in model.modules()
        )
        return compiled or self.settings.device.type == "cuda"

    @contextlib.contextmanager
    def without_update(self) -> Iterator[None]:
        self.optimization.makes_updates = False
        try:
            yield
        finally:
            self.optimization.makes_updates = True

    # ---- generations

    def enter(self, context: WorkerContext, batch_share: int | None) -> None:
        """Enter a new generation: rebuild the models' wrappers, share data out anew."""
        super().enter(context, batch_share)
        for exchange in self.optimization.exchanges.values():
            exchange.rebuild()
        wrapped = zip(self.models, self._averaged, self._comm_hooks, strict=True)
        for model, names, comm_hooks in wrapped:
            if isinstance(model, DistributedDataParallel) and names is not None:
                ddp.rebuild(model, names, comm_hooks)

    def share_training_state(self, leader: int, follows: bool) -> None:
        """Take over what rank `leader` has, if this rank `follows`. Every rank must call it.

        Parameters and optimizers travel only to those that have others, such as a replacement:
        survivors of a loss are equal, most often, but for the buffers that a forward pass changes.
        """
        device = self.settings.device
        state = self.training_state()
        state["models"] = [
            ddp.without_buffers(model, held)
            for model, held in zip(self.models, state["models"], strict=True)
        ]
        own = collectives.fingerprint((self.global_step, state))
        expected = collectives.broadcast_object(own, leader)
        lacks = follows and own != expected
        lacking = collectives.ranks_with(lacks, device)
        to = collectives.fewest_receivers(lacking, device)
        if lacking and (to is None or lacks or collectives.rank() == leader):
            state = collectives.broadcast_state(self.training_state, leader, device, to)
        buffers = self.from_rank(self._buffers.tensors, leader)
        for divided in self._divided:
            divided.reshard(leader, device)
        # all has come: whoever has a part of a step's state would do the step again if `leader`
        # was lost before the rest had come
        if lacks:
            self._load(state)
        if follows:
            self._buffers.set(buffers)

    @property
    def replicated(self) -> bool:
        """Whether the models are the same on every rank."""
        exchanges = bool(self.optimization.exchanges) or self._full is not None
        return exchanges or any(map(ddp.replicated, self.models))

    @property
    def divided(self) -> bool:
        return bool(self._divided)

    @property
    def is_fully_sharded(self) -> bool:
        return self._full is not None

    @property
    def lacks_shards(self) -> bool:
        return any(divided.lacks_shards for divided in self._divided)

    @property
    def ranks_in_sync(self) -> bool:
        return all(divided.ranks_in_sync for divided in self._divided)

    # ---- state

    def whole_models(self) -> list[torch.nn.Module]:
        """Return copies of the given models on CPU; where they are divided, rank 0 does.

        All ranks must call it then.
        """
        if self._full is not None:
            return self._full.copies(len(self.given_models))
        if self._divided and self.context.world_rank != 0:
            return []
        with self.averaging.evaluating():
            return [copied_to_cpu(ddp.plain(model)) for model in self.given_models]

    def share_of_state(self) -> list[Any]:
        parts = {id(divided.optimizer): divided.parts() for divided in self._divided}
        found = [parts.get(id(optimizer), []) for optimizer in self.optimizers]
        return found if self._full is None else [*found, *self._full.model_parts()]

    def write_tensors(self, state: dict[str, Any], folder: str) -> str:
        """Write the tensors of this worker's state to a file, and take them out of it.

        Returns:
            On rank 0 the hash of the file.
        """
        if self.sharding != "full":
            raise ValueError(
                'save(sharded=True) is for models that are divided, by register(sharding="full"). '
                "Leave sharded out."
            )
        if self._full is None:
            write(named_tensors(state), folder)
            return hash_in(folder)
        for each in state.pop("shares")[0]:
            number, start, stop, _, _, values = each
            rest = {n: v for n, v in values.items() if not is_divided(v, stop - start)}
            if "optimizers" in state:
                state["optimizers"][0]["state"].setdefault(number, rest)
        write(self._full.tensors(), folder)
        return hash_in(folder)

    def write_weights(self, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Write the parameters of the models that were given, which are divided, to a file.

        Returns:
            What else the models' states have, and for names of parameters that are not in the file
            those that the same ones have there.
        """
        assert self._full is not None
        count = len(self.given_models)
        rows, other_names = self._full.weights(count)
        write(rows, folder)
        rest = {
            f"{prefix}{name}": value
            for prefix, held in zip(
                self._full.prefixes(count), self._full.undivided()[:count], strict=True
            )
            for name, value in held.state_dict().items()
        }
        return rest, other_names

    def export_replica(self) -> list[Any]:
        return [divided.held() for divided in self._divided]

    def import_replica(self, held: Sequence[Any]) -> None:
        for divided, of_it in zip(self._divided, held, strict=True):
            divided.import_replica(of_it)

    def copy_leaf(self, leaf: Any) -> Any:
        """Return a copy, of a tensor on its device."""
        return copied(leaf)

    def to_cpu(self, state: Any) -> Any:
        """Return a state on CPU; a copy, but where it is pickled for the driver anyway."""
        return to_cpu(state) if self.context.in_driver else on_cpu(state)

    def settable(self) -> Any:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        averages = self.averaging.averages
        return (
            [str({k: v for k, v in group.items() if k != "params"}) for group in groups],
            [parameter._version for model in self.models for parameter in model.parameters()],
            None if averages is None else (id(averages), averages.decay),
        )

    def training_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "models": (
                [model_state(ddp.unwrap(model)) for model in self.models]
                if self._full is None
                else [each.state_dict() for each in self._full.undivided()]
            ),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        if self.schedulers:
            state["schedulers"] = [scheduler.state_dict() for scheduler in self.schedulers]
        precision = self.optimization.precision
        if precision.scales and precision.state_key is not None:
            state[precision.state_key] = precision.state_dict()
        return state | self.feature_states()

    def check_training_state(self, state: dict[str, Any]) -> None:
        for name, objects in self._stateful(state):
            check_parts(name, objects, self._saved(name, objects, state), state_problem)
        if state.get("schedulers") and not self.schedulers and self.context.world_rank == 0:
            logger.warning(
                "The state that is loaded has schedulers, and the operator registered none: they "
                "are left out."
            )
        for feature in self.features:
            feature.check_state(state)
        key = self._scaler_key(state)
        if key is not None and (problem := self.optimization.precision.problem_with(state[key])):
            raise CheckpointError(f"The state's {key!r} is no state of a scaler: {problem}.")

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Take over models, optimizers and schedulers, and the scaler where both sides have one."""
        if self._full is None:
            self._load(state)
        else:
            (of_optimizer,) = state["optimizers"]
            self._load({**state, "optimizers": [{**of_optimizer, "state": {}}]})
            models = self._saved("models", self._unwrapped, state)
            self._full.take_values(models, of_optimizer)
            return
        for divided in self._divided:
            divided.take_state()

    def _load(self, state: dict[str, Any]) -> None:
        keeps_dtypes = self._has_own_dtypes(state)
        with contextlib.ExitStack() as undoing:
            # models last: they take content in place, which giving back what they had does not undo
            for name, objects in reversed(self._stateful(state)):
                if name == "models" and self._full is not None:
                    objects = self._full.undivided()[: len(objects)]
                parts = zip(objects, self._saved(name, objects, state), strict=True)
                for index, (held, saved) in enumerate(parts):
                    place, own = f"{name}[{index}]", held.state_dict()
                    load = None
                    if name == "optimizers" and keeps_dtypes:
                        load = functools.partial(load_optimizer, held)
                    undoing.enter_context(loading(held, own, saved, place, load))
        if (key := self._scaler_key(state)) is not None:
            self.optimization.precision.load_state_dict(state[key])
        for feature in self.features:
            feature.load_state_dict(state)
        self.step.is_partial = False

    @property
    def _unwrapped(self) -> list[torch.nn.Module]:
        return [ddp.unwrap(model) for model in self.models]

    def _has_own_dtypes(self, state: dict[str, Any]) -> bool:
        """Whether the models of a state have the dtypes of the registered ones."""
        models = self._unwrapped
        return all(
            tensor.dtype == saved[name].dtype
            for model, saved in zip(models, self._saved("models", models, state), strict=False)
            for name, tensor in model.named_parameters()
            if name in saved
        )

    def _saved(self, name: str, objects: list[Any], state: dict[str, Any]) -> Any:
        saved = state.get(name, [])
        if name != "models" or not isinstance(saved, list | tuple) or len(saved) != len(objects):
            return saved
        return [renamed(each, like=held) for held, each in zip(objects, saved, strict=True)]

    def _scaler_key(self, state: dict[str, Any]) -> str | None:
        precision = self.optimization.precision
        return precision.state_key if precision.scales and precision.state_key in state else None

    def _stateful(self, state: dict[str, Any]) -> list[tuple[str, list[Any]]]:
        models, saved = self.models, state.get("models")
        if self._num_criteria and isinstance(saved, list | tuple):
            # older files lack the criterion
            models = models[: max(len(saved), len(models) - self._num_criteria)]
        found: list[tuple[str, list[Any]]] = [
            ("models", [ddp.unwrap(model) for model in models]),
            ("optimizers", self.optimizers),
        ]
        # without schedulers of its own an operator leaves those of a state alone
        return [*found, ("schedulers", self.schedulers)] if self.schedulers else found
