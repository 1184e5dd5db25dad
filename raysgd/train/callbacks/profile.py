"""TorchTensorboardProfilerCallback, by the module that older scripts import it from."""

from __future__ import annotations

from raysgd.train.callbacks.profiler import TorchTensorboardProfilerCallback

__all__ = ["TorchTensorboardProfilerCallback"]
