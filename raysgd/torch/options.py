"""The arguments of a TorchTrainer: what they must be, and what follows from them."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Self

import torch

from raysgd.arguments import check_choice
from raysgd.backends import backend_names
from raysgd.options import Options
from raysgd.torch.precision import PRECISIONS

__all__ = ["TorchOptions"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TorchOptions(Options):
    """See :class:`raysgd.options.Options`."""

    wrap_ddp: bool = True
    amp_dtype: torch.dtype | None = None
    scheduler_step_freq: str | None = None

    trainer = "TorchTrainer"
    flags = ("wrap_ddp", *Options.flags)
    precisions = PRECISIONS

    def __post_init__(self) -> None:
        super().__post_init__()
        frequencies = (None, "batch", "epoch", "manual")
        check_choice(self.trainer, "scheduler_step_freq", self.scheduler_step_freq, frequencies)
        dtypes = (None, torch.float16, torch.bfloat16)
        check_choice(self.trainer, "amp_dtype", self.amp_dtype, dtypes)
        if self.amp_dtype is not None and self.use_fp16 is not True:
            raise ValueError(
                f"TorchTrainer(amp_dtype={self.amp_dtype}, use_fp16={self.use_fp16!r}): amp_dtype "
                "is for native AMP; pass use_fp16=True with it."
            )

    def backends(self) -> tuple[str, ...]:
        return ("auto", *(name for name in backend_names() if name != "tensorflow"))

    def own_gpus(self) -> bool:
        return torch.cuda.is_available()

    def decided(self) -> Self:
        """See :meth:`raysgd.options.Options.decided`; the backend follows from the GPUs."""
        decided = super().decided()
        if decided.use_gpu and self.use_local and not self.inline:
            self._do_without_gpus()
            decided = dataclasses.replace(decided, use_gpu=False)
        if self.backend == "nccl" and not decided.use_gpu:
            raise ValueError('backend="nccl" needs GPUs: pass use_gpu=True, or backend="gloo".')
        if self.backend == "auto":
            return dataclasses.replace(decided, backend="nccl" if decided.use_gpu else "gloo")
        return decided

    def _do_without_gpus(self) -> None:
        """Warn that the first of several workers lives in the driver's process, and has no GPU.

        Ray assigns GPUs to its own processes, and would give the same one to another.

        Raises:
            ValueError: if GPUs were asked for.
        """
        if self.use_gpu is True or "GPU" in self.resources_per_worker:
            raise ValueError(
                "TorchTrainer(use_local=True, use_gpu=True) needs num_workers=1: of several "
                "workers the one in this process can be assigned no GPU. Leave use_local out, or "
                "pass use_gpu=False."
            )
        logger.warning(
            "Training on CPUs, although the cluster has GPUs: with use_local=True the first of "
            "several workers lives in this process, and can be assigned none."
        )
