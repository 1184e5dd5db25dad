"""The arguments of a TorchTrainer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Self

import torch

from raysgd._internal.arguments import check_choice
from raysgd._internal.versions import check_oldest
from raysgd.backends import backend_names
from raysgd.loop.options import Options
from raysgd.torch.precision import PRECISIONS


@dataclass(frozen=True, kw_only=True)
class TorchOptions(Options):
    wrap_ddp: bool = True
    amp_dtype: torch.dtype | None = None
    scheduler_step_freq: str | None = None
    split_on_oom: bool = True
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    trainer = "TorchTrainer"
    flags = ("wrap_ddp", "split_on_oom", *Options.flags)
    precisions = PRECISIONS

    def __post_init__(self) -> None:
        if self.use_fp16 == "apex":
            raise ValueError(
                'TorchTrainer(use_fp16="apex"): new versions of NVIDIA Apex have no apex.amp. Pass '
                "use_fp16=True for the mixed precision of PyTorch."
            )
        super().__post_init__()
        check_oldest(self.trainer, "torch", torch.__version__)
        frequencies = (None, "batch", "epoch", "manual")
        check_choice(self.trainer, "scheduler_step_freq", self.scheduler_step_freq, frequencies)
        dtypes = (None, torch.float16, torch.bfloat16)
        check_choice(self.trainer, "amp_dtype", self.amp_dtype, dtypes)
        if self.amp_dtype is not None and self.use_fp16 is not True:
            raise ValueError(
                f"TorchTrainer(amp_dtype={self.amp_dtype}, use_fp16={self.use_fp16!r}): amp_dtype "
                "is for native AMP. Also pass use_fp16=True."
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
