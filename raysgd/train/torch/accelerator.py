"""Functions to prepare models, loaders, and optimizers of PyTorch for distributed training.

Each run has its own state: its precision, and the prepared objects.
"""

import contextlib
import copy
import functools
import os
import random
from collections.abc import Callable
from types import MethodType
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from raysgd._internal.arguments import check_choice, check_flags
from raysgd.torch.input.batches import map_batch
from raysgd.torch.precision import PRECISIONS, Precision, to_full_precision
from raysgd.train.session import get_context, world_size
from raysgd.train.torch.prepared_loader import PreparedLoader
from raysgd.train.worker_session import num_collectives, process_state


class _Accelerator:
    """Precision and prepared optimizers of one run."""

    def __init__(self, amp: bool) -> None:
        self.amp = amp
        self.precision = PRECISIONS[amp](get_device(), None)
        self.optimizers: list[Optimizer] = []
        self.stepping: Optimizer | None = None
        self.loss_weight = 1.0
        """Weight of the current batch's loss in the mean over the workers."""


def _accelerator() -> _Accelerator:
    accelerator: _Accelerator = process_state.accelerator or _Accelerator(amp=False)
    process_state.accelerator = accelerator
    return accelerator


def accelerate(amp: bool = False) -> None:
    """Set the precision of the run. Call it once, at the top of the training function.

    With `amp`, models from `prepare_model` compute in mixed precision: in float16 on a GPU, and in
    bfloat16 on a CPU. Then use `prepare_optimizer` and `backward` as well.
    """
    if process_state.accelerator is not None:
        raise RuntimeError(
            "accelerate() has to be called once, and before prepare_model(), "
            "prepare_data_loader(), prepare_optimizer(), and backward()."
        )
    process_state.accelerator = _Accelerator(amp)


def get_device() -> torch.device:
    """Return the device of this worker: its GPU if it has one, otherwise the CPU."""
    context = process_state.context
    if not torch.cuda.is_available() or (context is not None and context.gpu_index is None):
        return torch.device("cpu")
    index: Any = torch.cuda.current_device() if context is None else context.gpu_index
    # Each worker sees only its own GPUs unless the workers of a node share them.
    return torch.device("cuda", index if index < torch.cuda.device_count() else 0)


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    wrap_ddp: bool = True,
    ddp_kwargs: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """Return a model for distributed training.

    Load the state of an optimizer after this call, because PyTorch puts that state on the device of
    the parameters.

    Args:
        model: the model.
        move_to_device: whether to move the model to `get_device()`; or another device.
        wrap_ddp: whether to wrap the model in DistributedDataParallel if there are several workers.
            One worker alone has `module`, `no_sync`, and `join` too, and loads either state.
        ddp_kwargs: arguments of DistributedDataParallel.
    """
    check_flags("prepare_model", wrap_ddp=wrap_ddp)
    accelerator = _accelerator()
    device = get_device() if isinstance(move_to_device, bool) else torch.device(move_to_device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if move_to_device:
        model = model.to(device)
    if accelerator.amp:
        forward = functools.partial(_in_autocast, accelerator.precision, model.forward)
        model.forward = functools.update_wrapper(forward, model.forward)
    if not wrap_ddp or world_size() <= 1:
        return _add_module_attribute(model) if wrap_ddp else model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"prepare_model({type(model).__name__}): none of its parameters requires a gradient. "
            "Pass wrap_ddp=False."
        )
    kwargs = dict(ddp_kwargs or {})
    if device.type == "cuda" and any(parameter.is_cuda for parameter in model.parameters()):
        kwargs.setdefault("device_ids", [device])
    wrapped = DistributedDataParallel(model, **kwargs)
    wrapped.register_load_state_dict_pre_hook(_add_prefix)
    return wrapped


