"""Callbacks of training functions. They receive the reports of the workers."""

from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.callbacks.logging import (
    JsonLoggerCallback,
    MLflowLoggerCallback,
    TBXLoggerCallback,
)
from raysgd.train.callbacks.print import PrintCallback
from raysgd.train.callbacks.profile import TorchTensorboardProfilerCallback

__all__ = [
    "JsonLoggerCallback",
    "MLflowLoggerCallback",
    "PrintCallback",
    "TBXLoggerCallback",
    "TorchTensorboardProfilerCallback",
    "TrainingCallback",
]
