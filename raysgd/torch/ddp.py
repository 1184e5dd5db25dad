"""Replication of models with DistributedDataParallel.

The workers average gradients in the last micro-batch of an update:

1. DistributedDataParallel averages in the first backward pass after a forward pass.
2. `ReplicatedModel._end_pass` runs after each pass. It completes the averages of the first one, for
   unused parameters and those that were frozen at first, and averages all gradients of later ones.
3. `average` runs before the step of an optimizer. If gradients are new or changed since the last
   pass, it averages all gradients of the optimizer.
4. `check_skipped` runs before the commit. It raises if other workers trained a model that this
   worker did not.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from raysgd._internal import step_timing
from raysgd.errors import ReplicasDifferError
from raysgd.torch.collectives import average_gradients
from raysgd.torch.tensors import parameters_of, version_of
from raysgd.torch.wrapper import Wrapper


class ReplicatedModel(Wrapper):
    """DistributedDataParallel that synchronizes only forward passes with gradients.

    Under ``no_grad``, a call goes to the module directly. DistributedDataParallel would broadcast
    the buffers then too, and block forever if workers validate different numbers of batches.
    """

    _reduced: Sequence[torch.nn.Parameter] = ()
    """The parameters whose gradients a backward pass averages."""
    _others: Sequence[torch.nn.Parameter] = ()
    """Parameters that were frozen at first."""
    _awaits_pass = False
    """Whether the next backward pass averages gradients, because a forward pass prepared it."""
    _is_in_backward = False
    """Whether a backward pass is in progress."""
    _averaged: Mapping[torch.nn.Parameter, Any] = MappingProxyType({})
    """Averaged gradients, to detect changes until an optimizer steps."""
    _trained_this_update = False
    """Whether a backward pass of this update has computed gradients."""
    _trained_last_update = False
    """The same for the previous update."""
    _first_pass = -1
    """Number of the first backward pass of the newest update with one, to order models."""
    _watches_parameters = False
    """Whether hooks of the parameters detect backward passes, and not only hooks of outputs."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._reduced = [p for p in self._module_parameters if p.requires_grad]
        self._others = [p for p in self._module_parameters if not p.requires_grad]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        phase = step_timing.enter(step_timing.FORWARD)
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        step_timing.resume(phase)
        if self.require_backward_grad_sync:
            self._awaits_pass, self._is_in_backward = True, False  # an earlier pass may have failed
            for tensor in _find_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_pass)
            if not self._watches_parameters and _may_hide_tensors(output):
                self._watches_parameters = True
                for parameter in filter(lambda each: each.requires_grad, self._reduced):
                    parameter.register_hook(self._begin_pass)
        return output

    def _begin_pass(self, _: torch.Tensor) -> None:
        # Otherwise, this is within a pass, such as one that recomputes a checkpoint.
        if not self._is_in_backward and self.require_backward_grad_sync:
            self._is_in_backward, number = True, torch._C._current_graph_task_id()
            before = list(map(gradient_of, self._reduced))
            # A callback of a callback runs after the callback of DistributedDataParallel.
            queue = Variable._execution_engine.queue_callback
            phase = step_timing.enter(step_timing.BACKWARD, any_thread=True)

            def complete() -> None:
                # DistributedDataParallel now waits for the averages.
                computing = step_timing.enter(step_timing.WAIT, any_thread=True)
                step_phase = computing if phase is None else phase
                queue(lambda: self._end_pass(number, before, step_phase))

            queue(complete)

    def _end_pass(self, number: int, before: Sequence[Any], phase: int | None) -> None:
        """Average what backward pass `number` has not averaged. `before`: earlier gradients.

        DistributedDataParallel averages only the first backward pass after a forward pass. The mean
        of averaged and local gradients is right too, because a mean is linear.
        """
        step_timing.resume(phase)
        self._is_in_backward = False
        if list(map(gradient_of, self._reduced)) == before:
            return  # a pass that computes no gradients of parameters, as for a gradient penalty
        if not self._trained_this_update:
            self._trained_this_update, self._first_pass = True, number
        if self._awaits_pass:
            pairs = zip(self._reduced, before, strict=True)
            self._complete([each for each, earlier in pairs if gradient_of(each) == earlier])
            local = [p for p in self._others if p.requires_grad]
        else:
            local = self._module_parameters
        if local:
            average_gradients(local)
        self._averaged = {p: gradient_of(p) for p in self._module_parameters}

    def _complete(self, missing: Sequence[torch.nn.Parameter]) -> None:
        """Complete the averages that other workers wait for, if a loss does not use parameters.

        Without gradients on all workers, parameters have none afterwards. Therefore the share of a
        worker without a gradient is -0.0, which is the sum only of such shares.
        """
        self._awaits_pass = False
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError:
            pass
        else:
            if len(missing) < len(self._reduced):
                return
        frozen = [parameter for parameter in missing if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            torch.autograd.backward(missing, [torch.full_like(each, -0.0) for each in missing])
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        for parameter in missing:
            gradient = parameter.grad
            if gradient is not None and bool((gradient.signbit() & (gradient == 0)).all()):
                parameter.grad = None

    def _take_averaged(self, stepped: Mapping[torch.nn.Parameter, Any]) -> Mapping[Any, Any]:
        """Return the averaged gradients, and forget those of the parameters that will change."""
        if self._awaits_pass and not stepped.keys().isdisjoint(self._reduced):
            self._complete(self._reduced)
        averaged = self._averaged
        self._averaged = {p: gradient for p, gradient in averaged.items() if p not in stepped}
        return averaged

    def _end_update(self) -> None:
        self._trained_last_update, self._trained_this_update = self._trained_this_update, False
        self._awaits_pass, self._averaged = False, {}

    def _complete_skipped(self) -> None:
        """Join the averages of an update without a pass. Raise if other workers have gradients."""
        if not self._awaits_pass:  # a forward pass without the module, as in PyTorch's Join
            self._pre_forward()  # type: ignore[no-untyped-call]
            self._post_forward(())  # type: ignore[no-untyped-call]
        self._complete(self._reduced)
        if any(parameter.grad is not None for parameter in self._reduced):
            raise RuntimeError(
                "train_batch made no backward pass for this batch on this worker, but did so on "
                "other workers. All workers must train every model on every batch. For a batch "
                "without a loss, call self.backward(loss, num_samples=0) with any loss of the "
                "registered model. For others, pass their number of samples."
            )


def wrapped(
    model: torch.nn.Module,
    device: torch.device,
    arguments: Mapping[str, Any],
    is_criterion: bool = False,
) -> torch.nn.Module:
    """Wrap a model, unless user code has wrapped it or it has no trainable parameter."""
    if isinstance(model, DistributedDataParallel) or not any(
        parameter.requires_grad for parameter in model.parameters()
    ):
        return model  # DistributedDataParallel rejects a model without trainable parameters
    ddp_arguments = {"device_ids": None if device.index is None else [device.index], **arguments}
    replica = ReplicatedModel(model, **ddp_arguments)
    # A criterion may run several times in a step, and a broadcast would modify its buffers.
    stays = is_criterion or only_running_statistics(model)
    if stays and not ddp_arguments.keys() & {"broadcast_buffers", "forward_sync_buffers"}:
        # The argument of the constructor would also turn off the first broadcast before
        # PyTorch 2.13.
        replica.broadcast_buffers = False
    return replica


def average(optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> None:
    """Average the gradients of an optimizer, unless wrappers of `models` have averaged them.

    Every rank must call this.
    """
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() runs within a backward pass, such as in a hook. "
            "The workers average gradients until the end of the pass. Call step() after it."
        )
    stepped = dict.fromkeys(parameters_of(optimizer))
    for model in models:
        if isinstance(model, DistributedDataParallel) and not isinstance(model, ReplicatedModel):
            for parameter in model.parameters():  # which user code averages
                stepped.pop(parameter, None)
    averaged: dict[torch.nn.Parameter, Any] = {}
    for model in models:
        if isinstance(model, ReplicatedModel):
            averaged |= model._take_averaged(stepped)
    if not any(p.grad is not None and averaged.get(p) != gradient_of(p) for p in stepped):
        return
    try:
        average_gradients(list(stepped))
        return
    except RuntimeError as error:
        # The other workers are in another collective, because they have no changes.
        if not averaged or "must call the same collectives" not in str(error):
            raise
    rank = dist.get_rank()  # outside of the handler, because the error has another cause
    raise ReplicasDifferError(
        f"Worker {rank} changed gradients after the workers had averaged them, and other workers "
        "did not. Change them on all workers, or clip them with register(max_grad_norm=...).",
        ranks=[rank],
    )


def end_update(models: Sequence[torch.nn.Module]) -> None:
    for model in models:
        if isinstance(model, ReplicatedModel):
            model._end_update()


def check_skipped(models: Sequence[torch.nn.Module], has_optimizer_steps: bool) -> None:
    """Raise an error if this worker has skipped a model that other workers have trained.

    Without it, the other workers would average their gradients with those of a later pass. A model
    counts as skipped if it had a backward pass in the previous update. Without a pass and without
    steps of optimizers, the first one counts. Every rank must call this at the end of an update.
    """
    replicas = [model for model in models if isinstance(model, ReplicatedModel)]
    replicas.sort(key=lambda model: model._first_pass)
    skipped = [
        model for model in replicas if model._trained_last_update and not model._trained_this_update
    ]
    if not has_optimizer_steps and not any(model._trained_this_update for model in replicas):
        skipped = replicas[:1]
    parameters = [parameter for model in skipped for parameter in model.parameters()]
    if any(parameter.grad is not None for parameter in parameters):
        return  # user code accumulates gradients
    for model in skipped:
        model._complete_skipped()


def _may_hide_tensors(output: Any) -> bool:
    """Return whether an output may contain tensors in objects of unknown classes."""
    if isinstance(output, Mapping):
        return any(map(_may_hide_tensors, output.values()))
    if isinstance(output, list | tuple):
        return any(map(_may_hide_tensors, output))
    return not isinstance(output, torch.Tensor | int | float | str | None)


def gradient_of(parameter: torch.nn.Parameter) -> Any:
    """Return the identity and version of a gradient, to detect changes."""
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), version_of(gradient))


