"""Callbacks observe training from the driver, and can ask it to stop.

>>> from raysgd.callbacks import CheckpointCallback, EarlyStopping
>>> callbacks = [EarlyStopping("val_loss", patience=3)]

``TorchTrainer(callbacks=callbacks)`` attaches them for the life of the trainer, and
``trainer.fit(10, callbacks=callbacks)`` for one call. ``pip install "raysgd[callbacks]"`` installs
the packages that some of them need.
"""

from raysgd._internal.worker_status import BatchProgress as BatchProgress
from raysgd.callbacks.averaging import EMA as EMA
from raysgd.callbacks.averaging import SWA as SWA
from raysgd.callbacks.base import Callback as Callback
from raysgd.callbacks.base import CallInfo as CallInfo
from raysgd.callbacks.base import History as History
from raysgd.callbacks.base import LoggerCallback as LoggerCallback
from raysgd.callbacks.checkpoint import CheckpointCallback as CheckpointCallback
from raysgd.callbacks.loggers import CsvLogger as CsvLogger
from raysgd.callbacks.loggers import JsonlLogger as JsonlLogger
from raysgd.callbacks.loggers import MLflowLogger as MLflowLogger
from raysgd.callbacks.loggers import TensorBoardLogger as TensorBoardLogger
from raysgd.callbacks.loggers import WandbLogger as WandbLogger
from raysgd.callbacks.measurements import DeviceStatsMonitor as DeviceStatsMonitor
from raysgd.callbacks.measurements import LearningRateMonitor as LearningRateMonitor
from raysgd.callbacks.measurements import ModelSummary as ModelSummary
from raysgd.callbacks.measurements import TorchProfiler as TorchProfiler
from raysgd.callbacks.progress import EpochPrinter as EpochPrinter
from raysgd.callbacks.progress import ProgressBar as ProgressBar
from raysgd.callbacks.report import RunReport as RunReport
from raysgd.callbacks.stopping import EarlyStopping as EarlyStopping
from raysgd.callbacks.stopping import TerminateOnNaN as TerminateOnNaN

# Export every class above.
__all__ = sorted(name for name, value in globals().items() if isinstance(value, type))
