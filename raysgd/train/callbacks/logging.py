"""The loggers among the callbacks, by the module that older scripts import them from."""

from __future__ import annotations

from raysgd.train.callbacks.json_logger import JsonLoggerCallback
from raysgd.train.callbacks.mlflow import MLflowLoggerCallback
from raysgd.train.callbacks.tensorboard import TBXLoggerCallback

__all__ = ["JsonLoggerCallback", "MLflowLoggerCallback", "TBXLoggerCallback"]
