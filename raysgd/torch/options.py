"""The arguments of a TorchTrainer."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from raysgd._internal.arguments import as_int, check_choice, check_number, set_fields
from raysgd._internal.versions import check_oldest
from raysgd.backends import backend_names
from raysgd.data.partition import StepLayout
from raysgd.loop.options import Options, WorkerSettings
from raysgd.torch.precision import PRECISIONS
from raysgd.torch.strategies import conflicts

__all__ = ["BadSteps", "EqualBits", "Guard"]

logger = logging.getLogger(__name__)

_OLD_ARGUMENTS = {
    "model_creator": "training_operator_cls=TrainingOperator.from_creators(model_creator, ...)",
    "data_creator": "training_operator_cls=TrainingOperator.from_creators(..., data_creator=...)",
    "optimizer_creator": "training_operator_cls=TrainingOperator.from_creators(...)",
    "scheduler_creator": "TrainingOperator.from_creators(..., scheduler_creator=...)",
    "loss_creator": "TrainingOperator.from_creators(..., loss_creator=...)",
    "num_replicas": "num_workers",
    "batch_size": "config={raysgd.utils.BATCH_SIZE: ...}",
    "apex_args": "the arguments of self.register(...) in setup",
    "data_loader_args": "the arguments of the DataLoader that you make in setup",
}


@dataclass(frozen=True, kw_only=True)
class Guard:
    """How workers compare their replicas, see ``TorchTrainer(guard=...)``.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of its range.
    """

    every: int = 500
    """Steps between two complete comparisons. With gradient accumulation, this counts updates.
    After a call with fewer steps, workers compare small tensors, and a part of large tensors."""

    def __post_init__(self) -> None:
        set_fields(self, every=as_int("Guard", "every", self.every, 1))


@dataclass(frozen=True)
class EqualBits:
    """Train with the same bits on any number of workers: ``TorchTrainer(exact=EqualBits(8))``.

    Args:
        num_logical_workers: Number of parts of each step. It decides the result, together with the
            data and the seed. ``exact="bits"`` uses `num_workers`. Pass a number to compare or
            resume runs with different `num_workers`. A DataLoader's ``batch_size`` is then the
            number of samples of a logical worker.
    """

    num_logical_workers: int

    def __post_init__(self) -> None:
        number = as_int("EqualBits", "num_logical_workers", self.num_logical_workers, 1)
        set_fields(self, num_logical_workers=number)


@dataclass(frozen=True, kw_only=True)
class BadSteps:
    """Which updates are not applied, see ``TorchTrainer(bad_steps=...)``.

    An update is bad if its loss or its averaged gradient is not finite.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of its range.
    """

    max_skipped: int = 10
    """Number of bad updates in a call. The next one raises a :class:`raysgd.errors.BadStepsError`.
    """
    spike: float | None = None
    """An update is also bad if its loss is above `spike` times the absolute median of the last 100,
    unless this is 0."""

    def __post_init__(self) -> None:
        set_fields(self, max_skipped=as_int("BadSteps", "max_skipped", self.max_skipped, 0))
        if self.spike is not None:
            check_number("BadSteps", "spike", self.spike, above=1)


@dataclass(frozen=True, kw_only=True)
class TorchOptions(Options):
    wrap_ddp: bool = True
    amp_dtype: torch.dtype | None = None
    scheduler_step_freq: str | None = None
    split_on_oom: bool = True
    exact: Any = None
    guard: Any = "check"
    bad_steps: BadSteps | None = None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    trainer_name = "TorchTrainer"
    flags = ("wrap_ddp", "split_on_oom", *Options.flags)
    precisions = PRECISIONS
    supports_measured_shares = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_oldest(self.trainer_name, "torch", torch.__version__)
        frequency, allowed = self.scheduler_step_freq, (None, "batch", "epoch", "manual")
        check_choice(self.trainer_name, "scheduler_step_freq", frequency, allowed)
        if self.guard == "check":
            set_fields(self, guard=Guard())
        if not isinstance(self.guard, Guard | None):
            raise ValueError(
                f'{self.trainer_name}(guard={self.guard!r}): must be "check", None, or '
                "raysgd.Guard(...)."
            )
        if not isinstance(self.bad_steps, BadSteps | None):
            raise TypeError(
                f"{self.trainer_name}(bad_steps={self.bad_steps!r}): must be None or a "
                "raysgd.BadSteps."
            )
        dtypes = (None, torch.float16, torch.bfloat16)
        check_choice(self.trainer_name, "amp_dtype", self.amp_dtype, dtypes)
        if self.amp_dtype is not None and not PRECISIONS[self.use_fp16].takes_dtype:
            raise ValueError(
                f"TorchTrainer(amp_dtype={self.amp_dtype}, use_fp16={self.use_fp16!r}): amp_dtype "
                "is for native AMP. Also pass use_fp16=True."
            )
        if self.exact is not None:
            self._check_exact()

    @functools.cached_property
    def layout(self) -> StepLayout:
        if self.exact is None:
            return super().layout
        is_set = isinstance(self.exact, EqualBits)
        number = self.exact.num_logical_workers if is_set else self.num_workers
        return StepLayout(number, logical_workers_argument='exact="bits"', seeds_parts=True)

    def _check_exact(self) -> None:
        if not isinstance(self.exact, EqualBits):
            check_choice(self.trainer_name, "exact", self.exact, (None, "bits"))
        conflicts.check("equal bits", f"{self.trainer_name}(exact={self.exact!r})", self)
        set_fields(self, split_on_oom=False)  # micro-batches would change the result
        if self.num_workers > self.layout.num_planned_workers(self.num_workers):
            raise ValueError(
                f"{self.trainer_name}(num_workers={self.num_workers}, exact={self.exact!r}): each "
                "worker trains the samples of at least one logical worker. Pass at most as many "
                "workers as logical workers."
            )

    def allowed_backends(self) -> tuple[str, ...]:
        return ("auto", *(name for name in backend_names() if name != "tensorflow"))

    def has_gpus(self) -> bool:
        return torch.cuda.is_available()

    def resolve(self) -> Self:
        decided = super().resolve()
        if self.backend == "nccl" and not decided.use_gpu:
            raise ValueError('backend="nccl" needs GPUs. Pass use_gpu=True, or backend="gloo".')
        if self.backend == "auto":
            # NCCL does not support two workers on one GPU.
            has_own = decided.use_gpu and self.resources_per_worker.get("GPU", 1) >= 1
            return dataclasses.replace(decided, backend="nccl" if has_own else "gloo")
        return decided


def without_old_arguments(
    arguments: Mapping[str, Any], creators: Sequence[Any] = ()
) -> dict[str, Any]:
    """Return the arguments of a TorchTrainer without old ones that have no effect."""
    if creators and hasattr(creators[0], "register_data"):
        name = getattr(creators[0], "__name__", "...")
        raise TypeError(f"Pass the operator by name: TorchTrainer(training_operator_cls={name}).")
    arguments = {**dict(zip(_OLD_ARGUMENTS, creators, strict=False)), **arguments}
    current = {
        n: value for n, value in arguments.items() if n not in _OLD_ARGUMENTS or value is not None
    }
    for name in (name for name in _OLD_ARGUMENTS if name in current):
        raise DeprecationWarning(
            f"TorchTrainer({name}=...) is no longer supported. Use {_OLD_ARGUMENTS[name]} instead."
        )
    if current.pop("serialize_data_creation", None):
        logger.warning(
            "TorchTrainer(serialize_data_creation=True) does nothing. Pass it to "
            "TrainingOperator.from_creators(...)."
        )
    return current


@dataclass
class TorchSettings(WorkerSettings):
    options: TorchOptions = field(default_factory=TorchOptions)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