def only_running_statistics(model: torch.nn.Module) -> bool:
    """Return whether all buffers of `model` are running statistics of batch normalization.

    Ranks may differ in such buffers until a call ends, which saves a broadcast in each forward
    pass.
    """
    return all(
        isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)
        for module in model.modules()
        if any(True for _ in module.buffers(recurse=False))
    )


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of DistributedDataParallel, or `model` itself."""
    module: torch.nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return module


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module, without DistributedDataParallel and torch.compile."""
    module = unwrap(model)
    plain: torch.nn.Module = getattr(module, "_orig_mod", module)
    return plain


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether ``torch.compile``, or ``compile()`` of a module, compiles parts of `model`."""
    has_own = any(module._compiled_call_impl is not None for module in model.modules())
    return has_own or plain(model) is not unwrap(model)


def running_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the buffers of batch normalization in `model`.

    Other buffers may be caches, whose sizes depend on each worker's batches.
    """
    return [
        buffer
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        for buffer in module.buffers(recurse=False)
    ]


def replicated(model: torch.nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel)


def rebuild(model: DistributedDataParallel, required: dict[str, bool]) -> None:
    """Rebuild the reducer of a wrapper, in place, for the current process group.

    Every rank must rebuild. A survivor orders its buckets by the gradients of its first step, and a
    replacement worker does not. With the old reducer, these workers would silently add up gradients
    of different parameters. `required` is the result of `averaged_parameters`.
    """
    group, comm_hooks = model.process_group, model._comm_hooks
    kept = {k: v for k, v in vars(model).items() if k not in ("process_group", "reducer", "logger")}
    before = required_gradients(model.module)
    _require_gradients(model.module, {**before, **required})
    try:
        model.__setstate__(kept)  # sets up a wrapper as after unpickling
    finally:
        _require_gradients(model.module, before)
    vars(model).pop("_trained_last_update", None)  # the same on a replacement worker
    model._lazy_init_ran = model._static_graph_delay_allreduce_enqueued = False
    # Set these flags as on a replacement worker, because a forward pass without gradients or
    # synchronization has changed them.
    model.require_forward_param_sync = model.require_backward_grad_sync = True
    model._comm_hooks = []
    for hook, state in comm_hooks:
        if state is None or state is group:
            model.register_comm_hook(None if state is None else model.process_group, hook)
        else:
            warnings.warn(
                f"raysgd removed the communication hook {getattr(hook, '__name__', hook)!r}, "
                f"because workers left or joined. Its state, a {type(state).__name__}, differs "
                "between workers. Register it again in on_world_change(self) of the operator.",
                RuntimeWarning,
                stacklevel=2,
            )


