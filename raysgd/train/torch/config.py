"""The torch backend of training functions: a process group over the workers."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from raysgd._internal.arguments import check_timeout
from raysgd._internal.context import WorkerContext
from raysgd._internal.dynamo import postpone_dynamo
from raysgd.backends import Backend as Transport
from raysgd.comm.torch import TorchBackend as ProcessGroup
from raysgd.comm.torch import TorchRendezvous
from raysgd.train.backend import Backend, BackendConfig

__all__ = ["TorchBackend", "TorchConfig", "TrainProcessGroup"]

_INIT_METHODS = ("env", "tcp")


class TorchBackend(Backend):
    """Has nothing to do beside the process group, which is `TorchConfig`'s.

    Subclass it to set up more: a subclass of TorchConfig names yours as ``backend_cls``.
    """

    share_cuda_visible_devices = True


@dataclass
class TorchConfig(BackendConfig):
    """Settings of the torch backend.

    Raises:
        ValueError: if a value is not allowed.
    """

    backend: str | None = None
    """"gloo" or "nccl"; None: nccl where the workers have GPUs, else gloo."""
    init_method: str = "env"
    """"env" sets MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK on the workers, for code
    that reads them; "tcp" does not. The process group is the same with both."""
    timeout_s: float = 1800
    """Bound of each collective and of the workers' setup, in seconds."""

    backend_cls = TorchBackend

    def __post_init__(self) -> None:
        if self.backend not in (None, "gloo", "nccl"):
            why = ' (A group of "mpi" is that of mpirun: Ray cannot start it.)'
            raise ValueError(
                f'TorchConfig(backend={self.backend!r}): must be "gloo", "nccl" or None.'
                f"{why if self.backend == 'mpi' else ''}"
            )
        if self.init_method not in _INIT_METHODS:
            raise ValueError(
                f'TorchConfig(init_method={self.init_method!r}): must be "env" or "tcp".'
            )
        check_timeout(type(self).__name__, self.timeout_s)

    def transport(self, use_gpu: bool = False) -> Transport:
        """Return the process group."""
        name = self.backend or ("nccl" if use_gpu else "gloo")
        return TrainProcessGroup(name, self.timeout_s, self.init_method == "env")


class TrainProcessGroup(ProcessGroup):
    """A process group also for one worker, and what code that looks for it finds around it.

    Args:
        name: "gloo" or "nccl".
        timeout_s: bound of each collective, in seconds.
        sets_env: whether to set the variables by which torch's launcher tells ranks.
    """

    def __init__(self, name: str, timeout_s: float, sets_env: bool) -> None:
        super().__init__(name, timeout_s)
        self._sets_env = sets_env

    def setup(self, context: WorkerContext, rendezvous: TorchRendezvous | None) -> None:
        """Enter the generation."""
        if not context.in_driver:
            postpone_dynamo()
        if context.gpu_index is not None and torch.cuda.is_available():
            index = context.gpu_index if context.gpu_index < torch.cuda.device_count() else 0
            torch.cuda.set_device(index)
        super().setup(context, rendezvous)
        if self._sets_env:
            os.environ.update(
                RANK=str(context.world_rank),
                LOCAL_RANK=str(context.local_rank),
                WORLD_SIZE=str(context.world_size),
                LOCAL_WORLD_SIZE=str(context.local_world_size),
                NODE_RANK=str(context.node_rank),
                GROUP_RANK=str(context.node_rank),
                # by these the Trainer of Lightning finds the other workers, unless it gets devices
                TORCHELASTIC_RUN_ID="raysgd",
                PL_TRAINER_DEVICES=str(context.local_world_size),
                PL_TRAINER_NUM_NODES=str(context.world_size // context.local_world_size),
            )
            if context.gpu_index is None:
                os.environ.setdefault("PL_TRAINER_ACCELERATOR", "cpu")
                # without it Accelerate and Transformers take each CPU worker for a world of its own
                os.environ.setdefault("ACCELERATE_USE_CPU", "true")
            if rendezvous is not None:
                os.environ.update(
                    MASTER_ADDR=rendezvous.store.host, MASTER_PORT=str(rendezvous.store.port)
                )