def _add_prefix(wrapped: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Let a wrapped model load the state of a group of one worker."""
    names, inner = [name for name in state if name.startswith(prefix)], f"{prefix}module."
    if not any(name.startswith(inner) for name in names):
        for name in names:
            state[inner + name.removeprefix(prefix)] = state.pop(name)


_UNNOTICED: Any = type("Unnoticed", (), {"__init_subclass__": classmethod(lambda cls: None)})
"""Base that hides a subclass from the other bases, which may refuse or list subclasses."""


def _add_module_attribute(model: torch.nn.Module) -> torch.nn.Module:
    """Return an object with the attributes of a model, and of its wrapper in a larger group."""
    if hasattr(model, "module"):
        return model

    class Prepared(_UNNOTICED, type(model)):  # type: ignore[misc]
        module = model

        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            state_dict = copy.copy(state_dict)
            consume_prefix_in_state_dict_if_present(state_dict, "module.")
            return super().load_state_dict(state_dict, *args, **kwargs)

        def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
            inner = f"{prefix}module."  # within another model, which loads by this method
            for name in [name for name in state if name.startswith(inner)]:
                state[prefix + name.removeprefix(inner)] = state.pop(name)
            super()._load_from_state_dict(state, prefix, *others)

        def __deepcopy__(self, memo: Any) -> Any:
            return _add_module_attribute(copy.deepcopy(self.module, memo))

        def __reduce__(self) -> Any:
            return copy.copy, (self.module,)  # a file can be read without raysgd

    for name in {"no_sync", "join"} - set(dir(model)):  # the model may call its own
        setattr(Prepared, name, staticmethod(lambda *options, **named: contextlib.nullcontext()))
    Prepared.__name__, Prepared.__qualname__ = type(model).__name__, type(model).__qualname__
    prepared: torch.nn.Module = object.__new__(Prepared)
    object.__setattr__(prepared, "__dict__", vars(model))
    return prepared


def prepare_data_loader(
    data_loader: torch.utils.data.DataLoader[Any],
    add_dist_sampler: bool | Literal["always"] = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> torch.utils.data.DataLoader[Any]:
    """Return a loader that gives each worker its part of the data, on its device.

    A pass trains on every sample once, in an order that changes with each pass if the loader
    shuffles. ``loader.sampler.set_epoch(n)`` sets the epoch of the next pass. A pass counts if the
    workers communicate during it, so one worker alone may read batches. raysgd cannot count the
    collectives of NCCL, or of process groups of your own. Then a pass counts from its second batch.
    Batches of a step may differ by one sample, and `backward` weights their losses by size. If a
    last step has fewer samples than workers, some workers repeat a sample with weight 0.

    ``state_dict()`` returns the position after the batches that the loop has received. It is the
    same on all workers. After ``load_state_dict``, the next pass trains on the rest of the epoch,
    with any number of workers.

    Args:
        data_loader: the loader, with the same sampler on all workers. Its batch size is that of one
            worker in the full group. A smaller group gets larger batches, unless you pass
            ``ElasticConfig(global_batch="scale")``.
        add_dist_sampler: whether to split the data if there are several workers. A loader with an
            IterableDataset, a batch sampler, or a sampler with ``num_replicas`` is not split.
            Neither is a loader with its own ``__iter__``, or whose sampler has no length; then a
            warning is logged. With "always", every worker reads an IterableDataset, or the indices
            of a batch sampler, and uses its part.
        move_to_device: whether to move the batches to `get_device`.
        auto_transfer: whether to move the next batch during the current step, on a CUDA stream of
            its own; needs a GPU.
    """
    if not isinstance(data_loader, torch.utils.data.DataLoader):
        raise TypeError(
            f"prepare_data_loader({type(data_loader).__name__}): must be a PyTorch DataLoader. "
            "Partition other data yourself, by raysgd.train.world_rank()."
        )
    where = "prepare_data_loader"
    check_flags(where, move_to_device=move_to_device, auto_transfer=auto_transfer)
    check_choice(where, "add_dist_sampler", add_dist_sampler, (True, False, "always"))
    accelerator = _accelerator()  # makes a later accelerate() raise
    context, seed = get_context(), process_state.seed
    if seed is None:  # the random numbers of several workers may differ
        seed = torch.initial_seed() % 2**31 if context.get_world_size() == 1 else 0
    return PreparedLoader(
        data_loader,
        world_size=context.get_world_size(),
        rank=context.get_world_rank(),
        device=get_device() if move_to_device else None,
        prefetch=auto_transfer,
        seed=seed,
        partitions=add_dist_sampler,
        full_world_size=context.spec.full_world_size,
        shares=context.worker.shares,
        set_weight=functools.partial(setattr, accelerator, "loss_weight"),
        num_collectives=num_collectives,
    )


def prepare_optimizer(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer step in the precision of the run, and return it."""
    accelerator, step = _accelerator(), optimizer.step
    if not accelerator.amp:
        return optimizer
    accelerator.optimizers.append(optimizer)
    accelerator.precision.prepare([], accelerator.optimizers, None)

    @functools.wraps(getattr(step, "__func__", step))  # GradScaler reads the signature
    def amp_step(optimizer: Optimizer, closure: Any = None, **arguments: Any) -> Any:
        if accelerator.stepping is optimizer:  # the precision steps the optimizer
            return step(**arguments)
        if closure is not None:
            raise RuntimeError(
                "In mixed precision, step() takes no closure. Compute the loss, call "
                "raysgd.train.torch.backward(loss), and then step()."
            )
        accelerator.stepping = optimizer
        try:
            accelerator.precision.step(optimizer)
        finally:
            accelerator.stepping = None

    optimizer.step = MethodType(amp_step, optimizer)  # type: ignore[method-assign]
    return optimizer


def backward(tensor: torch.Tensor) -> None:
    """Compute the gradients of a loss, in the precision of the run.

    The loss must be the mean over the newest batch of all loaders from `prepare_data_loader`. If
    batches of a step differ in size, this weights the loss by the size of this worker's batch.
    """
    accelerator = _accelerator()
    weight = accelerator.loss_weight
    accelerator.precision.backward(tensor if weight == 1.0 else tensor * weight, True)


def enable_reproducibility(seed: int = 0) -> None:
    """Seed Python, NumPy and PyTorch, and make PyTorch use deterministic algorithms.

    Call this at the top of the training function, after `accelerate`. Data loader workers are
    seeded too. Training becomes slower. Results may still differ between machines.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Deterministic matrix products on CUDA need this.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    process_state.seed = seed


# Pickled models refer to this function by module and name: do not move or rename it.
def _in_autocast(
    precision: Precision, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with precision.autocast():
        return map_batch(forward(*args, **kwargs), to_full_precision)


class TorchAccelerator:
    """The functions of ``raysgd.train.torch`` as methods, as in Ray Train 1."""

    def __init__(self, amp: bool = False) -> None:
        accelerate(amp)

    backward = staticmethod(backward)
    enable_reproducibility = staticmethod(enable_reproducibility)
    get_device = staticmethod(get_device)
    prepare_data_loader = staticmethod(prepare_data_loader)
    prepare_model = staticmethod(prepare_model)
    prepare_optimizer = staticmethod(prepare_optimizer)
