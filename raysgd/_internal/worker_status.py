"""The status that a worker reports to the driver, by the part of the driver that reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from raysgd._internal.step_timing import PhaseTotals


@dataclass(frozen=True, kw_only=True)
class LogPoint:
    """What a worker has measured since its last point, for ``fit(log_every=...)``."""

    call_number: int
    global_step: int
    num_completed_epochs: int
    in_epoch: bool
    metrics: Any  # packed, unless the worker is in the driver's process; None without metrics
    timing: PhaseTotals
    seconds: float  # of training
    reaches_log_step: bool = True  # and the worker is not leaving


class ReportedPosition(NamedTuple):
    """Where a worker is in the run. `raysgd.elastic` reads it, and keeps that of the group."""

    num_completed_epochs: int = 0
    in_epoch: bool = False  # whether the worker has started another epoch
    global_step: int = 0
    validation_offset: int = 0  # where the next ``validate`` begins
    num_batches: int = 0  # batches finished in the current call or epoch, whichever began last
    epoch_samples: int = 0  # samples of an epoch of training, or 0 if unknown


class BatchProgress(NamedTuple):
    """What a progress bar shows. `CallExecutor` reads it, and passes it to callbacks."""

    global_step: int = 0
    num_batches: int = 0  # as `ReportedPosition.num_batches`
    num_total_batches: int | None = None  # None if unknown
    num_samples: int = 0  # samples finished in the current call or epoch
    latest_metrics: Mapping[str, float] = {}  # the first ones


class Measurements(NamedTuple):
    """What a worker has measured. It adds `link_speeds`. `raysgd.elastic` reads it."""

    step_s: float = 0.0  # mean seconds per step, or 0 if unknown
    samples_per_s: float = 0.0  # samples that this worker computes per second, or 0 if unknown
    timing: PhaseTotals | None = None  # seconds of training by phase
    link_speeds: Mapping[str, float] = {}  # bytes/s to the hosts of others
    log_points: Sequence[LogPoint] = ()  # that the driver has not acknowledged


class SnapshotStatus(NamedTuple):
    """Which snapshot a worker has. `SnapshotKeeper` reads it."""

    step: int | None = None  # committed steps in the newest snapshot
    num_invalidations: int = 0  # changes between steps that outdated the snapshots


class UpdateStatus(NamedTuple):
    """How a worker updates its models. `raysgd.driver` reads it."""

    num_splits: int = 1  # micro-batches per batch, above 1 after a worker ran out of memory
    bad_steps: Sequence[dict[str, Any]] = ()  # steps of the call that were not applied


class StateStatus(NamedTuple):
    """What a worker has of the state. `StatePlacement` writes it, and `raysgd.elastic` reads it."""

    is_complete: bool = True
    """Whether the worker has all of the state. Otherwise it may have the only copy of a shard."""
    condition: Literal["good", "damaged", "lost"] = "good"
    """``damaged`` if an optimizer raised within a step; another worker may have a good state.
    ``lost`` if all workers with some shard of the state were lost."""


class ProcessStatus(NamedTuple):
    """What a process does. The worker adds the last two. `raysgd.elastic` reads it."""

    is_blocked_on_driver: bool = False  # or the worker's code has ended
    failure_place: str = ""  # step and batch where the newest request failed, as text
    current_collective: int | None = None  # number of the collective that the worker waits for
    terminated_s: float | None = None  # seconds since the process got SIGTERM


class WorkerStatus(NamedTuple):
    """Status of a worker. Another thread reads it while the worker is busy.

    The runner writes the fields. On the driver, each field has one reader, a module or a package.
    """

    position: ReportedPosition = ReportedPosition()
    batches: BatchProgress = BatchProgress()
    measured: Measurements = Measurements()
    snapshot: SnapshotStatus = SnapshotStatus()
    updates: UpdateStatus = UpdateStatus()
    state_status: StateStatus = StateStatus()
    process: ProcessStatus = ProcessStatus()
