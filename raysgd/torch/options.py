"""The arguments of a TorchTrainer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch

from raysgd._internal.arguments import check_choice, check_int, set_fields
from raysgd._internal.versions import check_oldest
from raysgd.backends import backend_names
from raysgd.loop.options import Options
from raysgd.torch.precision import PRECISIONS

__all__ = ["EqualBits", "Guard"]


@dataclass(frozen=True, kw_only=True)
class Guard:
    """How workers compare their replicas, see ``TorchTrainer(guard=...)``.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of its range.
    """

    every: int = 500
    """Steps between two complete comparisons. With gradient accumulation, this counts updates.
    After a call with fewer steps, workers compare small tensors, and a share of large tensors."""
    on_difference: Literal["error", "repair"] = "error"
    """``"repair"``: a minority of the workers takes the state of the majority. Without a majority,
    and with sharding, a difference is an error."""
    crosscheck_every: int | None = None
    """Steps between two tests of the hardware. In a test, all workers compute the gradients of the
    same batch, which takes about as long as a step. None: no tests."""

    def __post_init__(self) -> None:
        set_fields(self, every=check_int("Guard", "every", self.every, 1))
        if self.crosscheck_every is not None:
            number = check_int("Guard", "crosscheck_every", self.crosscheck_every, 1)
            set_fields(self, crosscheck_every=number)
        check_choice("Guard", "on_difference", self.on_difference, ("error", "repair"))


def _checked_guard(trainer: str, guard: Any) -> Guard | None:
    if guard is None or isinstance(guard, Guard):
        return guard
    if guard in ("check", "repair"):
        return Guard(on_difference="repair" if guard == "repair" else "error")
    raise ValueError(
        f'{trainer}(guard={guard!r}): must be "check", "repair", None, or raysgd.Guard(...).'
    )


@dataclass(frozen=True)
class EqualBits:
    """Train with the same bits on any number of workers: ``TorchTrainer(exact=EqualBits(8))``.

    Args:
        num_shards: Number of parts of each step. It decides the result, together with the data and
            the seed. ``exact="bits"`` uses `num_workers`. Pass a number to compare or resume runs
            with different `num_workers`. A DataLoader's ``batch_size`` is then the size of a shard.
    """

    num_shards: int

    def __post_init__(self) -> None:
        check_int("EqualBits", "num_shards", self.num_shards, 1)


@dataclass(frozen=True, kw_only=True)
class TorchOptions(Options):
    wrap_ddp: bool = True
    amp_dtype: torch.dtype | None = None
    scheduler_step_freq: str | None = None
    split_on_oom: bool = True
    exact: Any = None
    guard: Any = "check"
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    trainer = "TorchTrainer"
    flags = ("wrap_ddp", "split_on_oom", *Options.flags)
    precisions = PRECISIONS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_oldest(self.trainer, "torch", torch.__version__)
        frequencies = (None, "batch", "epoch", "manual")
        check_choice(self.trainer, "scheduler_step_freq", self.scheduler_step_freq, frequencies)
        set_fields(self, guard=_checked_guard(self.trainer, self.guard))
        self._check_crosscheck()
        dtypes = (None, torch.float16, torch.bfloat16)
        check_choice(self.trainer, "amp_dtype", self.amp_dtype, dtypes)
        if self.amp_dtype is not None and self.use_fp16 is not True:
            raise ValueError(
                f"TorchTrainer(amp_dtype={self.amp_dtype}, use_fp16={self.use_fp16!r}): amp_dtype "
                "is for native AMP. Also pass use_fp16=True."
            )
        if self.num_shards is not None:
            self._check_exact()

    def _check_crosscheck(self) -> None:
        every = self.guard and self.guard.crosscheck_every
        is_possible = self.wrap_ddp and not self.use_horovod and self.num_workers > 1
        is_possible = is_possible and self.num_shards is None
        if every and not is_possible:
            raise ValueError(
                f"{self.trainer}(guard=Guard(crosscheck_every={every})): this needs at least two "
                "workers, wrap_ddp=True, and neither Horovod nor exact. Leave out crosscheck_every."
            )

    @property
    def num_shards(self) -> int | None:  # type: ignore[override]
        """Parts of each step with ``exact="bits"``, which do not depend on the workers."""
        if self.exact is None:
            return None
        return self.exact.num_shards if isinstance(self.exact, EqualBits) else self.num_workers

    def _check_exact(self) -> None:
        if not isinstance(self.exact, EqualBits):
            check_choice(self.trainer, "exact", self.exact, (None, "bits"))
        conflicts = {
            "use_horovod": self.use_horovod and 'backend="horovod"',
            "apex": self.use_fp16 == "apex" and 'use_fp16="apex"',
            "wrap_ddp": not self.wrap_ddp and "wrap_ddp=False",
            "sampler": not self.add_dist_sampler and "add_dist_sampler=False",
            "batch": self.elastic.global_batch != "keep"
            and f"ElasticConfig(global_batch={self.elastic.global_batch!r})",
        }
        for conflict in filter(None, conflicts.values()):
            raise ValueError(
                f"{self.trainer}(exact={self.exact!r}) does not work with {conflict}. Leave out "
                "one of the two."
            )
        set_fields(self, split_on_oom=False)  # smaller parts would change the result
        if self.num_shards is not None and self.num_workers > self.num_shards:
            raise ValueError(
                f"{self.trainer}(num_workers={self.num_workers}, exact={self.exact!r}): each "
                "worker trains at least one shard. Pass at most as many workers as shards."
            )

    def backends(self) -> tuple[str, ...]:
        return ("auto", *(name for name in backend_names() if name != "tensorflow"))

    def own_gpus(self) -> bool:
        return torch.cuda.is_available()

    def decided(self) -> Self:
        decided = super().decided()
        if self.backend == "nccl" and not decided.use_gpu:
            raise ValueError('backend="nccl" needs GPUs. Pass use_gpu=True, or backend="gloo".')
        if self.backend == "auto":
            # NCCL does not support two workers on one GPU.
            has_own = decided.use_gpu and self.resources_per_worker.get("GPU", 1) >= 1
            return dataclasses.replace(decided, backend="nccl" if has_own else "gloo")
        return decided
