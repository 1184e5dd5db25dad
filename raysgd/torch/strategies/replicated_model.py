"""Models that average their gradients with DistributedDataParallel, and are used like modules.

The workers average gradients in the last micro-batch of an update:

1. DistributedDataParallel averages in the first backward pass after a forward pass.
2. `BackwardPasses._end_pass` runs after each pass. It completes the averages of the first one, for
   unused parameters and those that were frozen at first, and averages all gradients of later ones.
3. `DDPExchange.complete_gradients` runs before the step of an optimizer. If gradients are
   new or changed since the last pass, it averages all gradients of the optimizer.
4. `DDPExchange.before_commit` raises if other workers trained a model that this worker did
   not.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Embedding, EmbeddingBag
from torch.nn.parallel import DistributedDataParallel

from raysgd._internal import step_timing
from raysgd.torch.collectives import average_gradients
from raysgd.torch.modules import (
    can_require_grad,
    grad_flags,
    has_only_running_statistics,
    set_grad_flags,
    uncompiled,
)
from raysgd.torch.tensors import call_after_backward, leaves_in, version_of

_pass_numbers = itertools.count()


class ReplicatedModel(DistributedDataParallel):
    """DistributedDataParallel that user code can use like its module.

    It has the attributes and items of its module, and names have no prefix ``module.``. Attributes
    that its constructor does not set go to the module.

    It synchronizes only forward passes with gradients. Under ``no_grad``, a call goes to the module
    directly. DistributedDataParallel would broadcast the buffers then too, and block forever if
    workers validate different numbers of batches.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        private = {"_comm_hooks", "_get_ddp_logging_data", "_post_forward", "_pre_forward"}
        if missing := private.difference(dir(self)):
            raise RuntimeError(
                f"raysgd does not support PyTorch {torch.__version__}: DistributedDataParallel has "
                f"no {', '.join(sorted(missing))}. Install a version that raysgd was tested with."
            )
        del vars(self)["training"]  # __getattr__ then returns the mode of the module
        self._passes = BackwardPasses(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        phase = step_timing.begin_phase(step_timing.FORWARD)
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        step_timing.resume_phase(phase)
        if self.require_backward_grad_sync:
            self._passes.end_forward(output)
        return output

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Add ``module.`` to the names if a model that contains this wrapper loads its state."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The constructor sets attributes of the wrapper.
        is_own = "_passes" not in vars(self) or name in vars(self) or hasattr(type(self), name)
        if is_own or name == "module":
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)


_PUBLIC = {name for name in vars(torch.nn.Module) if not name.startswith("_")}
_METHODS_OF_THE_MODULE = {
    *(name for name in _PUBLIC - {"forward"} if inspect.isfunction(getattr(torch.nn.Module, name))),
    *("__bool__", "__delattr__", "__delitem__", "__getitem__", "__iter__", "__len__"),
    *("__setitem__", "_apply"),
}
"""Methods of a wrapper that call the module's methods, so that names have no prefix."""


def _of_module(name: str) -> Callable[..., Any]:
    def method(self: ReplicatedModel, *args: Any, **kwargs: Any) -> Any:
        if name == "__bool__":  # a module that has no length has no such method
            return bool(uncompiled(self.module))
        result = getattr(self.module, name)(*args, **kwargs)
        return self if result is self.module else result

    method.__name__ = name
    return method


for _name in _METHODS_OF_THE_MODULE:
    setattr(ReplicatedModel, _name, _of_module(_name))


