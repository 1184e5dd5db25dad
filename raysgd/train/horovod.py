"""Training functions that communicate through Horovod."""

from dataclasses import dataclass
from typing import Any

from raysgd._internal.arguments import check_timeout
from raysgd.backends import CollectiveBackend
from raysgd.comm.horovod import HorovodBackend, check_horovod
from raysgd.train.backend import Backend, BackendConfig
from raysgd.train.data_parallel_trainer import DataParallelTrainer

__all__ = ["HorovodConfig", "HorovodTrainer"]

_LOG_LEVELS = ("error", "warning", "info", "debug")


class TrainHorovodBackend(Backend):
    """Backend that sets up nothing, because the function calls ``hvd.init()``."""

    share_cuda_visible_devices = True


@dataclass
class HorovodConfig(BackendConfig):
    """Settings of the Horovod backend. Call ``hvd.init()`` in the function."""

    nics: set[str] | None = None
    """Names of the network interfaces of the workers. None selects the interface of the node's
    address. NCCL uses all of them, and gloo uses the first in alphabetical order."""
    verbose: int = 1
    """Log level of Horovod: 0 errors, 1 warnings, 2 info, 3 debug."""
    key: str | None = None
    """Ignored, like the ``ssh_`` fields: Ray starts the workers without ssh. Kept for older
    scripts."""
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_str: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    """Ignored; set ``TRAIN_PLACEMENT_GROUP_TIMEOUT_S`` in the environment. Kept for older
    scripts."""

    backend_cls = TrainHorovodBackend

    def __post_init__(self) -> None:
        check_horovod()
        if self.nics is not None and (isinstance(self.nics, str) or not self.nics):
            raise ValueError(
                f'HorovodConfig(nics={self.nics!r}): must be a set of names, such as {{"eth0"}}.'
            )
        check_timeout(type(self).__name__, self.timeout_s)

    def collective_backend(self, use_gpu: bool = False) -> CollectiveBackend:
        level = _LOG_LEVELS[max(0, min(int(self.verbose), len(_LOG_LEVELS) - 1))]
        variables = {"HOROVOD_LOG_LEVEL": level}
        if self.nics:
            names = sorted(self.nics)
            variables |= {"HOROVOD_GLOO_IFACE": names[0], "NCCL_SOCKET_IFNAME": ",".join(names)}
        return HorovodBackend("horovod", self.timeout_s, framework=None, variables=variables)


class HorovodTrainer(DataParallelTrainer):
    """A `DataParallelTrainer` for Horovod, with the settings of `horovod_config`."""

    def __init__(
        self, *arguments: Any, horovod_config: HorovodConfig | None = None, **others: Any
    ) -> None:
        super().__init__(*arguments, backend_config=horovod_config or HorovodConfig(), **others)
