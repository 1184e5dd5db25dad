"""Image classification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn import functional

from raysgd.operators.options import Option, integer, number
from raysgd.operators.supervised import SupervisedOperator, in_full_precision


class ImageClassifier(SupervisedOperator):
    """Classifies images, or other inputs of a model that returns scores (batch, classes).

    The loss of a sample with scores z and class y is the cross-entropy ``-log softmax(z)[y]``. With
    label smoothing s, the target is ``1 - s`` for class y, plus ``s / K`` for each of the K classes
    (Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision",
    arXiv:1512.00567).

    Mixup (Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412) trains
    on ``λ x + (1 - λ) x'`` with the loss ``λ L(y) + (1 - λ) L(y')``. Here x' and y' are the samples
    of the batch in another order. Each batch draws λ from a Beta distribution with two equal
    parameters.

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``label_smoothing``             0.0         s above, from 0 to 1
    ``mixup_alpha``                 0.0         parameters of the Beta distribution; 0 for no
                                                mixup
    ``top_k``                       None        k for the metric ``val_top{k}_accuracy``
    ==============================  ==========  ================================================

    It also has the keys of :class:`SupervisedOperator`. Batches are ``(images, classes)``: images
    in the shape that the model takes, classes as ints (batch). The model returns scores (batch,
    classes), or an object with ``logits``, like models of transformers and some of torchvision.

    Metrics: ``val_loss``, the cross-entropy without smoothing, in nats; ``val_accuracy``, the
    fraction of samples whose class has the highest score; ``val_top{k}_accuracy``, the fraction of
    samples whose class is among the k highest scores.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **SupervisedOperator.OPTIONS,
        "label_smoothing": number(0.0, 0.0, 1.0),
        "mixup_alpha": number(0.0, 0.0),
        "top_k": integer(None, 1),
    }

    def predict(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores (batch, classes) and classes (batch)."""
        output, target = super().predict(batch)
        return getattr(output, "logits", output), target

    def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        smoothing = self.options["label_smoothing"]
        return functional.cross_entropy(
            output, target.long(), label_smoothing=smoothing, reduction="none"
        )

    def validation_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target.long(), reduction="none")

    def training_pass(self, batch: Any) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        alpha = self.options["mixup_alpha"]
        if not alpha:
            return super().training_pass(batch)
        *features, target = batch
        share = float(torch.distributions.Beta(alpha, alpha).sample())
        order = torch.randperm(len(target)).to(target.device)
        mixed = [share * column + (1 - share) * column[order] for column in features]
        output, _ = self.predict((*mixed, target))
        output = in_full_precision(output)
        losses = share * self.losses(output, target)
        losses = losses + (1 - share) * self.losses(output, target[order])
        return None, target, losses

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        found = {"accuracy": (output.argmax(dim=1) == target).double().mean()}
        k = self.options["top_k"]
        if k is not None:
            best = output.topk(k, dim=1).indices
            hit = (best == target.unsqueeze(1)).any(dim=1)
            found[f"top{k}_accuracy"] = hit.double().mean()
        return found
