"""The PyTorch trainer and backend of training functions: a process group over the workers."""

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch

from raysgd._internal.arguments import check_choice, check_timeout
from raysgd._internal.dynamo import postpone_dynamo
from raysgd._internal.runner import WorkerContext
from raysgd.backends import CollectiveBackend
from raysgd.comm.torch import TorchCollectiveBackend, TorchRendezvous
from raysgd.train.backend import Backend, BackendConfig
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.train.worker_session import process_state


class TorchBackend(Backend):
    """Sets up nothing in addition to the process group of `TorchConfig`."""

    share_cuda_visible_devices = True


@dataclass
class TorchConfig(BackendConfig):
    """Settings of the PyTorch backend."""

    backend: str | None = None
    """"gloo" or "nccl"; None selects nccl if the workers have GPUs, otherwise gloo."""
    init_method: str = "env"
    """With "env", workers get MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK; with "tcp"
    they do not get them. The process group is the same."""
    timeout_s: float = 1800
    """Seconds that a collective, or the setup of the workers, may take."""

    backend_cls = TorchBackend

    def __post_init__(self) -> None:
        check_choice("TorchConfig", "backend", self.backend, ("gloo", "nccl", None))
        check_choice("TorchConfig", "init_method", self.init_method, ("env", "tcp"))
        check_timeout(type(self).__name__, self.timeout_s)

    def collective_backend(self, use_gpu: bool = False) -> CollectiveBackend:
        name = self.backend or ("nccl" if use_gpu else "gloo")
        prepare = functools.partial(prepare_process, self.init_method == "env")
        return TorchCollectiveBackend(name, self.timeout_s, prepare)


def prepare_process(
    sets_env: bool, context: WorkerContext, rendezvous: TorchRendezvous | None
) -> None:
    """Select the GPU of a worker, and set the environment variables of torchrun if `sets_env`."""
    if not context.is_in_driver:
        postpone_dynamo()
    if context.gpu_index is not None and torch.cuda.is_available():
        index = context.gpu_index if context.gpu_index < torch.cuda.device_count() else 0
        process_state.select_gpu = functools.partial(torch.cuda.set_device, index)
        process_state.select_gpu()
    if not sets_env:
        return
    os.environ.update(
        RANK=str(context.world_rank),
        LOCAL_RANK=str(context.local_rank),
        WORLD_SIZE=str(context.world_size),
        LOCAL_WORLD_SIZE=str(context.local_world_size),
        NODE_RANK=str(context.node_rank),
        GROUP_RANK=str(context.node_rank),
        # Lightning uses these variables to find the other workers, unless its Trainer gets devices.
        TORCHELASTIC_RUN_ID="raysgd",
        PL_TRAINER_DEVICES=str(context.local_world_size),
        PL_TRAINER_NUM_NODES=str(context.world_size // context.local_world_size),
    )
    if context.gpu_index is None:
        os.environ.setdefault("PL_TRAINER_ACCELERATOR", "cpu")
        # Otherwise, Accelerate and Transformers use one process on CPU workers.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    if rendezvous is not None:
        os.environ.update(MASTER_ADDR=rendezvous.store.host, MASTER_PORT=str(rendezvous.store.port))


class TorchTrainer(DataParallelTrainer):
    """A `DataParallelTrainer` for PyTorch. `torch_config` has the settings of the process group."""

    def __init__(
        self, *arguments: Any, torch_config: TorchConfig | None = None, **others: Any
    ) -> None:
        super().__init__(*arguments, backend_config=torch_config or TorchConfig(), **others)
