"""Callbacks of training functions. They receive the reports of the workers."""

from raysgd.train.callbacks.callback import TrainingCallback as TrainingCallback
from raysgd.train.callbacks.logging import JsonLoggerCallback as JsonLoggerCallback
from raysgd.train.callbacks.logging import MLflowLoggerCallback as MLflowLoggerCallback
from raysgd.train.callbacks.logging import TBXLoggerCallback as TBXLoggerCallback
from raysgd.train.callbacks.print import PrintCallback as PrintCallback
from raysgd.train.callbacks.profile import (
    TorchTensorboardProfilerCallback as TorchTensorboardProfilerCallback,
)

# Export every function and class above.
__all__ = sorted(name for name, value in globals().items() if callable(value))
