"""Runs a TrainingOperator in a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raysgd._internal.config import BATCH_SIZE
from raysgd._internal.context import Request, WorkerContext
from raysgd._internal.dynamo import postpone_dynamo
from raysgd._internal.nested import map_leaves
from raysgd.loop.operator_base import check_registered, create_operator
from raysgd.loop.runner import OperatorRunner
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.options import TorchOptions
from raysgd.torch.register_checks import warn_of_own_schedulers, warn_of_unregistered
from raysgd.torch.registration import adopt_wrappers
from raysgd.torch.seeding import TorchGenerators
from raysgd.torch.sharded_files import with_tensors, write_state, write_weights
from raysgd.torch.sharding.pieces import gather_state
from raysgd.torch.train_state import OperatorSettings, TorchTrainState


@dataclass(frozen=True, kw_only=True)
class SaveTensorsRequest(Request):
    """Write this worker's tensors of the state into a file.

    Rank 0 returns the rest of the state, and the hash of the file.
    """

    folder: str


@dataclass(frozen=True, kw_only=True)
class SaveWeightsRequest(Request):
    """Write this worker's parameters of sharded models into a file.

    Rank 0 returns the rest of the models' states, and the further names of tied parameters.
    """

    folder: str


class TorchRunner(OperatorRunner):
    """Runs one operator. `Runner` documents which thread calls each method."""

    _options: TorchOptions

    def __init__(self, options: TorchOptions) -> None:
        super().__init__(options)
        self.generators = TorchGenerators()

    # ---- lifecycle

    def prepare(self, context: WorkerContext) -> None:
        if not context.in_driver:
            postpone_dynamo()
            torch.set_num_threads(max(1, int(context.num_cpus)))
        if context.visible_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.visible_gpus)
        if self._options.use_gpu:
            # Without Ray, use the current GPU of the script.
            alone = context.in_driver and context.world_size == 1
            if not (context.gpu_index is not None or alone) or not torch.cuda.is_available():
                raise RuntimeError(
                    f"Worker {context.world_rank} on {context.node_ip} must use a GPU, but PyTorch "
                    "finds none. Install PyTorch with CUDA there, or pass use_gpu=False."
                )
            if context.gpu_index is not None:
                torch.cuda.set_device(context.gpu_index)

    def setup(self, context: WorkerContext) -> None:
        options = self._options
        operator_cls, config, global_batch = self._given(context)
        settings = OperatorSettings(
            options=options,
            context=context,
            device=_device(bool(options.use_gpu), context),
            batch_share=config.get(BATCH_SIZE),
            global_batch=global_batch,
        )
        self.host(build_operator(operator_cls, config, settings))

    # ---- answers to requests

    def handle_own(self, request: Request) -> Any:
        match request:
            case SaveTensorsRequest():
                return self.save_tensors(request.folder)
            case SaveWeightsRequest():
                return self.save_weights(request.folder)
        return super().handle_own(request)

    def save_tensors(self, folder: str) -> tuple[dict[str, Any], str] | None:
        state = map_leaves(self.state_dict(), lambda leaf: leaf)
        found = write_state(self._train_state, state, folder)
        return (state, found) if self._train_state.context.world_rank == 0 else None

    def save_weights(self, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, str]] | None:
        rest, other_names = write_weights(self._train_state, folder)
        is_first = self._train_state.context.world_rank == 0
        return (self._train_state.to_cpu(rest), other_names) if is_first else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        given = with_tensors(gather_state(state), copy=not self._train_state.sharded)
        super().load_state_dict(given)

    def update_schedulers(self, call: int, metric: float) -> None:
        loop = self._running
        if loop.scheduled == call:
            return  # the schedulers have already stepped in the loaded state
        self._train_state.schedules.step_with(metric)
        loop.scheduled = call
        loop.snapshots.clear()
        loop.snapshots.maybe_take(loop.state_with_call)

    def models(self) -> Any:
        self._train_state.step.check_whole(self._train_state.global_step)
        return self._train_state.whole_models()

    @property
    def _train_state(self) -> TorchTrainState:
        train_state: TorchTrainState = self.operator._train_state
        return train_state


def build_operator(
    operator_cls: type[TrainingOperator], config: Mapping[str, Any], settings: OperatorSettings
) -> TrainingOperator:
    operator: TrainingOperator = create_operator(operator_cls, config, settings)
    operator.setup(operator.config)
    adopt_wrappers(operator._train_state, vars(operator).values())
    check_registered(operator)
    state = operator._train_state
    if settings.context.world_rank == 0:
        warn_of_own_schedulers(operator, state.schedulers, settings.options.scheduler_step_freq)
        warn_of_unregistered(operator, [*state.models, *state.criteria, *state.optimizers])
    # Reseed after setup, so that torch.manual_seed in setup decides the order of the epochs.
    state.reseed(torch.initial_seed() % 2**62)
    operator._seed_worker()
    return operator


def _device(use_gpu: bool, context: WorkerContext) -> torch.device:
    if not use_gpu:
        return torch.device("cpu")
    index = torch.cuda.current_device() if context.gpu_index is None else context.gpu_index
    return torch.device("cuda", index)