class BackwardPasses:
    """The backward passes of a replicated model in an update, and what they have averaged.

    This is an object of its own, because each change of a module's attribute takes many calls.
    """

    def __init__(self, model: ReplicatedModel) -> None:
        self.model = model
        named, ignored = model.module.named_parameters(), model.parameters_to_ignore
        self.parameters = [parameter for name, parameter in named if name not in ignored]
        self.reduced = [p for p in self.parameters if p.requires_grad]
        """The parameters whose gradients a backward pass averages."""
        embeddings = (m for m in model.module.modules() if isinstance(m, Embedding | EmbeddingBag))
        self._sparse = {embedding.weight for embedding in embeddings if embedding.sparse}
        self.initially_frozen = [p for p in self.parameters if not p.requires_grad]
        self.is_prepared = False
        """Whether the next backward pass averages gradients, because a forward pass prepared it."""
        self.is_in_backward = False
        """Whether a backward pass is in progress."""
        self.averaged: Mapping[torch.nn.Parameter, Any] = {}
        """Averaged gradients, to detect changes until an optimizer steps."""
        self.first_pass: int | None = None
        """Number of the first backward pass of this update that computed gradients. It orders
        models."""
        self.previous_first_pass: int | None = None
        """The same for the previous update."""
        self.watches_parameters = False
        """Whether hooks of the parameters detect backward passes, and not only hooks of outputs."""

    def end_forward(self, output: Any) -> None:
        """Watch for the backward pass of an output."""
        self.is_prepared, self.is_in_backward = True, False  # an earlier pass may have failed
        may_hide_tensors = False
        for leaf in leaves_in(output):
            if not isinstance(leaf, torch.Tensor):
                may_hide_tensors |= not isinstance(leaf, int | float | str | None)
            elif leaf.requires_grad:
                leaf.register_hook(self.begin_pass)
        if may_hide_tensors and not self.watches_parameters:
            self.watches_parameters = True
            for parameter in filter(can_require_grad, self.parameters):  # now or later
                required = parameter.requires_grad
                parameter.requires_grad_(True).register_hook(self.begin_pass)
                parameter.requires_grad_(required)

    def begin_pass(self, _: torch.Tensor) -> None:
        # Otherwise, this is within a pass, such as one that recomputes a checkpoint.
        if not self.is_in_backward and self.model.require_backward_grad_sync:
            self.is_in_backward = True
            before = list(map(gradient_version, self.reduced))
            # A callback of a callback runs after the callback of DistributedDataParallel.
            phase = step_timing.begin_phase(step_timing.BACKWARD, any_thread=True)

            def complete() -> None:
                # DistributedDataParallel now waits for the averages.
                computing = step_timing.begin_phase(step_timing.WAIT, any_thread=True)
                step_phase = computing if phase is None else phase
                call_after_backward(lambda: self._end_pass(before, step_phase))

            call_after_backward(complete)

    def _end_pass(self, before: Sequence[Any], phase: int | None) -> None:
        """Average what a backward pass has not averaged. `before`: earlier gradients.

        DistributedDataParallel averages only the first backward pass after a forward pass. The mean
        of averaged and local gradients is right too, because a mean is linear.
        """
        step_timing.resume_phase(phase)
        self.is_in_backward = False
        if list(map(gradient_version, self.reduced)) == before:
            return  # a pass that computes no gradients of parameters, as for a gradient penalty
        if self.first_pass is None:
            self.first_pass = next(_pass_numbers)
        if self.is_prepared:
            pairs = zip(self.reduced, before, strict=True)
            self._complete_averages([p for p, version in pairs if gradient_version(p) == version])
            local = [p for p in self.initially_frozen if p.requires_grad]
        else:
            local = self.parameters
        if local:
            average_gradients(local)
        self.averaged = {p: gradient_version(p) for p in self.parameters}

    def _complete_averages(self, missing: Sequence[torch.nn.Parameter]) -> None:
        """Complete the averages that other workers wait for, if a loss does not use parameters.

        Without gradients on all workers, parameters have none afterwards. Therefore the term of a
        worker without a gradient is -0.0, which is the sum only of such terms.
        """
        self.is_prepared = False
        try:
            self.model.reducer._check_reducer_finalized()  # no public method tells
            if len(missing) < len(self.reduced):
                return
        except RuntimeError:  # the reducer waits for gradients
            pass
        frozen = [parameter for parameter in missing if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        self.is_in_backward = True  # this is no pass of user code
        try:
            zeros = {p: torch.full_like(p, -0.0) for p in missing}
            # As in the gradients of embeddings, only the first dimension is sparse.
            zeros |= {p: zeros[p].to_sparse(1) for p in missing if p in self._sparse}
            torch.autograd.backward(missing, [*zeros.values()])
        finally:
            self.is_in_backward = False
            for parameter in frozen:
                parameter.requires_grad_(False)
        for parameter in missing:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                gradient = gradient.coalesce().values()
            if gradient is not None and bool((gradient.real.signbit() & (gradient == 0)).all()):
                parameter.grad = None

    def take_averages(self, stepped: Mapping[torch.nn.Parameter, Any]) -> Mapping[Any, Any]:
        """Return the averaged gradients, and forget those of the parameters that will change."""
        if self.is_prepared and not stepped.keys().isdisjoint(self.reduced):
            self._complete_averages(self.reduced)
        averaged = self.averaged
        self.averaged = {p: gradient for p, gradient in averaged.items() if p not in stepped}
        return averaged

    def end_update(self) -> None:
        self.previous_first_pass, self.first_pass = self.first_pass, None
        self.is_prepared, self.averaged = False, {}

    def complete_skipped(self) -> None:
        """Join the averages of an update without a pass. Raise if other workers have gradients."""
        if not self.is_prepared:  # a forward pass without the module, as in PyTorch's Join
            self.model._pre_forward()  # type: ignore[no-untyped-call]
            self.model._post_forward(())  # type: ignore[no-untyped-call]
        self.previous_first_pass = None  # a model joins once
        self._complete_averages(self.reduced)
        if any(parameter.grad is not None for parameter in self.reduced):
            raise RuntimeError(
                "train_batch made no backward pass for this batch on this worker, but did so on "
                "other workers. All workers must train every model on every batch. For a batch "
                "without a loss, call self.backward(loss, num_items=0) with any loss of the "
                "registered model. For others, pass their number of samples."
            )


def gradient_version(parameter: torch.nn.Parameter) -> Any:
    """Return the identity and version of a gradient, to detect changes."""
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), version_of(gradient))


