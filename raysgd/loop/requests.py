"""Requests to workers of an operator. Those that recovery needs are in `raysgd.elastic.call`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raysgd._internal.runner import Request
from raysgd.data import Dataset


@dataclass(frozen=True, kw_only=True)
class _EpochRequest(Request):
    call_number: int  # a repeated request has the same number
    info: dict[str, Any] = field(default_factory=dict)
    profile: bool = False


class CallbackPause:
    """Answer to a `TrainRequest` whose training has paused at `callback_pause_step`."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest(_EpochRequest):
    """Train up to an absolute goal, so that a repeated request trains only the missing steps.

    The answer is the metrics, or a `CallbackPause`. A repeated request then continues, and its
    metrics cover the whole call.
    """

    until_epoch: int | None = None  # completed epochs to reach; training ends at the first goal
    adds_epoch: bool = True  # if an epoch that has begun has no batch left, train the next one
    until_step: int | None = None  # committed steps to reach
    start_step: int = 0  # committed steps before the call; replayed earlier steps do not count
    start_epoch: int = 0  # completed epochs before the call
    callback_pause_step: int | None = None  # step at which to pause; None to train up to the goal
    min_splits: int = 0  # minimum number of micro-batches per batch, after memory ran out
    log_every: int | None = None  # steps between two points; None for none
    dataset: Dataset | None = None  # replaces the registered loader
    shares: tuple[float, ...] | None = None  # relative shares of the workers, by rank
    ends_at_nonfinite_loss: bool = (
        False  # end after the first update with a loss that is not finite
    )

    def for_attempt(self, shares: tuple[float, ...] | None, min_splits: int) -> TrainRequest:
        return replace(self, shares=shares, min_splits=min_splits)


@dataclass(frozen=True, kw_only=True)
class ValidateRequest(_EpochRequest):
    """Evaluate the rest of the validation loader, or `num_steps` steps, and return metrics."""

    num_steps: int | None = None  # None for the rest of the loader
    offset: int = 0  # where to start in the registered loader
    loader: Any = None  # replaces the registered loader; may be a function that returns a loader
    is_sanity_check: bool = False  # restore the state after the evaluation


@dataclass(frozen=True, kw_only=True)
class PredictRequest(Request):
    """Return a worker's predictions batch by batch, with their positions in the loader."""

    loader: Any


@dataclass(frozen=True, kw_only=True)
class LeavingMetricsRequest(Request):
    """Return the metrics of a worker that leaves before the end of a call of `train`."""

    call_number: int


@dataclass(frozen=True, kw_only=True)
class UpdateSchedulersRequest(Request):
    """Step every scheduler with a metric, once per call."""

    name = "update_scheduler"
    call_number: int
    metric: float


@dataclass(frozen=True, kw_only=True)
class StateRequest(Request):
    """Return the state, or a worker's shard of it, on CPU."""

    frozen: bool  # also the frozen parameters that `setup` makes


@dataclass(frozen=True, kw_only=True)
class SaveRequest(Request):
    """Return the state as the content of a file, with the entries of the driver."""

    driver_entries: Mapping[str, Any]
    generator_states: Sequence[Any]  # of all workers
    frozen: bool  # as in `StateRequest`
    label: str  # name of the file in messages


class PrepareExportRequest(Request):
    """Prepare the features for an export. Return the states of random number generators."""


@dataclass(frozen=True, kw_only=True)
class ModelsRequest(Request):
    """Return copies of the models."""

    only_weights: bool = False  # of Keras models, as arrays in one dict


@dataclass(frozen=True, kw_only=True)
class ApplyRequest(Request):
    """Call a function."""

    name = "apply_all_workers"
    function: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class ApplyOperatorRequest(Request):
    """Call a function with the operator."""

    name = "apply_all_operators"
    function: Callable[[Any], Any]
