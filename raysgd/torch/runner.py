"""Hosts a TrainingOperator in a worker: calls, places in the data, state, generations."""

from __future__ import annotations

import inspect
import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raysgd.config import BATCH_SIZE, worker_config
from raysgd.context import Progress, WorkerContext
from raysgd.data import Dataset
from raysgd.metrics import Summary, merge_segments
from raysgd.torch import replica
from raysgd.torch.components import Components, OperatorSettings
from raysgd.torch.loading import Source, dataset_loader
from raysgd.torch.steps import Steps
from raysgd.torch.training_operator import TrainingOperator

__all__ = ["TorchRunner", "TorchRunnerOptions"]


@dataclass(frozen=True, kw_only=True)
class TorchRunnerOptions:
    """The trainer's arguments that matter on a worker."""

    operator_cls: type[TrainingOperator]
    config: Mapping[str, Any]
    use_gpu: bool = False
    wrap_ddp: bool = True
    add_dist_sampler: bool = True
    scheduler_step_freq: str | None = None
    use_tqdm: bool = False


class TorchRunner:
    """Hosts one operator. See :class:`raysgd.context.Runner` for what runs in which thread."""

    def __init__(self, options: TorchRunnerOptions) -> None:
        self._options = options
        self._operator: TrainingOperator | None = None
        self._steps: Steps | None = None
        self._batches: Iterator[Any] | None = None
        self._call: tuple[Any, ...] | None = None
        self._segments: list[Mapping[str, Any]] = []
        self._covered: int | None = None
        self._dataset_sources: dict[str, Source] = {}

    # ---- life

    def prepare(self, context: WorkerContext) -> None:
        """Give torch its threads and its GPU."""
        if not context.in_driver:
            torch.set_num_threads(max(1, int(context.num_cpus)))
        if context.visible_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.visible_gpus)
        if self._options.use_gpu:
            if context.gpu_index is None or not torch.cuda.is_available():
                raise RuntimeError(
                    f"Worker {context.world_rank} on {context.node_ip} shall use a GPU, but the "
                    "torch in it sees none. Install a torch with CUDA there, or pass use_gpu=False."
                )
            torch.cuda.set_device(context.gpu_index)

    def setup(self, context: WorkerContext) -> None:
        """Create the operator and run its ``setup``."""
        options = self._options
        config = worker_config(options.config, context.world_size)
        settings = OperatorSettings(
            context=context,
            device=_device(options.use_gpu, context),
            wrap_ddp=options.wrap_ddp,
            add_dist_sampler=options.add_dist_sampler,
            scheduler_step_freq=options.scheduler_step_freq,
            use_tqdm=options.use_tqdm,
            batch_share=config.get(BATCH_SIZE),
        )
        self._operator = build_operator(options.operator_cls, config, settings)
        if context.world_size > 1:
            # the order of the epochs must be one; each process drew a seed of its own
            self._parts.reseed(
                replica.broadcast_state(lambda: self._parts.seed, 0, settings.device)
            )

    def rejoin(self, context: WorkerContext, leader: int) -> None:
        """Enter a new generation with the state of rank `leader`."""
        self._end_stretch()
        config = worker_config(self._options.config, context.world_size)
        if BATCH_SIZE in config:
            self.operator.config[BATCH_SIZE] = config[BATCH_SIZE]
        parts = self._parts
        parts.enter(context, config.get(BATCH_SIZE))
        if not context.distributed:
            return
        state = replica.broadcast_state(self._shared_state, leader, parts.settings.device)
        if context.world_rank == leader:
            return
        if parts.replicated:
            parts.load_training_state(state["training"])
            self.operator.load_state_dict(state["operator"])
        parts.move_to(state["place"], state["global_step"])

    def teardown(self) -> None:
        """Let go of the operator and of the processes of its loaders."""
        self._batches = None
        self._operator = None
        self._dataset_sources.clear()

    @property
    def operator(self) -> TrainingOperator:
        """The operator."""
        if self._operator is None:
            raise RuntimeError("This worker has no operator: its setup has not finished.")
        return self._operator

    @property
    def _parts(self) -> Components:
        return self.operator._parts

    # ---- read and set from another thread

    def progress(self) -> Progress:
        """Say how far training is."""
        if self._operator is None:
            return Progress()
        parts, steps = self._parts, self._steps
        meters = parts.meters if steps is not None else None
        return Progress(
            epoch=parts.epoch,
            in_epoch=parts.offset > 0,
            global_step=parts.global_step,
            num_batches=0 if steps is None else steps.num_batches,
            total_batches=None if steps is None else steps.total_batches,
            num_covered=self._covered,
            num_samples=0 if meters is None else int(meters.num_samples),
            loss=None if meters is None else _number(meters.last("train_loss")),
        )

    def request_stop(self, requested: bool) -> None:
        """Let the loop under way raise at its next step."""
        steps = self._steps
        if steps is not None:
            steps.stop_requested = requested

    # ---- training

    def train(
        self,
        *,
        call: int,
        until_epoch: int | None = None,
        until_step: int | None = None,
        info: dict[str, Any] | None = None,
        profile: bool = False,
        dataset: Dataset | None = None,
    ) -> Mapping[str, Any]:
        """Train until so many epochs are completed, or so many steps are done, in all.

        The targets are absolute, so that the call can be made again after a failure and then
        does what is left of it. `call` tells such a repetition from a new call.
        """
        if self._call != ("train", call):
            self._call, self._segments, self._covered = ("train", call), [], 0
        self._profile(profile)
        parts = self._parts
        source = self._source("train", dataset)
        while True:
            if until_epoch is not None and parts.epoch >= until_epoch:
                break
            if until_step is not None and parts.global_step >= until_step:
                break
            limit = None if until_step is None else until_step - parts.global_step
            self._train_stretch(source, limit, info)
        if parts.settings.context.distributed:
            parts.sync_buffers()
        return self._result()

    def _train_stretch(self, source: Source, limit: int | None, info: Any) -> None:
        """Train for the rest of the epoch, or for `limit` steps of it."""
        parts, operator = self._parts, self.operator
        fresh, start = parts.offset == 0, parts.offset
        steps = self._steps = self._new_steps(source, limit)
        if steps.total_batches == 0 and fresh:
            raise RuntimeError(
                f"The train loader gives no batch: {_described(source)}. Use more data, a smaller "
                "batch size or drop_last=False."
            )
        parts.meters = None
        try:
            metrics = _call_train_epoch(operator, steps, info, limit, parts.epoch)
        except BaseException:
            lost = steps.fail()
            self._cover(source, start)
            self._batches = (
                itertools.chain(lost, self._batches or ()) if not source.sharded else None
            )
            if parts.meters is not None:
                self._segments.append(parts.meters.summary())
            self._end_stretch(keep=True)
            raise
        steps.finish()
        self._cover(source, start)
        if fresh and steps.num_batches == 0:
            raise RuntimeError(
                f"{type(operator).__name__}.train_epoch took no batch from its iterator, or the "
                "train loader gave none."
            )
        if steps.num_batches or not isinstance(metrics, Mapping):
            self._segments.append(_checked_result(operator.train_epoch, metrics))
        # a loop that stops early of its own will has ended its epoch
        if steps.epoch_is_over or limit is None:
            parts.epoch += 1
            parts.offset = 0
            self._batches = None
        self._end_stretch(keep=True)

    def _cover(self, source: Source, start: int) -> None:
        """Count the samples from `start` on that the group has trained on."""
        if not source.sharded or self._covered is None:
            self._covered = None
        else:
            self._covered += self._parts.offset - start

    def _new_steps(self, source: Source, limit: int | None) -> Steps:
        parts = self._parts
        context = parts.settings.context
        left = source.steps_left(parts.offset)
        go_on: Callable[[bool], bool] | None = None
        if not source.sharded and context.world_size > 1:
            if left is not None:
                left = replica.agree_on_minimum(left, parts.settings.device)
            else:
                go_on = self._every_rank
        if self._batches is None:
            self._batches = source.batches(parts.epoch, parts.offset)
        return Steps(parts, source, self._batches, limit, left, go_on)

    def _every_rank(self, has_batch: bool) -> bool:
        return bool(replica.agree_on_minimum(int(has_batch), self._parts.settings.device))

    def _end_stretch(self, keep: bool = False) -> None:
        """Forget the stretch under way and, unless `keep`, the iteration over the loader."""
        self._steps = None
        if not keep:
            self._batches = None

    def validate(
        self,
        *,
        call: int,
        num_steps: int | None = None,
        info: dict[str, Any] | None = None,
        profile: bool = False,
    ) -> Mapping[str, Any]:
        """Evaluate the rest of the validation loader, or `num_steps` steps, round and round."""
        parts, operator = self._parts, self.operator
        self._call, self._segments, self._covered = ("validate", call), [], None
        self._profile(profile)
        source = self._source("validation", None)
        left = num_steps
        # only a pass that ends well moves the place: a repetition begins where this one did
        offset = parts.validation_offset
        with replica.no_forward_sync(parts.models):
            while True:
                steps = source.steps_left(offset)
                taken = steps if left is None else left if steps is None else min(left, steps)
                batches = _Counted(source.batches(0, offset, taken))
                metrics = operator.validate(batches, info=info)
                self._segments.append(_checked_result(operator.validate, metrics))
                if taken is None or (steps is None and batches.count < taken):
                    taken, steps = batches.count, 0  # the loader ended
                offset = source.offset_after(offset, taken)
                if (steps is not None and taken >= steps) or left is None:
                    offset = 0
                if left is None or left <= taken:
                    break
                if taken == 0 and steps == 0 and offset == 0:
                    raise RuntimeError(f"The validation loader is empty: {_described(source)}.")
                left -= taken
        parts.validation_offset = offset
        return self._result()

    def _source(self, name: str, dataset: Dataset | None) -> Source:
        if dataset is None:
            return self._parts.source(name)
        if dataset.uid not in self._dataset_sources:
            self._dataset_sources = {
                dataset.uid: self._parts.wrap(dataset_loader(dataset), training=True)
            }
            self._batches = None
        return self._dataset_sources[dataset.uid]

    def _result(self) -> Mapping[str, Any]:
        result = merge_segments(self._segments)
        self._segments = []
        timers = self._parts.timers
        if timers.enabled:
            result = Summary({**result, "profile": timers.stats()}, result.weights)
            timers.disable()
        return result

    def _profile(self, profile: bool) -> None:
        timers = self._parts.timers
        timers.reset()
        if profile:
            timers.enable()
        else:
            timers.disable()

    # ---- other calls

    def update_schedulers(self, metric: float) -> None:
        """Step every scheduler with a metric, as ReduceLROnPlateau takes it."""
        for scheduler in self._parts.schedulers:
            scheduler.step(metric)

    def apply(self, function: Callable[[], Any]) -> Any:
        """Call a function of the user."""
        return function()

    def apply_operator(self, function: Callable[[TrainingOperator], Any]) -> Any:
        """Call a function of the user with the operator."""
        return function(self.operator)

    def models(self) -> Any:
        """Return copies of the models on CPU, without DistributedDataParallel."""
        return [_copied_to_cpu(replica.unwrap(model)) for model in self._parts.models]

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state, on CPU."""
        shared = self._shared_state()
        place = shared["place"]
        state = {
            "epoch": place["epoch"] + (place["offset"] > 0),
            "global_step": shared["global_step"],
            "operator": shared["operator"],
            **shared["training"],
            "data": place,
        }
        moved: dict[str, Any] = _to_cpu(state)
        return moved

    def rng_state(self) -> dict[str, Any]:
        """Return the states of this worker's random number generators, as plain data."""
        numpy_state: Any = np.random.get_state(legacy=True)
        kind, keys, *rest = numpy_state
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        }
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; the place in the data and the random numbers where it has them."""
        self._end_stretch()
        parts = self._parts
        parts.load_training_state(state)
        if "operator" in state:
            self.operator.load_state_dict(state["operator"])
        place = state.get("data") or {"epoch": state["epoch"], "offset": 0}
        parts.move_to(place, state.get("global_step", 0))
        generators = place.get("rng", ())
        if len(generators) == parts.settings.context.world_size:
            _set_rng_state(generators[parts.settings.context.world_rank])

    def _shared_state(self) -> dict[str, Any]:
        """Return what is the same on every rank."""
        parts = self._parts
        return {
            "training": parts.training_state(),
            "operator": self.operator.state_dict(),
            "place": parts.place(),
            "global_step": parts.global_step,
        }


def build_operator(
    operator_cls: type[TrainingOperator], config: Mapping[str, Any], settings: OperatorSettings
) -> TrainingOperator:
    """Create an operator and run its ``setup``.

    Raises:
        RuntimeError: if its setup registered nothing.
    """
    operator = operator_cls(config, settings)
    operator.setup(operator.config)
    if not operator._parts.registered:
        raise RuntimeError(
            f"{operator_cls.__name__}.setup did not register anything. Call "
            "self.register(models=..., optimizers=...) in it."
        )
    # after setup, so that torch.manual_seed there decides the order of the epochs
    operator._parts.reseed(torch.initial_seed() % 2**62)
    return operator


class _Counted:
    """An iterator that counts what it yields."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.count = 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.count += 1
        return batch


