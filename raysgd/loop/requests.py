"""Requests of the driver to the workers of an operator, which `OperatorRunner.handle` answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raysgd._internal.context import Request

if TYPE_CHECKING:
    from raysgd.data import Dataset


@dataclass(frozen=True, kw_only=True)
class _EpochRequest(Request):
    call: int
    """Number of the call; a repeated request has the same number."""
    info: Mapping[str, Any] = field(default_factory=dict)
    profile: bool = False
    """Whether to measure the stages of a step."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest(_EpochRequest):
    """Train up to an absolute goal, so that a repeated request trains only what is left.

    The answer is the metrics, or None if training paused at `callback_pause`. A repeated request
    then continues, and its metrics cover the whole call.
    """

    until_epoch: int | None = None
    """Number of completed epochs to reach. None if `until_step` is the goal."""
    until_step: int | None = None
    """Number of committed steps to reach."""
    start_step: int = 0
    """Committed steps before the call. Replayed steps of earlier calls do not count."""
    callback_pause: int | None = None
    """Step at which to pause; None to train up to the goal."""
    split: int | None = None
    """Minimum number of micro-batches per batch, after memory ran out."""
    logged: int | None = None
    """Last step whose metrics are logged already. None if the call logs no single steps."""
    dataset: Dataset | None = None
    """Data set to train on instead of the registered loader."""
    shares: tuple[float, ...] | None = None
    """Relative shares of the workers, by rank. None means equal shares."""

    def with_shares(self, shares: tuple[float, ...] | None) -> TrainRequest:
        return replace(self, shares=shares)

    def with_split(self, split: int) -> TrainRequest:
        return replace(self, split=split)


@dataclass(frozen=True, kw_only=True)
class ValidateRequest(_EpochRequest):
    """Evaluate the rest of the validation loader, or `num_steps` steps, and return metrics."""

    num_steps: int | None = None
    """Batches on each worker; None for the rest of the loader."""
    from_start: bool = False
    """Whether to start at the first batch instead of where the last call ended."""
    loader: Any = None
    """Loader to evaluate instead of the registered one, or a function that returns it."""


@dataclass(frozen=True, kw_only=True)
class RehearseRequest(Request):
    """Try the validation on some batches, restore the state, and return the metrics."""

    num_steps: int
    info: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PredictRequest(Request):
    """Return a worker's predictions batch by batch, with their positions in the loader."""

    loader: Any


@dataclass(frozen=True, kw_only=True)
class MeasuredRequest(Request):
    """Return a worker's metrics so far in a call of `train` that has not ended."""

    call: int
    since: int | None = None
    """First step that counts. None means the whole call."""


@dataclass(frozen=True, kw_only=True)
class UpdateSchedulersRequest(Request):
    """Step every scheduler with a metric, once per call."""

    call: int
    metric: float


class StateRequest(Request):
    """Return the state, or a worker's shard of it, on CPU."""


class RngStateRequest(Request):
    """Return the states of a worker's random number generators."""


class ModelsRequest(Request):
    """Return copies of the models."""


@dataclass(frozen=True, kw_only=True)
class ApplyRequest(Request):
    """Call a function."""

    function: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class ApplyOperatorRequest(Request):
    """Call a function with the operator."""

    function: Callable[[Any], Any]
