"""Compare the gradients that workers compute for the same batch, to find broken hardware."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd._internal.nested import map_leaves
from raysgd._internal.step_timing import OTHER
from raysgd.data.partition import MicroBatch
from raysgd.torch import collectives, ddp
from raysgd.torch.digests import digest_of
from raysgd.torch.features.differences import (
    differing,
    hash_of,
    kind_of,
    majority_of,
    named_workers,
)
from raysgd.torch.generators import TorchGenerators
from raysgd.torch.tensors import parameters_of

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState


def cross_check(
    state: TorchTrainState,
    batch: Any,
    source: int,
    compute: Callable[[Any], contextlib.AbstractContextManager[Any]],
) -> tuple[str, list[int]]:
    """Compute the gradients of a batch of rank `source` on all workers, and discard them.

    Return a description of a difference and the ranks of the minority, or "" and [].
    """
    gradients = {p: p.grad for optimizer in state.optimizers for p in parameters_of(optimizer)}
    gradients |= {p: p.grad for model in state.models for p in model.parameters()}
    for parameter in gradients:
        parameter.grad = None
    try:
        own = _digests(state, batch, source, compute)
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        state.timing.enter(OTHER)
    number = hash_of(own)
    if state.minimum(number) == ~state.minimum(~number):
        return "", []
    mine = own, kind_of(state.settings.device), state.context.node_ip
    size = state.context.world_size
    reports = [collectives.broadcast_object(mine, rank) for rank in range(size)]
    kinds = sorted({kind for _, kind, _ in reports})
    for kind in kinds:
        ranks = [rank for rank in range(size) if reports[rank][1] == kind]
        if differences := differing([reports[rank][0] for rank in ranks]):
            _, minority = majority_of(differences, len(ranks))
            odd = [ranks[index] for index in minority]
            hosts = ", ".join(f"{rank} on {reports[rank][2]}" for rank in odd or ranks)
            return (
                f"After step {state.global_step}, {named_workers(odd or ranks)} computed other "
                f"gradients of the same batch than {'the majority' if odd else 'each other'}, in: "
                f"{', '.join(list(differences)[:5])}. Workers by host: {hosts}. Their devices are "
                f"equal ({kind}). Common causes: broken hardware; kernels that are not "
                "deterministic; train_batch depends on the rank or on random numbers of its own. "
                "Find out by torch.use_deterministic_algorithms(True). If a host is broken, load "
                "a checkpoint and continue without this host."
            ), odd
    state.settings.warn_once(
        "crosscheck",
        "Guard(crosscheck_every=...) compares only workers with equal devices and numbers of "
        "threads, but the workers have: %s.",
        ", ".join(kinds),
    )
    return "", []


def _digests(
    state: TorchTrainState,
    batch: Any,
    source: int,
    compute: Callable[[Any], contextlib.AbstractContextManager[Any]],
) -> dict[str, int | None]:
    """Return a digest of each gradient. All workers use equal batches, buffers, and seeds."""

    def inputs() -> Any:
        in_parts = state.segment.in_parts
        part, _ = state.micro_batching.split_batch(batch, MicroBatch(), in_parts)[0]
        return part, state.buffers.tensors()

    batch, buffers = map_leaves(state.from_rank(inputs, source), _aligned)
    with contextlib.ExitStack() as stack:
        stack.enter_context(TorchGenerators().unchanged())
        for model in state.models:
            if isinstance(model, DistributedDataParallel):
                # Otherwise, the next forward pass would not broadcast buffers.
                name = "require_forward_param_sync"
                stack.callback(setattr, model, name, getattr(model, name))
                stack.enter_context(model.no_sync())
        random.seed(state.global_step)
        np.random.seed(state.global_step % 2**32)
        torch.manual_seed(state.global_step)
        state.buffers.write(buffers)
        stack.enter_context(compute(batch))
        digests = {
            f"models[{index}].{name}": None if p.grad is None else _digest(p.grad)
            for index, model in enumerate(state.models)
            for name, p in ddp.plain(model).named_parameters()
        }
    if not any(digests.values()):
        raise RuntimeError(
            "Guard(crosscheck_every=...): train_batch computed no gradients before the step of an "
            "optimizer, for example because it passes a closure. Leave out crosscheck_every."
        )
    return digests


def _digest(gradient: torch.Tensor) -> int:
    content = gradient.coalesce().values() if gradient.is_sparse else gradient
    return int(digest_of([content], content.device))


def _aligned(leaf: Any) -> Any:
    """Return a copy with a memory layout that is equal on all workers: rounding depends on it."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return leaf.detach().clone(memory_format=torch.contiguous_format)
    return leaf
