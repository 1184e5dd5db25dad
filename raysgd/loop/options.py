"""The arguments of operator trainers, and the settings of a worker."""

import dataclasses
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from raysgd._internal.arguments import (
    MAX_WORKERS,
    as_dict,
    as_int,
    check_choice,
    check_flags,
    check_timeout,
    is_number,
    set_fields,
)
from raysgd._internal.config import BATCH_SIZE, round_batch_size
from raysgd._internal.runner import WorkerContext
from raysgd.backends import CollectiveBackend, create_backend
from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.serialization import PackedValue, pack
from raysgd.comm.horovod import check_horovod
from raysgd.data.partition import StepLayout
from raysgd.elastic.config import as_elastic_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options(ABC):
    """The arguments of trainers. :class:`raysgd.TorchTrainer` documents them."""

    training_operator_cls: Any = None
    config: Any = None
    num_workers: int = 1
    min_workers: int = 1
    num_cpus_per_worker: float = 1
    resources_per_worker: Any = None
    use_gpu: bool | str = False
    backend: str = "auto"
    timeout_s: float = 1800
    use_fp16: bool | str = False
    use_tqdm: bool = False
    add_dist_sampler: bool = True
    use_local: bool = False
    elastic: Any = None

    trainer_name: ClassVar[str]
    flags: ClassVar[Sequence[str]] = ("use_tqdm", "add_dist_sampler", "use_local")  # booleans
    precisions: ClassVar[Collection[Any]]  # allowed values of ``use_fp16``
    supports_measured_shares: ClassVar[bool] = (
        False  # whether shares can follow the speed of the workers
    )

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, tuple | list):
            raise TypeError(
                f"{self.trainer_name}(num_workers={self.num_workers!r}): must be an int, the "
                "maximum. Pass the minimum as min_workers."
            )
        num_workers = as_int(self.trainer_name, "num_workers", self.num_workers, 1, MAX_WORKERS)
        min_workers = as_int(self.trainer_name, "min_workers", self.min_workers)
        if not 1 <= min_workers <= num_workers:
            raise ValueError(
                f"{self.trainer_name}(min_workers={min_workers}, num_workers={num_workers}): "
                "min_workers must be between 1 and num_workers."
            )
        config = as_dict(self.trainer_name, "config", self.config)
        set_fields(
            self,
            num_workers=num_workers,
            min_workers=min_workers,
            config=config,
            resources_per_worker=self._resources(),
            elastic=as_elastic_config(
                self.trainer_name, self.elastic, self.supports_measured_shares
            ),
        )
        if config.get(BATCH_SIZE) is not None:
            argument = "num_logical_workers" if self.layout.has_logical_workers else "num_workers"
            number = self.layout.num_planned_workers(num_workers)
            config[BATCH_SIZE] = round_batch_size(config[BATCH_SIZE], number, argument)
        check_choice(self.trainer_name, "use_gpu", self.use_gpu, (True, False, "auto"))
        check_choice(self.trainer_name, "backend", self.backend, self.allowed_backends())
        check_choice(self.trainer_name, "use_fp16", self.use_fp16, self.precisions)
        check_flags(self.trainer_name, **{name: getattr(self, name) for name in self.flags})
        check_timeout(self.trainer_name, self.timeout_s)
        if self.use_horovod:
            check_horovod()

    def _resources(self) -> dict[str, float]:
        resources = as_dict(self.trainer_name, "resources_per_worker", self.resources_per_worker)
        amounts = {f"resources_per_worker[{name!r}]": amount for name, amount in resources.items()}
        amounts["num_cpus_per_worker"] = self.num_cpus_per_worker
        for name, amount in amounts.items():
            if not is_number(amount) or not amount > 0:
                raise ValueError(
                    f"{self.trainer_name}({name}={amount!r}): must be above 0. To reserve almost "
                    "no CPU, pass 0.001."
                )
        if "CPU" in resources:
            raise ValueError(
                f"{self.trainer_name}(resources_per_worker=...) has 'CPU'. Use num_cpus_per_worker."
            )
        if self.use_local and self.num_workers == 1 and (amount := resources.get("GPU", 1)) != 1:
            raise ValueError(
                f"{self.trainer_name}(use_local=True, resources_per_worker={{'GPU': {amount!r}}}): "
                "the worker in this process uses one GPU. Remove GPU or use_local."
            )
        return resources

    @classmethod
    def from_arguments(cls, values: Mapping[str, Any], **computed: Any) -> Self:
        """Create options from the arguments of a trainer, and from `computed` ones."""
        names = {option.name for option in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in names} | computed)

    # ---- for subclasses

    @abstractmethod
    def allowed_backends(self) -> tuple[str, ...]: ...

    @abstractmethod
    def has_gpus(self) -> bool:
        """Return whether this process has GPUs."""

    def make_backend(self) -> CollectiveBackend:
        """Return the backend for several workers."""
        return create_backend(self.backend, self.timeout_s)

    # ---- transfer to workers

    def __getstate__(self) -> dict[str, Any]:
        """Pack the operator and its config, because only `setup` may import TensorFlow."""
        state = dict(vars(self))
        contents = state.pop("training_operator_cls"), state.pop("config")
        return {**state, "packed": pack(contents)}

    def unpack(self) -> tuple[Any, dict[str, Any]]:
        """Return the operator's class and the config. Each call on a worker returns new objects."""
        packed: PackedValue | None = vars(self).get("packed")
        if packed is None:
            return self.training_operator_cls, self.config
        # Large arrays stay in Ray's shared memory, which is read-only.
        contents: tuple[Any, dict[str, Any]] = packed.unpack(copies=not packed.needs_object_store)
        return contents

    # ---- derived values

    @property
    def use_horovod(self) -> bool:
        return self.backend == "horovod"

    @functools.cached_property
    def layout(self) -> StepLayout:
        """How a step is cut."""
        return StepLayout(self.num_workers if self.elastic.global_batch == "keep" else None)

    def resolve(self) -> Self:
        """Return options without "auto", by whether the cluster, or this process, has GPUs."""
        asks_for_gpus = "GPU" in self.resources_per_worker
        if asks_for_gpus and self.use_gpu is False:
            raise ValueError(
                f"{self.trainer_name}(resources_per_worker={{'GPU': ...}}, use_gpu=False): these "
                "contradict each other. Remove GPU, or pass use_gpu=True."
            )
        use_gpu, is_inline = self.use_gpu, self.use_local and self.num_workers == 1
        if use_gpu == "auto":
            use_gpu = self.has_gpus() if is_inline else asks_for_gpus or _gpus_in_cluster() > 0
        if use_gpu and self.use_local and not is_inline:
            # Ray would assign the GPU that this process uses to another worker
            if self.use_gpu is True or asks_for_gpus:
                raise ValueError(
                    f"{self.trainer_name}(use_local=True, use_gpu=True) needs num_workers=1, "
                    "because Ray cannot assign a GPU to this process. Remove use_local, or pass "
                    "use_gpu=False."
                )
            logger.warning(
                "Training on CPUs, although the cluster has GPUs. With use_local=True, the first "
                "worker lives in this process, and Ray cannot assign a GPU to it."
            )
            use_gpu = False
        return dataclasses.replace(self, use_gpu=use_gpu)

    def group_options(self, start_timeout_s: float) -> GroupOptions:
        """Return the resources of the workers. Requires options from `resolve`."""
        resources = dict(self.resources_per_worker)
        return GroupOptions(
            num_workers=self.num_workers,
            min_workers=self.min_workers,
            num_cpus=self.num_cpus_per_worker,
            num_gpus=resources.pop("GPU", 1) if self.use_gpu else 0,
            resources=resources,
            use_local=self.use_local,
            start_timeout_s=start_timeout_s,
        )


@dataclass
class WorkerSettings:
    """The trainer's arguments, and the rank and resources of this worker."""

    options: Options
    context: WorkerContext = field(default_factory=WorkerContext)
    # ``config[BATCH_SIZE]`` of the operator: in ``setup`` as in a full group, then as in this one.
    worker_batch_size: int | None = None
    requested_global_batch_size: int | None = None  # ``config[BATCH_SIZE]`` of the trainer
    _warned: set[str] = field(default_factory=set, repr=False)

    @property
    def partition_arguments(self) -> dict[str, Any]:
        """Arguments with which a source partitions data for the group."""
        return {
            "world_size": self.context.world_size,
            "rank": self.context.world_rank,
            "layout": self.options.layout,
            "requested_global_batch_size": self.requested_global_batch_size,
        }

    def warn_once(self, key: str, message: str, *values: Any, anywhere: bool = False) -> None:
        """Log a warning, once for each `key`, on rank 0 or `anywhere`."""
        if (anywhere or self.context.world_rank == 0) and key not in self._warned:
            self._warned.add(key)
            logger.warning(message, *values)


def _gpus_in_cluster() -> float:
    from raysgd.cluster import ray_session

    ray_session.connect()
    return ray_session.gpus_in_cluster()
