"""Interpret batches for the default methods of an operator."""

import copy
import dataclasses
import functools
import inspect
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

from raysgd._internal.nested import describe, named_values
from raysgd.torch.modules import user_module
from raysgd.torch.tensors import tensors_in

IGNORE_INDEX = -100
"""The default of ``ignore_index`` of losses in PyTorch."""


class ParsedBatch(NamedTuple):
    """Arguments of ``forward`` in a batch, and the target."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    target: Any
    """None if the model computes its loss."""

    @property
    def lengths(self) -> set[int]:
        return {tensor.size(0) for tensor in tensors_in(list(self)) if tensor.dim()}

    def count_samples(self, drawn: int | None = None) -> tuple[int, bool]:
        """Return the number of samples, and whether it is clear.

        If all tensors have the same length, this is the number. Otherwise, use `drawn`, the number
        that the loader knows, or else the length of the target, or of the first tensor.
        """
        target = self.target
        if drawn and isinstance(target, torch.Tensor) and target.shape[:1] == (drawn,):
            return drawn, True  # saves time
        content = (self.arguments, self.keywords) if target is None else target
        tensors, lengths = tensors_in(content), self.lengths
        rows = next((t.size(0) for t in tensors if t.dim()), 1 if tensors else len(content))
        if drawn is None:
            inputs = tensors_in([self.arguments, self.keywords])
            first = next((t.size(0) for t in inputs if t.dim()), rows)
            return rows, len(lengths) < 2 or (isinstance(target, torch.Tensor) and first == rows)
        is_list = any(
            isinstance(x, list | tuple) and len(x) == drawn for x in (*self.arguments, content)
        )
        widths = {0 if t.is_nested or t.dim() < 2 else t.size(1) for t in tensors_in(list(self))}
        is_known = len(lengths) != 1 or is_list or widths == {drawn}  # or dimension 0 is the time
        return drawn if is_known else rows, is_known or rows == drawn


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors, and objects that have a method ``to``, on a device."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if _moves_itself(leaf) else leaf

    return map_batch(batch, move, _moves_itself)


def map_batch(
    batch: Any,
    convert: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Return a batch with new containers, and `convert` applied to everything else.

    `is_leaf` selects containers that `convert` gets as a whole.
    """
    if isinstance(batch, torch.Tensor) or (is_leaf is not None and is_leaf(batch)):
        return convert(batch)
    mapped = functools.partial(map_batch, convert=convert, is_leaf=is_leaf)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(mapped, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map(mapped, batch))
    if isinstance(batch, dict | UserDict):
        made = copy.copy(batch)
        for key, item in batch.items():
            made[key] = mapped(item)
        return made
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = {field.name for field in dataclasses.fields(batch)}
        if set(getattr(batch, "__dict__", ())) <= names:
            like = copy.copy(batch)  # replace() would run __post_init__ again
            for name in names:
                object.__setattr__(like, name, mapped(getattr(batch, name)))
            return like
    return convert(batch)


def _moves_itself(item: Any) -> bool:
    return callable(getattr(item, "to", None))


def collate_samples(samples: list[Any]) -> Any:
    """Join samples, which may be small batches, into one batch."""
    if isinstance(samples[0], tuple | list):
        return [collate_samples(list(column)) for column in zip(*samples, strict=True)]
    if isinstance(samples[0], torch.Tensor) and samples[0].dim() > 0:
        return torch.cat(samples)
    return default_collate(samples)


# ---- from a batch to the arguments of forward


def parse_batch(batch: Any, model: torch.nn.Module) -> ParsedBatch:
    """Return the arguments and the target in a batch.

    In ``(*features, target)``, the features are positional arguments. In a dict or data class, keys
    that ``forward`` takes are keyword arguments, and one other key is the target. This also holds
    for a named tuple if ``forward`` takes all fields except at most one.

    Raises:
        TypeError: If the arguments and the target cannot be told apart.
    """
    fields = set(getattr(batch, "_fields", ())) if isinstance(batch, tuple) else set()
    if (named := batch._asdict() if fields else named_values(batch)) is not None:
        inputs = _inputs_of(model)
        names = {p.name for p in inputs if p.kind not in _VARIADIC}
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inputs)
        known = {name: value for name, value in named.items() if takes_any or name in names}
        others = [name for name in named if name not in known]
        required = {p.name for p in inputs if p.default is p.empty and p.kind not in _VARIADIC}
        if not fields or (required <= fields and len(fields - names) <= 1):
            if not known or len(others) > 1:
                raise _unclear_batch_error(batch, model)
            return ParsedBatch((), known, named[others[0]] if others else None)
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise _unclear_batch_error(batch, model)
    *features, target = batch
    return ParsedBatch(tuple(features), {}, target)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _inputs_of(model: torch.nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(user_module(model).forward).parameters.values())


def _unclear_batch_error(batch: Any, model: torch.nn.Module) -> TypeError:
    takes = ", ".join(str(p).partition(":")[0].partition("=")[0] for p in _inputs_of(model))
    return TypeError(
        f"The batch is {describe(batch)}, and forward of {type(user_module(model)).__name__} takes "
        f"({takes}). It must be (*features, target), or a dict or data class with the arguments of "
        "forward and the target. Change the collate_fn of the loader, or override train_batch, "
        "validate_batch, and predict_batch."
    )


def has_masked_labels(batch: Any) -> bool:
    """Return whether labels are -100, which losses ignore."""
    if (named := named_values(batch)) is not None:
        labels = [v for n, v in named.items() if "label" in str(n) or "target" in str(n)]
    else:
        labels = list(batch[-1:]) if isinstance(batch, tuple | list) else []
    integers = [t for t in labels if isinstance(t, torch.Tensor) and not t.is_floating_point()]
    return any(bool((tensor == IGNORE_INDEX).any()) for tensor in integers)
