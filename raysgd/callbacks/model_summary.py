"""A table of the models at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd.callbacks.base import Callback, Trainer

_WIDTH = 50
"""Maximum width of a layer's type and arguments, in characters."""


class ModelSummary(Callback):
    """Prints the layers of the models, their parameters and sizes, when training starts."""

    def on_train_start(self, trainer: Trainer) -> None:
        print(trainer.apply_all_operators(_summary)[0], flush=True)


def _summary(operator: Any) -> str:
    """Return a table of an operator's models. Runs on the worker."""
    rows: list[tuple[str, ...]] = [("part", "type", "parameters", "trained", "size")]
    models = operator._train_state.models
    totals = [0, 0, 0]
    for number, model in enumerate(models):
        if hasattr(operator, "unwrapped"):
            model = operator.unwrapped(model)  # without DistributedDataParallel
        prefix = f"{number}." if len(models) > 1 else ""
        for part, module in _parts(model):
            rows.append((f"{prefix}{part}", _described(module), *_cells(_counts(module))))
        totals = [total + count for total, count in zip(totals, _counts(model), strict=True)]
    rows.append(("all", "", *_cells(totals)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{{:{'<' if n < 2 else '>'}{width}}}" for n, width in enumerate(widths)]
    return "\n".join("  ".join(formats).format(*row) for row in rows)


def _cells(counts: Sequence[int]) -> tuple[str, str, str]:
    num_parameters, num_trained, size = counts
    exponent, unit = (10, "KiB") if size < 2**20 else (20, "MiB")
    return f"{num_parameters:,}", f"{num_trained:,}", f"{size / 2**exponent:.1f} {unit}"


def _described(module: Any) -> str:
    """Return the type and the arguments of a module, or the shapes of a Keras layer."""
    if hasattr(module, "extra_repr"):
        arguments = " ".join(module.extra_repr().split())
    else:
        arguments = ", ".join(str(tuple(weight.shape)) for weight in module.weights)
    text = type(module).__name__ + f"({arguments})" * bool(arguments)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def _parts(model: Any) -> list[tuple[str, Any]]:
    """Return the children of a PyTorch module, or the layers of a Keras model, by name."""
    if hasattr(model, "named_children"):
        return list(model.named_children())
    return [(layer.name, layer) for layer in model.layers]


def _counts(module: Any) -> tuple[int, int, int]:
    """Return the parameter count, the trainable parameter count, and the size in bytes."""
    if hasattr(module, "parameters"):
        found = list(module.parameters())
        trained = sum(p.numel() for p in found if p.requires_grad)
        return sum(p.numel() for p in found), trained, sum(p.nbytes for p in found)
    arrays = [variable.numpy() for variable in module.weights]
    trained = sum(variable.numpy().size for variable in module.trainable_weights)
    return sum(a.size for a in arrays), trained, sum(a.nbytes for a in arrays)