# ---- wrappers


def wrap(
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
    stays = is_criterion or has_only_running_statistics(model)
    if stays and not ddp_arguments.keys() & {"broadcast_buffers", "forward_sync_buffers"}:
        # The argument of the constructor would also turn off the first broadcast before
        # PyTorch 2.13.
        replica.broadcast_buffers = False
    return replica


def rebuild_reducer(model: DistributedDataParallel, required: dict[str, bool]) -> str:
    """Rebuild the reducer of a wrapper, in place, for the current process group.

    Every rank must rebuild. A survivor orders its buckets by the gradients of its first step, and a
    replacement worker does not. With the old reducer, these workers would silently add up gradients
    of different parameters. `required` is the result of `averaged_parameters`. Return a warning if
    a communication hook was removed, or "".
    """
    group, comm_hooks = model.process_group, model._comm_hooks
    before = grad_flags(model.module)
    set_grad_flags(model.module, {**before, **required})
    try:
        model.__setstate__({})  # sets up a wrapper as after unpickling, and keeps its attributes
    finally:
        set_grad_flags(model.module, before)
    if isinstance(model, ReplicatedModel):
        model._passes.previous_first_pass = None  # as on a replacement worker
    vars(model)["_static_graph_delay_allreduce_enqueued"] = False  # not an attribute of the module
    # Set these flags as on a replacement worker, because a forward pass without gradients or
    # synchronization has changed them.
    model.require_forward_param_sync = model.require_backward_grad_sync = True
    model._comm_hooks, warning = [], ""
    for hook, state in comm_hooks:
        if state is None or state is group:
            model.register_comm_hook(None if state is None else model.process_group, hook)
        else:
            warning = (
                f"raysgd removed the communication hook {getattr(hook, '__name__', hook)!r}, "
                f"because workers left or joined. Its state, a {type(state).__name__}, differs "
                "between workers. Register it in on_world_change(self) instead of setup."
            )
    return warning


def averaged_parameters(model: DistributedDataParallel) -> dict[str, bool]:
    """Return a dict from each parameter name to whether the wrapper averages its gradient."""
    named = dict(model.module.named_parameters())
    if isinstance(model, ReplicatedModel):
        reduced = set(model._passes.reduced)
        return {name: parameter in reduced for name, parameter in named.items()}
    required = grad_flags(model.module)
    averaged = [name for name, is_set in required.items() if is_set]
    num_averaged = model._get_ddp_logging_data()["num_parameter_tensors"]
    if len(set(averaged) - model.parameters_to_ignore) == num_averaged:
        return required
    # User code wrapped the model and froze parameters later, so any parameter may be averaged.
    return {name: can_require_grad(parameter) for name, parameter in named.items()}
