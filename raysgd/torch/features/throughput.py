"""Measure how fast this worker computes, for shares that follow speed."""

import statistics
import time
from collections import deque
from typing import Any

import torch

from raysgd.loop.feature import UpdateFeature
from raysgd.loop.update import Update
from raysgd.torch.train_state import TorchTrainState

_NUM_STEPS = 15  # recent steps whose median speed counts


class ThroughputMeter(UpdateFeature):
    """Measures each batch from its start to its last gradient, without communication.

    DistributedDataParallel waits for other workers only after the last gradient. A fully sharded
    model communicates earlier, so its speed cannot be measured.
    """

    def __init__(self, train_state: TorchTrainState) -> None:
        train_state.read_speed = self.samples_per_s
        self._on_gpu = train_state.settings.device.type == "cuda"
        self._began: Any = None
        self._ended: Any = None
        self._size: float | None = None
        self._step: list[tuple[float, Any, Any]] = []
        self._steps: deque[list[tuple[float, Any, Any]]] = deque(maxlen=_NUM_STEPS)
        self._is_first = True
        for model in train_state.models:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._record_gradient_time)

    def samples_per_s(self) -> float:
        # The training thread may append a step in the meantime.
        steps = [s for s in self._steps.copy() if not self._on_gpu or s[-1][2].query()]
        sizes = [sum(size for size, _, _ in step) for step in steps]
        seconds = [sum(self._seconds(began, ended) for _, began, ended in step) for step in steps]
        speeds = [size / s for size, s in zip(sizes, seconds, strict=True) if s > 0]
        return statistics.median(speeds) if speeds else 0.0

    def begin_micro_batch(self, update: Update) -> None:
        self._end_batch()
        if update.micro_batch_index == 0:
            self._step = []
        self._began, self._ended = self._read_clock(), None
        self._size = update.micro_batch.num_samples

    def commit(self, update: Update) -> None:
        self._end_batch()
        if self._step:
            if not self._is_first:  # the first step is slower than others
                self._steps.append(self._step)
            self._step, self._is_first = [], False

    def roll_back(self, update: Update) -> None:
        self.commit(update)  # counts a warm-up batch, which is never committed

    def _end_batch(self) -> None:
        if self._size and self._ended is not None:
            self._step.append((self._size, self._began, self._ended))
        self._ended = None

    def _record_gradient_time(self, parameter: torch.nn.Parameter) -> None:
        self._ended = self._read_clock(self._ended)

    def _read_clock(self, event: Any = None) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = event or torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended) / 1000 if self._on_gpu else ended - began)
