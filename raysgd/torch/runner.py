"""Runs a TrainingOperator in a worker."""

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from raysgd._internal.dynamo import postpone_dynamo
from raysgd._internal.imports import refuse_triton
from raysgd._internal.runner import WorkerContext
from raysgd.loop.operator_base import as_list, create_operator
from raysgd.loop.operator_runner import OperatorRunner
from raysgd.torch.collectives import watch_user_collectives
from raysgd.torch.modules import is_ddp
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.options import TorchOptions, TorchSettings
from raysgd.torch.register_checks import warn_of_other_loaders, warn_of_unregistered
from raysgd.torch.state_access import TorchStateAccess

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable that cuBLAS reads when PyTorch first uses it."""


class TorchRunner(OperatorRunner):
    """Runs one operator. `Runner` documents which thread calls each method."""

    _options: TorchOptions

    # ---- lifecycle

    def prepare(self, context: WorkerContext) -> None:
        if not context.is_in_driver:
            postpone_dynamo()
            torch.set_num_threads(max(1, int(context.num_cpus)))
            torch.set_default_dtype(self._options.default_dtype)
        if self._options.exact is not None:
            self._fix_arithmetic(max(1, int(context.num_cpus)))
        if context.visible_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.visible_gpus)
        if self._options.use_gpu:
            # Without Ray, use the current GPU of the script.
            alone = context.is_in_driver and context.world_size == 1
            if not (context.gpu_index is not None or alone) or not torch.cuda.is_available():
                raise RuntimeError(
                    f"Worker {context.world_rank} on {context.node_ip} must use a GPU, but PyTorch "
                    "finds none. Install PyTorch with CUDA there, or pass use_gpu=False."
                )
            if context.gpu_index is not None:
                torch.cuda.set_device(context.gpu_index)

    def setup(self, context: WorkerContext) -> None:
        operator_cls, config, arguments = self._worker_arguments(context)
        if "tensorflow" in sys.modules:  # a module of the operator has imported it
            refuse_triton()
        device = _choose_device(bool(self._options.use_gpu), context)
        operator = build_operator(operator_cls, config, TorchSettings(device=device, **arguments))
        if context.has_process_group:
            report = operator._update_features.checks.refuse_collective
            watch_user_collectives(report, self.restoring.callback)
        self.start_operator(operator, TorchStateAccess(operator._train_state))

    def _fix_arithmetic(self, num_threads: int) -> None:
        """Make the results of operations reproducible until `teardown`."""
        self.restoring.close()
        restore, cudnn = self.restoring.callback, torch.backends.cudnn
        restore(torch.set_num_threads, torch.get_num_threads())
        restore(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        restore(setattr, cudnn, "benchmark", cudnn.benchmark)
        if _WORKSPACE not in os.environ:
            restore(os.environ.pop, _WORKSPACE, None)
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(True)
        cudnn.benchmark = False
        os.environ.setdefault(_WORKSPACE, ":4096:8")

    # ---- answers to requests

    def update_schedulers(self, call_number: int, metric: float) -> None:
        loop = self._hosted_loop
        if loop.train_state.call.scheduler_call == call_number:
            return  # the schedulers have already stepped in the loaded state
        self.operator._update_features.lr_scheduling.step_with_metric(metric)
        loop.train_state.call.scheduler_call = call_number
        loop.snapshots.clear(is_outdated=True)
        loop.snapshots.take_if_due()


def build_operator(
    operator_cls: type[TrainingOperator], config: Mapping[str, Any], settings: TorchSettings
) -> TrainingOperator:
    operator: TrainingOperator = create_operator(operator_cls, config, settings)
    train_state = operator._train_state
    attributes = [each for value in vars(operator).values() for each in as_list(value)]
    train_state.exchange.use_wrappers([each for each in attributes if is_ddp(each)])
    if settings.context.world_rank == 0:
        modules = [*train_state.models, *train_state.criteria]
        kinds: tuple[type, ...] = (torch.optim.Optimizer,)
        if train_state.scheduler_step_freq in ("batch", "epoch") and not train_state.schedulers:
            kinds += (torch.optim.lr_scheduler.LRScheduler,)  # otherwise, user code may step them
        warn_of_unregistered(operator, [*modules, *train_state.optimizers], kinds)
        if settings.options.num_workers > 1 and settings.options.add_dist_sampler:
            warn_of_other_loaders(operator, train_state.data.registered_loaders.values())
    # Reseed after setup, so that torch.manual_seed in setup decides the order of the epochs.
    train_state.data.reseed(torch.initial_seed() % 2**62)
    operator._seed_worker()
    operator._update_features.unregistered_tensors.watch(operator)
    return operator


def _choose_device(use_gpu: bool, context: WorkerContext) -> torch.device:
    if not use_gpu:
        return torch.device("cpu")
    # The module of the operator may have set another current GPU than `TorchRunner.prepare`.
    index = torch.cuda.current_device() if context.gpu_index is None else context.gpu_index
    return torch.device("cuda", index)