def _require_gradients(module: torch.nn.Module, required: dict[str, bool]) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(required[name])


def required_gradients(module: torch.nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def averaged_parameters(model: DistributedDataParallel) -> dict[str, bool]:
    """Return a dict from each parameter name to whether the wrapper averages its gradient."""
    named = dict(model.module.named_parameters())
    if isinstance(model, ReplicatedModel):
        reduced = set(model._reduced)
        return {name: parameter in reduced for name, parameter in named.items()}
    required = required_gradients(model.module)
    averaged = [name for name, is_set in required.items() if is_set]
    num_averaged = model._get_ddp_logging_data()["num_parameter_tensors"]
    if len(set(averaged) - model.parameters_to_ignore) == num_averaged:
        return required
    # User code wrapped the model and froze parameters later, so any parameter may be averaged.
    return {name: p.is_floating_point() or p.is_complex() for name, p in named.items()}


@contextlib.contextmanager
def no_forward_sync(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Keep models that user code wrapped from broadcasting buffers in their forward pass."""
    wrapped = [m for m in models if isinstance(m, DistributedDataParallel)]
    before = [model.require_forward_param_sync for model in wrapped]
    for model in wrapped:
        model.require_forward_param_sync = False
    try:
        yield
    finally:
        for model, value in zip(wrapped, before, strict=True):
            model.require_forward_param_sync = value
