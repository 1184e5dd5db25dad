"""TorchMetrics for any operator, exact over all workers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from raysgd._internal.imports import import_extra
from raysgd.metrics import BATCH_COUNT, values_of
from raysgd.torch import TrainingOperator
from raysgd.torch.interop.torchmetrics import (
    MergeableTorchMetric,
    copy_without_sync,
    nested_metrics,
)
from raysgd.torch.precision import to_full_precision

if TYPE_CHECKING:
    from torchmetrics import Metric


class WithMetrics(TrainingOperator):
    """Adds metrics of TorchMetrics to the validation of an operator.

    List this class before the operator::

        class Digits(WithMetrics, ImageClassifier):
            def build_metrics(self, config):
                return {"f1": MulticlassF1Score(num_classes=10, average="macro")}

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``metrics``                     required    a dict of torchmetrics.Metric objects by name, a
                                                MetricCollection, one Metric, or a function of
                                                the config that returns one of them; not needed
                                                if you override `build_metrics`
    ==============================  ==========  ================================================

    The result of a metric named ``f1`` is ``val_f1``. A vector or dict gives one number per entry:
    ``val_f1_0``, or ``val_f1_key``.

    TorchMetrics does not synchronize its metrics here, because a worker without a further batch
    would block the others. Instead, the workers send the states of the metrics to the driver. The
    driver merges the states, each by its own rule, and then computes the metric. The result is the
    same as in one process with all data. Metrics that keep all predictions, such as AUROC without
    ``thresholds``, send all predictions.

    The default ``validate_batch`` and those of this package's operators update the metrics. In your
    own ``validate_batch``, call ``self.update_metrics(output, target)``.

    Raises:
        ImportError: If torchmetrics is missing.
        ValueError: In `setup`, if the metrics are missing or have another type.
    """

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        _ = self.validation_metrics  # reject wrong metrics early

    def build_metrics(self, config: dict[str, Any]) -> Any:
        """Return the metrics, in one of the forms of ``config["metrics"]``."""
        metrics = config.get("metrics")
        # A metric is callable too.
        if callable(metrics) and not isinstance(metrics, torch.nn.Module):
            return metrics(config)
        return metrics

    @functools.cached_property
    def validation_metrics(self) -> dict[str, Metric]:
        """The metrics by name. Each validation resets them."""
        kind, metrics = type(self).__name__, self.build_metrics(self.config)
        collection = import_extra(kind, "torchmetrics", "operators").MetricCollection
        if not metrics:
            raise ValueError(f"{kind}: pass config['metrics'], or override build_metrics.")
        metrics = metrics if isinstance(metrics, collection) else collection(metrics)
        # The names in items() have the prefix, and these metrics do not share states.
        return {name: copy_without_sync(metric).to(self.device) for name, metric in metrics.items()}

    def update_metrics(self, output: Any, target: Any) -> None:
        """Update each metric with a validation batch: ``metric.update(output, target)``.

        Override this method if the metrics need other inputs, such as probabilities or labels.
        """
        output = to_full_precision(output)
        for metric in self.validation_metrics.values():
            metric.update(output, target)

    def validate(
        self, val_iterator: Iterator[Any], info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        metrics = self.validation_metrics
        for metric in metrics.values():
            metric.reset()
        result = super().validate(val_iterator, info)
        used = {k: m for k, m in metrics.items() if any(n.update_called for n in nested_metrics(m))}
        if result.get(BATCH_COUNT) and not used:
            kind = type(self).__name__
            raise RuntimeError(
                f"No metric of {kind} was updated. Call self.update_metrics(output, target) in "
                f"{kind}.validate_batch, and list WithMetrics first among the bases of {kind}."
            )
        with warnings.catch_warnings():
            # Warnings about this worker's part alone are misleading.
            warnings.simplefilter("ignore")
            for name, metric in used.items():  # a worker may have had no batch
                result.update(values_of(f"val_{name}", MergeableTorchMetric(metric.clone().cpu())))
        return result

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        method = super().validate_batch
        result = method(batch, batch_info)
        if getattr(method, "__func__", None) is TrainingOperator.validate_batch:
            self.update_metrics(batch_info["output"], batch_info["target"])
        return result
