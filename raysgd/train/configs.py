"""Configs of a training run, with the names of current Ray Train.

Trainers also accept the Ray classes with these names, and convert them.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from raysgd._internal.arguments import as_dict, as_int
from raysgd._internal.paths import as_path
from raysgd.elastic.config import ElasticConfig
from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.checkpoint import CheckpointConfig


@dataclass
class ScalingConfig:
    """The number of workers, and the resources that each reserves."""

    num_workers: int | tuple[int, int] = 1
    """Number of workers; with ``(min, max)``, as many workers start as fit."""
    use_gpu: bool = False
    """Whether each worker reserves a GPU."""
    resources_per_worker: Mapping[str, float] | None = None
    """Resources of each worker; ``CPU`` and ``GPU`` replace the default of one each."""
    placement_strategy: str = "PACK"
    """How Ray places the workers: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD"."""


@dataclass
class FailureConfig:
    """How to respond to lost workers."""

    max_failures: int = 0
    """How often a run may lose workers; -1: no limit. An error in the function is not retried."""
    elastic: ElasticConfig | None = None
    """How to wait for resources after a loss; None for the defaults."""


@dataclass
class RunConfig:
    """Where to store a run, how to handle losses, and which callbacks to call."""

    name: str | None = None
    """Name of the folder of the run; None for the trainer's name and the date."""
    storage_path: str | os.PathLike[str] | None = None
    """Parent folder of the run; None for ``~/ray_results``."""
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: Sequence[TrainingCallback] | None = None
    """Callbacks that receive the reports of the workers."""


_Config = TypeVar("_Config", ScalingConfig, FailureConfig, CheckpointConfig, RunConfig)


def as_scaling_config(config: Any) -> ScalingConfig:
    """Return the ScalingConfig for a trainer argument: a config of raysgd or Ray, or a dict."""
    if isinstance(config, Mapping):
        return ScalingConfig(**config)
    if getattr(config, "label_selector", None):
        raise ValueError(
            f"ScalingConfig(label_selector={config.label_selector!r}) is not supported. Give the "
            "nodes a custom resource, and request it with resources_per_worker."
        )
    return _convert(ScalingConfig, "scaling_config", config, "num_workers")


def executor_arguments(scaling: ScalingConfig, failure: FailureConfig) -> dict[str, Any]:
    """Return the arguments of `BackendExecutor` for these configs."""
    use_gpu = scaling.use_gpu
    resources = as_dict("ScalingConfig", "resources_per_worker", scaling.resources_per_worker)
    if use_gpu not in (True, False):  # 1 and 0 as well
        raise TypeError(f"use_gpu={use_gpu!r}: must be True or False.")
    num_cpus, num_gpus = resources.pop("CPU", 1), resources.pop("GPU", int(use_gpu))
    if bool(use_gpu) != (num_gpus > 0):
        raise ValueError(
            f"resources_per_worker={{'GPU': {num_gpus!r}}} contradicts use_gpu={use_gpu}. Change "
            "one of them."
        )
    return {
        "num_workers": scaling.num_workers,
        "num_cpus_per_worker": num_cpus,
        "num_gpus_per_worker": num_gpus,
        "additional_resources_per_worker": resources,
        "max_retries": failure.max_failures,
        "elastic": failure.elastic,
        "placement_strategy": scaling.placement_strategy,
    }


def as_run_config(run_config: Any) -> RunConfig:
    """Return the RunConfig for a trainer argument, from raysgd or Ray."""
    config = _convert(RunConfig, "run_config", run_config, "failure_config")
    failure, checkpoint = config.failure_config, config.checkpoint_config
    config.failure_config = _convert(FailureConfig, "failure_config", failure, "max_failures")
    config.checkpoint_config = _convert(
        CheckpointConfig, "checkpoint_config", checkpoint, "num_to_keep"
    )
    as_int("FailureConfig", "max_failures", config.failure_config.max_failures, -1)
    name = config.name
    if name is not None and (
        not isinstance(name, str) or name in ("", "..") or Path(name).name != name
    ):
        raise ValueError(
            f"RunConfig(name={name!r}): must be the name of a folder, without a path. Pass its "
            "parent folder as storage_path."
        )
    if config.storage_path is not None:
        as_path("storage_path", config.storage_path)
    return config


def _convert(cls: type[_Config], name: str, config: Any, attribute: str) -> _Config:
    """Return a raysgd config with the attributes of another config. None gives the defaults."""
    if config is None:
        return cls()
    if not hasattr(config, attribute):  # Ray's configs share no base class with raysgd's
        raise TypeError(f"{name}={config!r}: must be a {cls.__name__}.")
    return cls(**{f.name: getattr(config, f.name) for f in fields(cls) if hasattr(config, f.name)})