def _call_train_epoch(
    operator: TrainingOperator, steps: Steps, info: Any, limit: int | None, epoch: int
) -> Any:
    """Call ``train_epoch`` with those arguments that its signature takes."""
    given = {"info": info, "num_steps": limit, "epoch_idx": epoch}
    accepted = inspect.signature(operator.train_epoch).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        given = {name: value for name, value in given.items() if name in accepted}
    return operator.train_epoch(steps, **given)


def _checked_result(method: Callable[..., Any], result: Any) -> Mapping[str, Any]:
    if not isinstance(result, Mapping):
        raise TypeError(
            f"{method.__qualname__} returned {type(result).__name__}; it must return a dict of "
            "metrics (which may be empty)."
        )
    return result


def _described(source: Source) -> str:
    if not source.sharded:
        return repr(source.loader)
    shard = source.shard
    return (
        f"{shard.total} samples, batch size {shard.batch_size} on each of {shard.world_size} "
        f"workers, drop_last={shard.drop_last}"
    )


def _device(use_gpu: bool, context: WorkerContext) -> torch.device:
    return torch.device("cuda", context.gpu_index or 0) if use_gpu else torch.device("cpu")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _to_cpu(tree: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples with every tensor on CPU."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone() if tree.device.type == "cpu" else tree.detach().cpu()
    if isinstance(tree, dict):
        return {key: _to_cpu(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_to_cpu(value) for value in tree)
    return tree


def _copied_to_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of `model` on CPU; the model stays where it is, and needs no room twice."""
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        twin = tensor.detach().cpu().clone()
        if isinstance(tensor, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = twin
    import copy

    return copy.deepcopy(model, memo)


def _set_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
