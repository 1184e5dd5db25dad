"""Sequence classification with Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn import functional

from raysgd._internal.imports import import_extra
from raysgd.metrics import Sums
from raysgd.operators.confusion import check_classes, confusion_matrix, macro_f1
from raysgd.operators.options import REQUIRED, Option, any_of, integer, number
from raysgd.operators.supervised import SupervisedOperator


class SequenceClassifier(SupervisedOperator):
    """Trains a transformers model for sequence classification, built from a config.

    ``AutoModelForSequenceClassification.from_config`` creates the model with random weights and
    downloads nothing. The loss of a sequence with scores z and class y is the cross-entropy
    ``-log softmax(z)[y]``, with label smoothing as in :class:`ImageClassifier`.

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``num_classes``                 required    number of classes
    ``model_type``                  "bert"      architecture in transformers:
                                                "distilbert", "roberta", "gpt2", ...
    ``model_config``                None        arguments of the config class, such as
                                                ``{"hidden_size": 64, "vocab_size": 300}``; the
                                                names differ between architectures
    ``label_smoothing``             0.0         s of :class:`ImageClassifier`, from 0 to 1
    ==============================  ==========  ================================================

    It also has the keys of :class:`SupervisedOperator`. A ``model``, or an overridden
    `build_model`, replaces the transformers model. The replacement takes ``input_ids`` and returns
    scores (batch, classes), or an object with ``logits``.

    Batches are dicts as in transformers, with ``input_ids``, ``labels``, and further inputs of the
    model. Batches can also be tuples ``(input_ids, labels)`` or ``(input_ids, attention_mask,
    labels)``.

    Metrics: ``val_loss`` in nats; ``val_accuracy``; ``val_f1``, the mean F1 of the classes (macro
    F1), computed from one confusion matrix over all batches and workers.

    Raises:
        ImportError: In `setup`, if transformers is needed but missing.
        ValueError: In `setup`, if transformers rejects ``model_type`` or ``model_config``.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **SupervisedOperator.OPTIONS,
        "num_classes": integer(REQUIRED, 2),
        "model_type": any_of(
            "bert", lambda value: isinstance(value, str), "the name of an architecture"
        ),
        "model_config": any_of(
            None, lambda value: isinstance(value, Mapping), "a dict of config values"
        ),
        "label_smoothing": number(0.0, 0.0, 1.0),
    }

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        if self.options["model"] is not None:
            return super().build_model(config)
        transformers = import_extra(type(self).__name__, "transformers", "operators")
        kind, values = self.options["model_type"], dict(self.options["model_config"] or {})
        values["num_labels"] = self.options["num_classes"]
        try:
            made = transformers.AutoConfig.for_model(kind, **values)
            model: torch.nn.Module = transformers.AutoModelForSequenceClassification.from_config(
                made
            )
        except Exception as error:
            raise ValueError(
                f"{type(self).__name__}: transformers rejects config['model_type']={kind!r} with "
                f"config['model_config']={values!r}: {error}"
            ) from error
        return model

    def predict(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores (batch, classes) and classes (batch)."""
        if isinstance(batch, Mapping):
            inputs = dict(batch)
            target = inputs.pop("labels")
        else:
            *values, target = batch
            inputs = dict(zip(("input_ids", "attention_mask"), values, strict=False))
        output = self.model(**inputs)
        scores = getattr(output, "logits", output)
        check_classes(type(self).__name__, scores, self.options["num_classes"])
        return scores, target.long()

    def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        smoothing = self.options["label_smoothing"]
        return functional.cross_entropy(output, target, label_smoothing=smoothing, reduction="none")

    def validation_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        predicted = output.argmax(dim=1)
        counts = confusion_matrix(predicted, target, self.options["num_classes"])
        return {
            "accuracy": (predicted == target).double().mean(),
            "f1": Sums(macro_f1, confusion=counts),
        }
