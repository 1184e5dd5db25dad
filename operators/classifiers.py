"""Classification of images, pixels, and sequences."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn import functional

from raysgd._internal.imports import import_extra
from raysgd.metrics import Sums, ratio
from raysgd.operators.base import SupervisedOperator, split_target


class ImageClassifier(SupervisedOperator):
    """Classifies images, or other inputs of a model that returns scores (batch, classes).

    The loss of a sample with scores z and class y is the cross-entropy ``-log softmax(z)[y]``. With
    label smoothing s, the target is ``1 - s`` for class y, plus ``s / K`` for each of the K classes
    (Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision",
    arXiv:1512.00567).

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``label_smoothing``             0.0         s above, from 0 to 1
    ``top_k``                       None        k for the metric ``val_top{k}_accuracy``
    ==============================  ==========  ================================================

    It also has the keys of :class:`SupervisedOperator`. Batches are ``(images, classes)``: images
    in the shape that the model takes, classes as ints (batch). The classes can also be
    probabilities (batch, classes), such as those of ``torchvision.transforms.v2.MixUp``. The model
    returns scores (batch, classes), or an object with ``logits``, like models of transformers and
    some of torchvision.

    Metrics: ``val_loss``, the cross-entropy without smoothing, in nats; ``val_accuracy``, the
    fraction of samples whose class has the highest score; ``val_top{k}_accuracy``, the fraction of
    samples whose class is among the k highest scores.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {
        **SupervisedOperator.OPTIONS,
        "label_smoothing": 0.0,
        "top_k": None,
    }

    def run_model(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores (batch, classes) and classes (batch)."""
        output, target = super().run_model(batch)
        is_probability = target is not None and target.dim() > 1
        return getattr(output, "logits", output), target if is_probability else _as_classes(target)

    def compute_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        smoothing = self.options["label_smoothing"]
        return functional.cross_entropy(output, target, label_smoothing=smoothing, reduction="none")

    def compute_validation_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target, reduction="none")

    def compute_metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        target = target.argmax(dim=1) if target.shape == output.shape else target  # probabilities
        metrics = {"accuracy": (output.argmax(dim=1) == target).double().mean()}
        if (k := self.options["top_k"]) is not None:
            hit = (output.topk(k, dim=1).indices == target.unsqueeze(1)).any(dim=1)
            metrics[f"top{k}_accuracy"] = hit.double().mean()
        return metrics


class SequenceClassifier(ImageClassifier):
    """Trains a transformers model for sequence classification, built from a config.

    ``AutoModelForSequenceClassification.from_config`` creates the model with random weights and
    downloads nothing. The loss is that of :class:`ImageClassifier`.

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``num_classes``                 2           number of classes
    ``model_type``                  "bert"      architecture in transformers:
                                                "distilbert", "roberta", "gpt2", ...
    ``model_config``                None        arguments of the config class, such as
                                                ``{"hidden_size": 64, "vocab_size": 300}``; the
                                                names differ between architectures
    ==============================  ==========  ================================================

    It also has the keys of :class:`ImageClassifier`. A ``model``, or an overridden `build_model`,
    replaces the transformers model. The replacement takes ``input_ids`` and returns scores (batch,
    classes), or an object with ``logits``.

    Batches are dicts as in transformers, with ``input_ids``, ``labels``, and further inputs of the
    model. Batches can also be tuples ``(input_ids, labels)`` or ``(input_ids, attention_mask,
    labels)``.

    Metrics: ``val_loss`` in nats; ``val_accuracy``; ``val_f1``, the mean F1 of the classes (macro
    F1), computed from one confusion matrix over all batches and workers.

    Raises:
        ImportError: In `setup`, if transformers is needed but missing.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {
        **ImageClassifier.OPTIONS,
        "num_classes": 2,
        "model_type": "bert",
        "model_config": None,
    }

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        if self.options["model"] is not None:
            return super().build_model(config)
        transformers = import_extra(type(self).__name__, "transformers", "operators")
        values = {**(self.options["model_config"] or {}), "num_labels": self.options["num_classes"]}
        made = transformers.AutoConfig.for_model(self.options["model_type"], **values)
        model: torch.nn.Module = transformers.AutoModelForSequenceClassification.from_config(made)
        return model

    def run_model(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(batch, Mapping):
            inputs = dict(batch)
            target = inputs.pop("labels", None)
        else:
            features, target = split_target(batch)
            if len(features) > 2:
                raise ValueError(
                    f"The batch has {len(features) + 1} parts. A tuple is (input_ids, labels) or "
                    "(input_ids, attention_mask, labels). Return a dict for further inputs."
                )
            inputs = dict(zip(("input_ids", "attention_mask"), features, strict=False))
        output = self.model(**inputs)
        return getattr(output, "logits", output), _as_classes(target)

    def compute_metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        confusion = confusion_matrix(output, target)
        metrics = super().compute_metrics(output, target)
        return {**metrics, "f1": Sums(macro_f1, confusion=confusion)}


class SemanticSegmenter(SupervisedOperator):
    """Classifies each pixel of an image.

    The loss is the cross-entropy ``-log softmax(z)[y]`` of a pixel with scores z and class y,
    averaged over all pixels that are not ignored.

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``ignore_index``                255         class of the pixels to ignore; change this value
                                                if there are more than 255 classes
    ==============================  ==========  ================================================

    It also has the keys of :class:`SupervisedOperator`. Batches are ``(images, masks)``, with masks
    of classes as ints (batch, height, width). The model returns scores (batch, classes, height,
    width), or a dict with the scores under ``"out"``, like torchvision's models.

    Metrics: ``val_loss`` in nats per pixel; ``val_pixel_accuracy``; ``val_mean_iou``, the mean
    intersection over union of the classes (Long et al. 2015, arXiv:1411.4038), computed from one
    confusion matrix over all batches and workers.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {**SupervisedOperator.OPTIONS, "ignore_index": 255}

    def run_model(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores (batch, classes, height, width) and masks (batch, height, width)."""
        output, target = super().run_model(batch)
        return output["out"] if isinstance(output, Mapping) else output, _as_classes(target)

    def compute_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ignored = self.options["ignore_index"]
        return functional.cross_entropy(output, target, ignore_index=ignored, reduction="none")

    def num_items(self, batch: Any) -> torch.Tensor:
        return torch.sum(batch[-1].long() != self.options["ignore_index"])

    def compute_metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        confusion = confusion_matrix(output, target, self.options["ignore_index"])
        return {
            "pixel_accuracy": Sums(ratio, total=confusion.trace(), weight=confusion.sum()),
            "mean_iou": Sums(mean_iou, confusion=confusion),
        }


def _as_classes(target: Any) -> Any:
    return None if target is None else target.long()


def confusion_matrix(
    scores: torch.Tensor, target: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """Count how often the highest score was that of each class (column), by target (row).

    `scores` has the shape (batch, classes, ...). Targets of `ignore_index` do not count.
    """
    num_classes = scores.shape[1]
    size = num_classes**2
    # Count ignored positions in an extra bin, because filtering them would wait for the device.
    cell = torch.where(target == ignore_index, size, target * num_classes + scores.argmax(dim=1))
    counts = torch.bincount(cell.reshape(-1), minlength=size + 1)
    return counts[:size].reshape(num_classes, num_classes)


def mean_iou(confusion: torch.Tensor) -> float:
    """Return the mean intersection over union of the classes that occur or were predicted."""
    hit = confusion.diagonal()
    return _mean_ratio(hit, confusion.sum(dim=0) + confusion.sum(dim=1) - hit)


def macro_f1(confusion: torch.Tensor) -> float:
    """Return the mean F1, ``2 hits / (predicted + occurring)``, of the classes like `mean_iou`."""
    return _mean_ratio(2 * confusion.diagonal(), confusion.sum(dim=0) + confusion.sum(dim=1))


def _mean_ratio(numerators: torch.Tensor, denominators: torch.Tensor) -> float:
    there = denominators > 0
    return float((numerators[there].double() / denominators[there].double()).mean())
