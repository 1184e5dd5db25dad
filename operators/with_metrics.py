"""Metrics of TorchMetrics for any operator, exact over workers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from raysgd._internal.imports import import_extra
from raysgd.metrics import BATCH_COUNT, MergeableMetric, computed
from raysgd.operators.options import shown
from raysgd.operators.supervised import in_full_precision
from raysgd.torch import TrainingOperator

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["MergedStates", "WithMetrics"]


class WithMetrics(TrainingOperator):
    """Adds metrics of TorchMetrics to the validation of an operator.

    List it before the operator::

        class Digits(WithMetrics, ImageClassifier):
            def build_metrics(self, config):
                return {"f1": MulticlassF1Score(num_classes=10, average="macro")}

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``metrics``                     required    a dict of torchmetrics.Metric objects by name, a
                                                MetricCollection, one Metric, or a function of
                                                the config that returns one of them; unless
                                                `build_metrics` is overridden
    ==============================  ==========  ================================================

    A metric named ``f1`` is in the result as ``val_f1``. One that computes a vector or a dict gives
    a number for each entry: ``val_f1_0``, or ``val_f1_key``.

    TorchMetrics' own exchange between processes is off: it would wait for workers that have no
    further batch. Their states go to the driver with the result instead, and are merged there by
    each state's own rule before anything is computed. So the result is that of one process over
    all of the data, for any number of workers. Metrics that keep all predictions (AUROC without
    ``thresholds``, say) send all of them.

    The default ``validate_batch``, and those of the operators of this package, feed the metrics. A
    ``validate_batch`` of your own calls ``self.update_metrics(output, target)``.

    Raises:
        ImportError: if torchmetrics is missing.
        TypeError: in `setup`, if there are no metrics, or they are something else.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Set up the operator, and its metrics."""
        super().setup(config)
        self._prepare_metrics()

    def build_metrics(self, config: dict[str, Any]) -> Any:
        """Return the metrics, in one of the forms that ``config["metrics"]`` may have."""
        given = config.get("metrics")
        # a metric can be called as well
        if callable(given) and not isinstance(given, torch.nn.Module):
            return given(config)
        return given

    @property
    def validation_metrics(self) -> dict[str, Metric]:
        """The metrics by name; each validation starts them anew."""
        return self._prepare_metrics()

    def update_metrics(self, output: Any, target: Any) -> None:
        """Update each metric with a validation batch: ``metric.update(output, target)``.

        Override it where they need something else, such as probabilities or labels.
        """
        if isinstance(output, torch.Tensor):
            output = in_full_precision(output)
        for metric in self.validation_metrics.values():
            metric.update(output, target)

    def validate(
        self, val_iterator: Iterator[Any], info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Evaluate, and add the metrics to the result."""
        metrics = self._prepare_metrics()
        for metric in metrics.values():
            metric.reset()
        result = super().validate(val_iterator, info)
        if result.get(BATCH_COUNT) and not any(_updated(m) for m in metrics.values()):
            kind = type(self).__name__
            raise RuntimeError(
                f"No metric of {kind} was updated. Call self.update_metrics(output, target) in "
                f"{kind}.validate_batch, and list WithMetrics first among the bases of {kind}."
            )
        for name, metric in metrics.items():
            if _updated(metric):  # a worker may have had no batch
                with warnings.catch_warnings():
                    # that this worker's part alone lacks something says nothing
                    warnings.simplefilter("ignore")
                    result.update(computed(f"val_{name}", MergedStates.of(metric)))
        return result

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluate one batch; the default one updates no metrics."""
        method = super().validate_batch
        found = method(batch, batch_info)
        if getattr(method, "__func__", None) is TrainingOperator.validate_batch:
            self.update_metrics(batch_info["output"], self.to_device(batch[-1]))
        return found

    _metrics: dict[str, Metric] | None = None

    def _prepare_metrics(self) -> dict[str, Metric]:
        # not in setup alone: that of a user's own class may not call the one of here
        if self._metrics is None:
            given = _by_name(type(self).__name__, self.build_metrics(self.config))
            self._metrics = {name: _alone(metric).to(self.device) for name, metric in given.items()}
        return self._metrics


class MergedStates(MergeableMetric):
    """A torchmetrics.Metric with the states of all parts of the data.

    They are kept apart until something is computed, and then reduced all at once: that is what
    TorchMetrics does with the states of its processes, and some metrics count on it.

    Args:
        metric: the metric, without any data.
        parts: for each part the states of the metric and of those inside of it.
    """

    def __init__(self, metric: Metric, parts: Sequence[list[dict[str, Any]]]) -> None:
        self.metric = metric
        self.parts = parts

    @classmethod
    def of(cls, metric: Metric) -> Self:
        """Return the states that a metric has now."""
        part = [
            {name: _on_cpu(value) for name, value in each.metric_state.items()}
            for each in _members(metric)
        ]
        empty = copy.deepcopy(metric).cpu()
        empty.reset()
        return cls(empty, [part])

    def merge(self, other: Self) -> Self:
        """Return the metric over the data of both."""
        return type(self)(self.metric, [*self.parts, *other.parts])

    def compute(self) -> Any:
        """Return what the metric computes."""
        metric = copy.deepcopy(self.metric)
        for index, member in enumerate(_members(metric)):
            held = [part[index] for part in self.parts]
            for name, reduce in member._reductions.items():
                setattr(member, name, _reduced([state[name] for state in held], reduce))
            member._update_count = 1
        found = _numbers(type(metric).__name__, metric.compute())
        return found.get("", found)


def _reduced(states: list[Any], reduce: Any) -> Any:
    """Merge the states of several parts as TorchMetrics merges those of processes."""
    if len(states) == 1:
        # a copy: some metrics change their states as they compute
        return list(states[0]) if isinstance(states[0], list) else states[0].clone()
    if isinstance(states[0], list):
        # a list of batches stays one, in which those of all parts are
        return [batch for state in states for batch in state]
    stacked = torch.stack(states)
    return stacked if reduce is None else reduce(stacked)


def _numbers(owner: str, value: Any) -> dict[str, Any]:
    """Return the numbers that a metric computed, by the end of their names; matrices as such."""
    if isinstance(value, Mapping):
        found = {}
        for key, entry in value.items():
            found.update({f"_{key}{end}": v for end, v in _numbers(owner, entry).items()})
        return found
    if isinstance(value, int | float):
        return {"": float(value)}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"": float(value)}
    if isinstance(value, torch.Tensor) and value.dim() == 1:
        return {f"_{index}": float(entry) for index, entry in enumerate(value)}
    if isinstance(value, torch.Tensor):
        return {"": value}
    raise TypeError(
        f"WithMetrics takes metrics that compute numbers, tensors or dicts of them, and {owner} "
        f"computed {shown(value)}."
    )


def _by_name(owner: str, given: Any) -> dict[str, Metric]:
    metric_cls = import_extra(owner, "torchmetrics", "operators").Metric
    if isinstance(given, metric_cls):
        return {type(given).__name__: given}
    # of a MetricCollection the names with its prefix, and metrics that share no states
    items = given.items() if hasattr(given, "items") else ()
    found = dict(items)
    if not found or not all(isinstance(metric, metric_cls) for metric in found.values()):
        raise TypeError(
            f"{owner}: config['metrics']={shown(given)} must be torchmetrics.Metric objects by "
            "name, a MetricCollection, one Metric, or a function of the config that returns one "
            f"of them; or override build_metrics in {owner}."
        )
    return found


def _alone(metric: Metric) -> Metric:
    """Return a copy of a metric that never talks to other processes."""
    own = copy.deepcopy(metric)
    for member in _members(own):
        member.distributed_available_fn = _not_available
        member.dist_sync_on_step = False
    return own


def _not_available() -> bool:
    return False


def _members(metric: Metric) -> list[Metric]:
    from torchmetrics import Metric

    return [module for module in metric.modules() if isinstance(module, Metric)]


def _updated(metric: Metric) -> bool:
    return any(member.update_called for member in _members(metric))


def _on_cpu(state: Any) -> Any:
    """Return a copy of a state, since `reset` empties lists in place."""
    return [batch.cpu() for batch in state] if isinstance(state, list) else state.cpu().clone()
