"""Callbacks of training functions: they see what the workers report."""

from __future__ import annotations

from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.callbacks.json_logger import JsonLoggerCallback
from raysgd.train.callbacks.mlflow import MLflowLoggerCallback
from raysgd.train.callbacks.printing import PrintCallback
from raysgd.train.callbacks.profiler import TorchTensorboardProfilerCallback
from raysgd.train.callbacks.tensorboard import TBXLoggerCallback

__all__ = [
    "JsonLoggerCallback",
    "MLflowLoggerCallback",
    "PrintCallback",
    "TBXLoggerCallback",
    "TorchTensorboardProfilerCallback",
    "TrainingCallback",
]
