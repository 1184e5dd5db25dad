"""One run of a training function in a worker: its thread, reports, and checkpoints.

A worker process has one session at a time, shared by all of its threads.
"""

import ast
import io
import logging
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from raysgd._internal.nonfinite import Finiteness, find_newly_nonfinite, finiteness
from raysgd._internal.runner import WorkerContext
from raysgd._internal.values import numbers_in
from raysgd.cluster.process import end_wandb
from raysgd.cluster.serialization import PackedValue, pack, portable_pickler, unpicklable_key
from raysgd.train import constants
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.result_queue import ResultKind, ResultQueue, RunStoppedError, TrainingResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSpec:
    """Everything that a worker needs to run a function. A restart replaces the checkpoint."""

    run_id: str = ""
    """Unique name of the run."""
    function: bytes = b""
    checkpoint: bytes | None = None
    iteration: int = 0
    """Number of reports before the checkpoint."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    folder: str = ""
    """Folder of the run on the driver; empty if there is none."""
    encode: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """`encode_data` of the user's backend; None if the backend does not override it."""
    full_world_size: int | None = None
    """Number of workers of the full group, which sets the global batch size. None scales the batch
    with the group."""


class Session:
    """One run of a training function in this process."""

    def __init__(self, spec: RunSpec, result_queue: ResultQueue) -> None:
        self.spec = spec
        self.result_queue = result_queue
        self.iteration = spec.iteration
        self._checkpoint = spec.checkpoint
        self._newest_arrays: Finiteness | None = None
        """The arrays of the newest checkpoint. None if nothing has read it."""
        self._pid = os.getpid()
        self._reported_at = time.monotonic()
        self.thread = threading.Thread(target=self._run, name="raysgd-train-function", daemon=True)

    def _run(self) -> None:
        process_state.session, process_state.accelerator, process_state.seed = self, None, None
        try:
            if (state := sys.modules.get("accelerate.state")) is not None:
                state.AcceleratorState._reset_state(True)  # a run may use another precision
            process_state.select_gpu()
            before = num_collectives()
            value = pickle.loads(self.spec.function)()
            context = worker_context()
            has_communicated = before is None or num_collectives() != before
            if context.world_size > 1 and context.world_rank == 0 and not has_communicated:
                logger.warning(
                    "The training function ended on %d workers, and they never communicated. If "
                    "they train one model, wrap it with raysgd.train.torch.prepare_model().",
                    context.world_size,
                )
            end = TrainingResult("end", content=_pack_result(value), iteration=self.iteration)
        except BaseException as error:
            end = TrainingResult("end", error=error)
        if not isinstance(end.error, RunStoppedError):
            end_wandb(failed=end.error is not None)
        if process_state.session is self:
            process_state.session = None  # before the driver sees the end and begins another run
        self.result_queue.end(end)

    # ---- calls from the function

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
        self._check_process()
        now = time.monotonic()
        encoded: Any = {
            constants.TIME_THIS_ITER_S: now - self._reported_at,
            **metrics,
            constants.TIMESTAMP: int(time.time()),
            constants.TRAINING_ITERATION: self.iteration + 1,
        }
        if self.spec.encode is not None:
            encoded = self.spec.encode(encoded)
        content = _pack_report(encoded)
        self._reported_at = now
        if checkpoint is None:
            self._send("report", content)
        else:
            state = Checkpoint.from_any(checkpoint).to_dict()
            # A number in the checkpoint rates it, even if the report has another of that name.
            own = {name: v for name, v in state.items() if not isinstance(v, Mapping)}
            self._send("report", content, numbers_in(metrics) | numbers_in(own), state)

    def save(self, state: Mapping[str, Any]) -> None:
        self._check_process()
        stamped = {**state, constants.TIMESTAMP: int(time.time())}
        self._send("checkpoint", None, numbers_in(state), stamped)

    def load(self) -> Checkpoint | None:
        return None if self._checkpoint is None else Checkpoint(blob=self._checkpoint)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "A forked process cannot report or save, because it has no connection to the "
                "driver. Send the values to the process of the worker, and report there."
            )

    def _send(
        self,
        kind: ResultKind,
        content: PackedValue | None,
        numbers: Mapping[str, float] | None = None,
        checkpoint: dict[str, Any] | None = None,
    ) -> None:
        """Pass a result to the driver. The driver keeps the checkpoint of worker 0 only."""
        arrays, blob = finiteness(checkpoint), None
        nonfinite_array = self._find_nonfinite(arrays)
        if checkpoint is not None and not nonfinite_array:
            if self.spec.metadata:
                described = Checkpoint(checkpoint)
                described.set_metadata({**self.spec.metadata, **described.get_metadata()})
                checkpoint = described.to_dict()
            blob = own = _pickle(checkpoint)
            if self.spec.encode is not None:
                blob = _pickle(self.spec.encode(checkpoint))
            self._checkpoint, self._newest_arrays = own, arrays
        self.iteration += kind == "report"
        self.result_queue.put(
            TrainingResult(
                kind,
                content=content,
                checkpoint=blob if worker_context().world_rank == 0 else None,
                has_checkpoint=checkpoint is not None,
                nonfinite_array=nonfinite_array,
                numbers={**(numbers or {}), constants.TIMESTAMP: time.time()},
                iteration=self.iteration,
            )
        )

    def _find_nonfinite(self, arrays: Finiteness) -> str:
        """Return an array with NaN or infinity that is finite in the newest checkpoint, or ""."""
        is_finite = all(is_finite for _, is_finite in arrays.values())
        if self._newest_arrays is None and not is_finite and (newest := self.load()):
            self._newest_arrays = finiteness(newest.to_dict())
        return find_newly_nonfinite(arrays, self._newest_arrays or {})


