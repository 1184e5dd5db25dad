"""Copies of state: tensors on CPU, models, and random number generators as plain data."""

from __future__ import annotations

import copy
import copyreg
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parametrize

from raysgd.loop import state as loop_state
from raysgd.trees import deep_copied, map_leaves

__all__ = ["copied", "copied_to_cpu", "on_cpu", "rng_state", "set_rng_state", "to_cpu"]


def rng_state() -> dict[str, Any]:
    """Return the states of this process's generators in types that load without being allowed."""
    generators = loop_state.rng_state()
    kind, keys, *rest = generators["numpy"]
    generators["numpy"] = (kind, torch.from_numpy(keys.astype(np.int64)), *rest)
    generators["torch"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        generators["cuda"] = torch.cuda.get_rng_state()
    return generators


def set_rng_state(generators: Mapping[str, Any]) -> None:
    """Take over what `rng_state` returned."""
    torch.set_rng_state(generators["torch"])
    loop_state.set_rng_state(generators)
    if "cuda" in generators and torch.cuda.is_available():
        torch.cuda.set_rng_state(generators["cuda"])


def to_cpu(tree: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples with every tensor on CPU.

    Nothing in it changes as training goes on, also not what is of another type.
    """

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return deep_copied(leaf)
        leaf = leaf.detach()
        return leaf.clone() if leaf.device.type == "cpu" else leaf.cpu()

    return map_leaves(tree, copied)


def on_cpu(tree: Any) -> Any:
    """Return nested dicts, lists and tuples with every tensor on CPU; those there stay."""
    return map_leaves(tree, lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x)


def copied(leaf: Any) -> Any:
    """Return a copy of a tensor on its device, or of anything else that is data."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    # a scheduler within another's state, or a method of one, would bring its optimizer along
    is_data = not (callable(leaf) or hasattr(leaf, "optimizer"))
    return deep_copied(leaf) if is_data else leaf


def copied_to_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of `model` on CPU; the model stays where it is, and needs no room twice.

    The copy can be pickled, also where it has parametrizations (``torch.nn.utils.parametrize``).
    """
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        memo[id(tensor)] = _twin(tensor)
    # what a forward pass has left in attributes has a graph, which cannot be copied and is no use
    for tensor in _tensors_in([vars(module) for module in model.modules()], set()):
        if id(tensor) not in memo:
            memo[id(tensor)] = _twin(tensor)
    copied_model = copy.deepcopy(model, memo)
    for module in copied_model.modules():
        if parametrize.is_parametrized(module):
            copyreg.pickle(type(module), _reduced)
    return copied_model


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    twin = tensor.detach().cpu().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin


def _tensors_in(held: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists and tuples, which may contain themselves."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, dict | list | tuple) and id(held) not in seen:
        seen.add(id(held))
        for each in held.values() if isinstance(held, dict) else held:
            yield from _tensors_in(each, seen)


def _reduced(module: Any) -> tuple[Any, ...]:
    """Take a parametrized module apart: torch made its class for it alone, and pickles none."""
    kind: Any = parametrize.type_before_parametrizations(module)
    return _bare, (kind,), kind.__getstate__(module), None, None, _parametrize


def _bare(kind: type[torch.nn.Module]) -> torch.nn.Module:
    return kind.__new__(kind)


def _parametrize(module: Any, state: Any) -> None:
    """Give a bare module its state, and the class that torch makes for its parametrizations."""
    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)
