"""Training functions that communicate by Horovod."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd._internal.arguments import check_timeout
from raysgd._internal.context import WorkerContext
from raysgd.backends import Backend as Transport
from raysgd.comm.horovod import HorovodBackend as HorovodGroup
from raysgd.comm.horovod import HorovodRendezvous, check_horovod
from raysgd.train.backend import Backend, BackendConfig
from raysgd.train.data_parallel_trainer import DataParallelTrainer

__all__ = ["HorovodConfig", "HorovodTrainer"]

_LOG_LEVELS = ("error", "warning", "info", "debug")


class HorovodBackend(Backend):
    """Has nothing to do beside the transport: the function calls ``hvd.init()``."""

    share_cuda_visible_devices = True


@dataclass
class HorovodConfig(BackendConfig):
    """Settings of the Horovod backend; call ``hvd.init()`` in the function.

    Raises:
        ImportError: if Horovod is not installed.
        ValueError: if a value is not allowed.
    """

    nics: set[str] | None = None
    """Names of the network interfaces by which the workers talk: gloo by the first of them in
    alphabetical order, NCCL by all. None: that of the node's address."""
    verbose: int = 1
    """How much Horovod logs: 0 errors, 1 warnings, 2 what it does, 3 all."""
    key: str | None = None
    """Taken for older scripts, as the ``ssh_`` ones: Ray starts the workers, and nothing goes
    through ssh."""
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_str: str | None = None
    timeout_s: float = 300
    """Bound of the workers' setup, in seconds."""
    placement_group_timeout_s: float = 100
    """Taken for older scripts, where it had no effect either: ``TRAIN_PLACEMENT_GROUP_TIMEOUT_S``
    in the environment is the bound of the wait for room."""

    backend_cls = HorovodBackend

    def __post_init__(self) -> None:
        check_horovod()
        if self.nics is not None and (isinstance(self.nics, str) or not self.nics):
            raise ValueError(
                f'HorovodConfig(nics={self.nics!r}): must be a set of names, such as {{"eth0"}}.'
            )
        check_timeout(type(self).__name__, self.timeout_s)

    def transport(self, use_gpu: bool = False) -> Transport:
        """Return what gives the workers Horovod's environment."""
        level = _LOG_LEVELS[max(0, min(int(self.verbose), len(_LOG_LEVELS) - 1))]
        variables = {"HOROVOD_LOG_LEVEL": level}
        if self.nics:
            names = sorted(self.nics)
            variables |= {"HOROVOD_GLOO_IFACE": names[0], "NCCL_SOCKET_IFNAME": ",".join(names)}
        return FunctionHorovod(self.timeout_s, variables)


class FunctionHorovod(HorovodGroup):
    """The environment of Horovod, for functions that initialize it themselves.

    Which group a process is in is the function's affair then: all restart after an error.

    Args:
        timeout_s: bound of joining a group, in seconds.
        variables: further environment variables.
    """

    rejoins = False

    def __init__(self, timeout_s: float, variables: Mapping[str, str]) -> None:
        super().__init__("horovod", timeout_s, framework=None)
        self._variables = dict(variables)

    def setup(self, context: WorkerContext, rendezvous: HorovodRendezvous | None) -> None:
        """Set the environment."""
        super().setup(context, rendezvous)
        os.environ.update(self._variables)


class HorovodTrainer(DataParallelTrainer):
    """Runs a training function that communicates by Horovod on several workers.

    Args:
        train_loop_per_worker: takes no argument, or the config.
        train_loop_config: the config.
        horovod_config: settings of the backend.
        arguments: further arguments of :class:`raysgd.train.DataParallelTrainer`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        horovod_config: HorovodConfig | None = None,
        **arguments: Any,
    ) -> None:
        arguments.setdefault("backend_config", horovod_config or HorovodConfig())
        super().__init__(train_loop_per_worker, train_loop_config=train_loop_config, **arguments)
