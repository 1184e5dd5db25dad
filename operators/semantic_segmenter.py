"""Semantic segmentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn import functional

from raysgd.metrics import Sums
from raysgd.operators.confusion import accuracy, check_classes, confusion_matrix, mean_iou
from raysgd.operators.options import REQUIRED, Option, integer
from raysgd.operators.supervised import SupervisedOperator


class SemanticSegmenter(SupervisedOperator):
    """Classifies each pixel of an image.

    The loss is the cross-entropy ``-log softmax(z)[y]`` of a pixel with scores z and class y,
    averaged over all pixels that are not ignored.

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``num_classes``                 required    number of classes
    ``ignore_index``                255         class of the pixels to ignore; change this value
                                                if there are more than 255 classes
    ==============================  ==========  ================================================

    It also has the keys of :class:`SupervisedOperator`. Batches are ``(images, masks)``, with masks
    of classes as ints (batch, height, width). The model returns scores (batch, classes, height,
    width), or a dict with the scores under ``"out"``, like torchvision's models.

    Metrics: ``val_loss`` in nats per pixel; ``val_pixel_accuracy``; ``val_mean_iou``, the mean
    intersection over union of the classes (Long et al. 2015, arXiv:1411.4038). Both come from one
    confusion matrix, summed over all batches and workers.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **SupervisedOperator.OPTIONS,
        "num_classes": integer(REQUIRED, 2),
        "ignore_index": integer(255),
    }

    def predict(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores (batch, classes, height, width) and masks (batch, height, width)."""
        *features, target = batch
        output = self.model(*features)
        if isinstance(output, Mapping):
            output = output["out"]
        check_classes(type(self).__name__, output, self.options["num_classes"])
        return output, target.long()

    def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ignored = self.options["ignore_index"]
        return functional.cross_entropy(output, target, ignore_index=ignored, reduction="none")

    def num_items(self, batch: Any) -> torch.Tensor:
        counts: torch.Tensor = batch[-1].long() != self.options["ignore_index"]
        return counts.sum()

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        num_classes, ignored = self.options["num_classes"], self.options["ignore_index"]
        counts = confusion_matrix(output.argmax(dim=1), target, num_classes, ignored)
        return {
            "pixel_accuracy": Sums(accuracy, confusion=counts),
            "mean_iou": Sums(mean_iou, confusion=counts),
        }
