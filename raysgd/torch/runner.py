"""Hosts a TrainingOperator in a worker: calls, places in the data, state, generations."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from raysgd.config import BATCH_SIZE, worker_config
from raysgd.context import PausedError, Progress, WorkerContext
from raysgd.data import Dataset
from raysgd.torch import replica
from raysgd.torch.components import Components, OperatorSettings
from raysgd.torch.fitting import check_place
from raysgd.torch.loop import Loop
from raysgd.torch.snapshots import Snapshots, full_state
from raysgd.torch.state import copied_to_cpu, rng_state, set_rng_state, to_cpu
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
    use_fp16: bool | str = False
    amp_dtype: torch.dtype | None = None
    snapshot_every: Literal["epoch"] | int | None = None


class TorchRunner:
    """Hosts one operator. See :class:`raysgd.context.Runner` for what runs in which thread."""

    # torch imports the last one, half of all that it imports, with the first optimizer
    imports = ("raysgd.torch", "torch.distributed", "torch._dynamo")

    def __init__(self, options: TorchRunnerOptions) -> None:
        self._options = options
        self._loop: Loop | None = None
        self._asked_pause: int | None = None
        self._own_pause: int | None = None

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
            use_fp16=options.use_fp16,
            amp_dtype=options.amp_dtype,
            batch_share=config.get(BATCH_SIZE),
        )
        self._loop = Loop(build_operator(options.operator_cls, config, settings))
        self._loop.snapshots = Snapshots(options.snapshot_every)
        if context.world_size > 1:
            # the order of the epochs must be one; each process drew a seed of its own
            seed, data = replica.broadcast_state(
                lambda: (self._parts.seed, self._parts.fingerprint()), 0, settings.device
            )
            self._parts.reseed(seed)
            self._check_data(data)

    def rejoin(self, context: WorkerContext, leader: int) -> None:
        """Enter a new generation with the state of rank `leader`."""
        config = worker_config(self._options.config, context.world_size)
        if BATCH_SIZE in config:
            self.operator.config[BATCH_SIZE] = config[BATCH_SIZE]
        parts, place = self._parts, self._parts.place()
        parts.enter(context, config.get(BATCH_SIZE))
        if context.distributed:
            state = replica.broadcast_state(self._shared_state, leader, parts.settings.device)
            if context.world_rank != leader:
                self._check_data(state["data"])
                # what is not replicated stays as each worker has it, and a newcomer has nothing
                if parts.replicated or parts.global_step == 0:
                    parts.load_training_state(state["training"])
                    self.operator.load_state_dict(state["operator"])
                parts.move_to(state["place"], state["global_step"])
                self._running.join_call(state["call"])
        self._running.keep_iteration(moved=parts.place() != place)

    def teardown(self) -> None:
        """Let go of the operator and of the processes of its loaders."""
        if self._loop is not None:
            self._loop.forget_iteration()
            self._parts.release()
        self._loop = None

    def _check_data(self, expected: dict[str, str]) -> None:
        """Check that this worker shares out the same data as the others."""
        own = self._parts.fingerprint()
        for name in expected.keys() & own.keys():
            if own[name] != expected[name]:
                raise ValueError(
                    f"The workers registered different data as {name}_loader: {own[name]} on "
                    f"worker {self.operator.world_rank}, and {expected[name]} on another. A loader "
                    "that is shared out needs the same data set on every worker: seed what is "
                    "random in setup (random_split takes a generator). Where each worker reads a "
                    "part of its own, pass add_dist_sampler=False to the trainer."
                )

    @property
    def operator(self) -> TrainingOperator:
        """The operator."""
        return self._running.operator

    @property
    def _running(self) -> Loop:
        if self._loop is None:
            raise RuntimeError("This worker has no operator: its setup has not finished.")
        return self._loop

    @property
    def _parts(self) -> Components:
        return self.operator._parts

    # ---- read and set from another thread

    def progress(self) -> Progress:
        """Say how far training is."""
        if self._loop is None:
            return Progress()
        parts, steps = self._parts, self._loop.steps
        meters = parts.meters if steps is not None else None
        return Progress(
            epoch=parts.epoch,
            in_epoch=parts.offset > 0,
            global_step=parts.global_step,
            num_batches=self._loop.num_batches,
            total_batches=None if steps is None else steps.total_batches,
            num_covered=self._loop.num_covered,
            num_samples=0 if meters is None else int(meters.num_samples),
            step_s=0.0 if steps is None else steps.step_s,
            snapshot=self._loop.snapshots.step,
            loss=None if meters is None else _number(meters.last("train_loss")),
        )

    def request_stop(self, requested: bool) -> None:
        """Let the loop under way raise at its next step."""
        steps = None if self._loop is None else self._loop.steps
        if steps is not None:
            steps.stop_requested = requested

    def pause_at(self, step: int | None) -> int:
        """Let the call under way pause at a step; returns the step that it is at."""
        self._asked_pause = step
        return self._apply_pause()

    def _apply_pause(self) -> int:
        """Let the loop pause at the first step of those that the driver and the call ask for."""
        while self._loop is not None:
            asked = [step for step in (self._asked_pause, self._own_pause) if step is not None]
            first = min(asked, default=None)
            reached = self._loop.pause_at(first)
            # the other thread may have asked meanwhile; whoever comes last sees what both ask for
            latest = [step for step in (self._asked_pause, self._own_pause) if step is not None]
            if min(latest, default=None) == first:
                return reached
        return 0

    def snapshot(self) -> dict[str, Any] | None:
        """Return the newest snapshot, on CPU."""
        return None if self._loop is None else self._loop.snapshots.get()

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
        stop_at: int | None = None,
    ) -> Mapping[str, Any] | None:
        """Train until so many epochs are completed, or so many steps are done, in all.

        Returns:
            The metrics; None if it stopped at the step `stop_at` before it was there. The same
            call made again goes on, and its metrics cover all of it.
        """
        loop = self._running
        self._own_pause = stop_at
        self._apply_pause()
        try:
            return loop.train(call, until_epoch, until_step, info, profile, dataset)
        except PausedError:
            if stop_at is None or self._parts.global_step < stop_at:
                raise  # it was the driver that asked for this one
            return None
        finally:
            self._own_pause = None
            self._apply_pause()

    def can_validate(self) -> bool:
        """Return whether there is a validation loader."""
        try:
            self._parts.source("validation")
        except RuntimeError:
            return False
        return True

    def validate(
        self,
        *,
        call: int,
        num_steps: int | None = None,
        info: dict[str, Any] | None = None,
        profile: bool = False,
    ) -> Mapping[str, Any]:
        """Evaluate the rest of the validation loader, or `num_steps` steps of it."""
        return self._running.validate(call, num_steps, info, profile)

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
        return [copied_to_cpu(replica.unwrap(model)) for model in self._parts.models]

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state, on CPU."""
        state: dict[str, Any] = to_cpu(full_state(self._parts, self.operator))
        return state

    def rng_state(self) -> dict[str, Any]:
        """Return the states of this worker's random number generators, as plain data."""
        return rng_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; the place in the data and the random numbers where it has them."""
        parts = self._parts
        if parts.settings.context.in_driver:
            # not pickled on its way here, and torch would train on with the caller's tensors
            state = copy.deepcopy(state)
        check_place(state)
        parts.check_training_state(state)
        if "operator" in state:  # first: user code may refuse it, and nothing is changed then
            self.operator.load_state_dict(state["operator"])
        parts.load_training_state(state)
        self._running.forget_iteration()
        if "call" in state:  # a snapshot, not a saved state: the call goes on
            self._running.join_call(state["call"])
        self._running.snapshots.clear()
        place = state.get("data") or {"epoch": state["epoch"], "offset": 0}
        parts.move_to(place, state.get("global_step", 0))
        generators = place.get("rng", ())
        if len(generators) == parts.settings.context.world_size:
            set_rng_state(generators[parts.settings.context.world_rank])

    def _shared_state(self) -> dict[str, Any]:
        """Return what is the same on every rank."""
        parts = self._parts
        return {
            "training": parts.training_state(),
            "operator": self.operator.state_dict(),
            "place": parts.place(),
            "global_step": parts.global_step,
            "call": self._running.call_state(),
            "data": parts.fingerprint(),
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
    operator._parts.adopt_wrappers(vars(operator).values())
    if not operator._parts.registered:
        raise RuntimeError(
            f"{operator_cls.__name__}.setup did not register anything. Call "
            "self.register(models=..., optimizers=...) in it."
        )
    # after setup, so that torch.manual_seed there decides the order of the epochs
    operator._parts.reseed(torch.initial_seed() % 2**62)
    return operator


def _device(use_gpu: bool, context: WorkerContext) -> torch.device:
    return torch.device("cuda", context.gpu_index or 0) if use_gpu else torch.device("cpu")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
