"""Losses and accuracies of the default methods of an operator, and the counts of losses."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import CrossEntropyLoss, NLLLoss, functional

from raysgd._internal.arguments import check_number
from raysgd._internal.nested import describe, named_values
from raysgd.loop.loss_weights import LossCount
from raysgd.metrics import Sums, ratio
from raysgd.torch.input.batches import IGNORE_INDEX, ParsedBatch
from raysgd.torch.modules import user_module
from raysgd.torch.train_state import TorchTrainState

ONE_ELEMENT = "It must be a tensor of one element, such as loss.mean(), not reduction='none'."
_LOSS_MODULES = {"torch.nn.modules.loss", "torch.nn.functional"}
_CLASS_LOSSES = (
    CrossEntropyLoss.forward,
    NLLLoss.forward,
    functional.cross_entropy,
    functional.nll_loss,
)
_COUNTS_IGNORED = (
    "The loss ignores targets of %d, but raysgd counts all samples, so batches with fewer targets "
    "weigh too much. Override num_items(batch), and return the number of the other targets."
)


def loss_of(operator: Any, output: Any, batch: ParsedBatch) -> Any:
    if batch.target is None or getattr(operator, "criterion", None) is None:
        if (own := _own_loss(output)) is not None:
            return own
        if batch.target is None:
            raise TypeError(
                f"The output {describe(output)} has no loss, and the batch has no target: "
                f"forward takes all of {describe(dict(batch.keywords))}. Return an output with "
                ".loss, add a target to the batch that forward does not take, or override "
                "train_batch."
            )
    method = "train_batch" if torch.is_grad_enabled() else "validate_batch"
    criterion = operator._get_single("criterion", method)
    # A criterion of user code may take the whole output. Losses of PyTorch take a tensor.
    modules = {type(criterion).__module__, getattr(criterion, "__module__", None)}
    if modules & _LOSS_MODULES:
        scores = logits_of(output)
        if scores is not output and torch.is_grad_enabled():
            _refuse_auxiliary(output, scores)
        output = scores
    loss = criterion(output, batch.target)
    if isinstance(loss, torch.Tensor) and loss.numel() != 1:
        raise ValueError(f"The loss is {describe(loss)}. {ONE_ELEMENT}")
    return loss


def _refuse_auxiliary(output: Any, scores: torch.Tensor) -> None:
    """Raise an error for other trained parts that are auxiliary by their name or shape."""
    own = [*getattr(output, "_fields", ()), *getattr(output, "__dict__", ())]
    unused = [
        name
        for name in named_values(output) or own
        if (part := _tensor_in(output, name)) is not None and part is not scores
        if part.requires_grad and (name.startswith("aux") or part.shape == scores.shape)
    ]
    if unused:
        raise TypeError(
            f"The output {type(output).__name__} has logits and {', '.join(unused)}, but a loss of "
            "PyTorch receives only the logits. Register a criterion of your own, a function of "
            "(output, target) that adds all losses, or create the model without auxiliary outputs."
        )


def _own_loss(output: Any) -> torch.Tensor | None:
    """Return the loss in a model's output: ``loss``, or a number at the start of a tuple."""
    first = output[0] if isinstance(output, tuple) and output else None
    if isinstance(first, torch.Tensor) and first.dim() == 0:
        return first
    return _tensor_in(output, "loss")


def logits_of(output: Any) -> Any:
    """Return the ``logits`` of an output, or the output itself."""
    logits = _tensor_in(output, "logits")
    return output if logits is None else logits


def _tensor_in(output: Any, name: str) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return None
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, torch.Tensor) else None


def accuracy_of(output: Any, target: Any, ignored: int) -> torch.Tensor | Sums | None:
    """Return the fraction of positions whose argmax along dimension 1 equals the target.

    Targets that are `ignored` or negative do not count. None if the output is not (batch, classes,
    ...), or the target does not hold class indices.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return None
    has_classes = output.dim() > 1 and output.shape[1] > 1 and output.is_floating_point()
    if not has_classes or target.is_floating_point() or target.is_complex():
        return None
    batch, _, *rest = output.shape
    if list(target.shape) not in ([batch, *rest], [batch, 1, *rest]):
        return None
    hits = output.argmax(dim=1).reshape(target.shape) == target
    counts = (target >= 0) & (target != ignored)
    if counts.all():
        return hits.double().mean()
    num_positions = target.numel() / batch  # the weight of a sample is 1
    total = (hits & counts).sum() / num_positions
    return Sums(ratio, total=total, weight=counts.sum() / num_positions)


# ---- counts of losses


def _function_and_settings(criterion: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the function that computes a loss, and a function that returns its settings."""
    if isinstance(criterion, functools.partial):
        return criterion.func, criterion.keywords.get
    if isinstance(criterion, torch.nn.Module):
        module = user_module(criterion)
        return type(module).forward, lambda name, default=None: getattr(module, name, default)
    return criterion, lambda name, default=None: default


def ignore_index_of(criterion: Any) -> int:
    index = _function_and_settings(criterion)[1]("ignore_index")
    return index if isinstance(index, int) else IGNORE_INDEX


def count_of(
    criterion: Any, target: Any, num_samples: float, train_state: TorchTrainState
) -> LossCount:
    """Return the count of a loss. Other losses than those of PyTorch are means over samples.

    Cross entropies leave out targets, and count the others by the weights of their classes. To
    exchange counts costs time, so plain classes count as samples, unless a data set is known to
    have targets to leave out.
    """
    function, setting = _function_and_settings(criterion)
    is_sum = setting("reduction") == "sum" and getattr(function, "__module__", "") in _LOSS_MODULES
    count = LossCount(None, num_samples, is_sum)
    if function not in _CLASS_LOSSES or setting("reduction", "mean") != "mean":
        return count
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return count  # class probabilities
    index, weight = setting("ignore_index", IGNORE_INDEX), setting("weight")
    is_plain = weight is None and index == IGNORE_INDEX and target.dim() < 2
    if is_plain and not train_state.data.ignores_targets:
        step, trains = train_state.position.global_step, torch.is_grad_enabled()
        waits = target.device.type != "cpu" and trains and step & (step - 1)
        if waits or not bool((target == index).any()):
            return count
        if trains:
            train_state.settings.warn_once("ignored", _COUNTS_IGNORED, index, anywhere=True)
            return count
    counted = target[target != index]
    num_items = counted.numel() if weight is None else weight[counted].sum()
    return count._replace(num_items=float(num_items))


def as_count(count: Any, caller: str = "backward", name: str = "num_items") -> float:
    """Return a number, or a tensor of one element, as a float. Errors have the other arguments."""
    value = count.item() if isinstance(count, torch.Tensor) and count.numel() == 1 else count
    check_number(caller, name, value)
    return float(value)