def _pickle(state: Any) -> bytes:
    """Pickle a checkpoint for readers without a GPU, a process group, or raysgd."""
    file = io.BytesIO()
    try:
        portable_pickler(cloudpickle.Pickler)(file).dump(state)
    except Exception as error:
        raise TypeError(
            f"This checkpoint cannot be pickled: {error}. Save state_dict() of models and "
            "optimizers, and plain values."
        ) from error
    return file.getvalue()


def _pack_report(metrics: Any) -> PackedValue:
    """Pack reported metrics immediately, so that the function may change the originals."""
    try:
        packed = pack(metrics, portable=True)  # its buffers still share memory with the originals
        return PackedValue(packed.data, [bytes(buffer.raw()) for buffer in packed.buffers])
    except Exception as error:
        name = unpicklable_key(metrics) if isinstance(metrics, Mapping) else None
        raise TypeError(
            f"report(): the metric {name!r} cannot be pickled: {error}. Report plain values."
        ) from error


def num_collectives() -> int | None:
    """Return the number of PyTorch collectives so far; None if unknown."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized() or len(dist.distributed_c10d._world.pg_map) > 1:
        return None  # raysgd does not count groups that the function creates
    return getattr(dist.group.WORLD, "num_operations", None)


def _pack_result(value: Any) -> PackedValue | None:
    """Pack what the function returned; None, with a warning, if it cannot be pickled."""
    try:
        return pack(value, portable=True)
    except Exception as error:
        logger.warning(
            "The driver gets None, because the training function returned a %s that cannot be "
            "pickled: %s",
            type(value).__name__,
            error,
        )
        return None


# ---- state of this process


@dataclass
class _ProcessState:
    session: Session | None = None
    select_gpu: Callable[[], object] = lambda: None
    """Makes the GPU of this worker the current one of the calling thread."""
    context: WorkerContext | None = None
    """Context of this worker, also between runs. None outside of a worker."""
    datasets: Any = None
    """This worker's data sets, for the current session or the next one."""
    accelerator: Any = None
    """Precision and prepared optimizers of the run, if it uses `raysgd.train.torch`."""
    seed: int | None = None
    """Argument of ``enable_reproducibility`` in the run."""


process_state = _ProcessState()


def worker_context() -> WorkerContext:
    """Return this worker's context; outside of a worker, that of a single worker."""
    # Processes that a loader spawns inherit only the environment.
    text = os.environ.get(constants.WORKER_CONTEXT_ENV) if multiprocessing.parent_process() else ""
    return process_state.context or WorkerContext(**ast.literal_eval(text or "{}"))


def set_datasets(datasets: Any) -> None:
    process_state.datasets = datasets
