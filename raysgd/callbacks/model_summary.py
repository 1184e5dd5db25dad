"""What is trained, in a table at the start."""

from __future__ import annotations

from typing import Any

from raysgd.callbacks.base import Callback, Trainer

__all__ = ["ModelSummary"]


class ModelSummary(Callback):
    """Prints the parts of the models, with their numbers of parameters, when training starts."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Print it."""
        print(trainer.apply_all_operators(_summary)[0], flush=True)


def _summary(operator: Any) -> str:
    """Return the table of an operator's models. Runs on the worker."""
    rows: list[tuple[str, ...]] = [("part", "type", "parameters", "trained")]
    total = trained = size = 0
    for number, model in enumerate(operator._registration.given_models):
        if hasattr(operator, "unwrapped"):
            model = operator.unwrapped(model)  # without what averages gradients
        several = len(operator._registration.given_models) > 1
        name = f"{number}." if several else ""
        for part, module in _parts(model):
            counts = _counts(module)
            rows.append((f"{name}{part}", type(module).__name__, *(f"{n:,}" for n in counts[:2])))
        counts = _counts(model)
        total, trained, size = total + counts[0], trained + counts[1], size + counts[2]
    rows.append(("all", f"{size / 2**20:.1f} MiB", f"{total:,}", f"{trained:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}"
        for row in rows
    )


def _parts(model: Any) -> list[tuple[str, Any]]:
    """Return the parts of a model of PyTorch, or the layers of one of Keras, by name."""
    if hasattr(model, "named_children"):
        return list(model.named_children())
    return [(layer.name, layer) for layer in model.layers]


def _counts(module: Any) -> tuple[int, int, int]:
    """Return numbers, numbers that are trained, and bytes, of parameters."""
    if hasattr(module, "parameters"):
        found = list(module.parameters())
        trained = sum(p.numel() for p in found if p.requires_grad)
        return sum(p.numel() for p in found), trained, sum(p.nbytes for p in found)
    arrays = [variable.numpy() for variable in module.weights]
    trained = sum(variable.numpy().size for variable in module.trainable_weights)
    return sum(a.size for a in arrays), trained, sum(a.nbytes for a in arrays)
