"""What must be equal on all workers: tensors and options, by their names."""

import inspect
import itertools
import numbers
import operator
from collections.abc import Iterator
from typing import Any

import torch

from raysgd.torch.features.averaging import WeightAveraging
from raysgd.torch.modules import is_ddp, renormalized_weights, running_statistics, user_module
from raysgd.torch.tensors import TensorVersions
from raysgd.torch.train_state import TorchTrainState

Content = tuple[str, str, Any]
"""The kind "options", "tensors", or "buffers"; a name; and the value, None for a buffer that does
not count."""
_dtype = operator.attrgetter("dtype")


class ReplicaContents:
    """The registered objects of one worker, as the workers compare them.

    Forward passes change some buffers, such as statistics. A buffer counts only if it has not
    changed since all workers last had the same. Some kernels change buffers without their versions,
    so those of trained models count only before the next forward pass.
    """

    has_run = False  # a forward pass may have run since all workers had the same buffers

    def __init__(self, train_state: TorchTrainState, averaging: WeightAveraging) -> None:
        self._train_state, self._keeps_all_equal = train_state, train_state.exchange.keeps_all_equal
        self._averaging = averaging
        self._record()
        self.record_buffers()

    # ---- what is added after `register`

    def _record(self) -> None:
        """Record the modules and parameters of the registered models."""
        train_state = self._train_state
        modules = [module for model in train_state.models for module in model.modules()]
        views = [(m._modules.values(), m._parameters.values()) for m in modules]
        self._children = list(itertools.chain.from_iterable(views))
        # Only objects that exist have unique ids.
        self._members = list(itertools.chain.from_iterable(self._children))
        self._named = [list(user_module(model).named_parameters()) for model in train_state.models]
        self._parameters = [parameter for named in self._named for _, parameter in named]
        self._renormalized = renormalized_weights(train_state.models)
        groups = [group for o in train_state.optimizers for group in o.param_groups]
        self._stepped = {parameter for group in groups for parameter in group["params"]}
        self._recorded = self._structure()

    def _structure(self) -> list[Any]:
        children = map(id, itertools.chain.from_iterable(self._children))
        groups = [group for o in self._train_state.optimizers for group in o.param_groups]
        sizes = [len(group["params"]) for group in groups]
        return [*children, *sizes, *map(_dtype, self._parameters)]

    def check_added(self) -> None:
        """Raise an error if the next step would train what the workers do not keep equal."""
        if self._structure() == self._recorded:
            return
        for feature in self._train_state.features:
            feature.check_parameters()
        before = self._stepped
        self._record()
        if strangers := self._stepped - before - set(self._parameters):
            raise RuntimeError(
                f"An optimizer got {len(strangers)} parameters after register() that are in no "
                "registered model. Checkpoints and new workers would not have them. Register "
                "their model in setup. To train it later, call requires_grad_(False) after "
                "register()."
            )

    # ---- buffers

    def _all_buffers(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        for index, model in enumerate(map(user_module, self._train_state.models)):
            statistics = set(map(id, running_statistics(model)))
            for name, buffer in model.named_buffers():
                if id(buffer) not in statistics and not buffer.is_inference():
                    yield index, f"models[{index}].{name}", buffer

    def _equal_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that have not changed since all workers had the same."""
        changed = self._buffers.find_changed_ids()
        trained = [any(p.requires_grad for _, p in named) for named in self._named]
        return {
            path: buffer
            for index, path, buffer in self._all_buffers()
            if not (self.has_run and trained[index]) and id(buffer) not in changed
        }

    def record_buffers(self) -> None:
        """Record all buffers, because all workers have the same now."""
        self.has_run = False
        self._kept_alive = [buffer for *_, buffer in self._all_buffers()]  # so that IDs stay unique
        self._buffers = TensorVersions(lambda: [buffer for *_, buffer in self._all_buffers()])

    # ---- what must be equal

    def contents(self, in_step: bool, is_new: bool) -> Iterator[Content]:
        """Iterate over what must be equal, also modes `in_step`, and options of a new worker."""
        train_state = self._train_state
        is_unsharded = train_state.placement.is_unsharded
        equal, replicated = self._equal_buffers(), set[torch.Tensor]()
        compared = [self._keeps_all_equal or is_ddp(model) for model in train_state.models]
        for index, model in enumerate(train_state.models):
            if not compared[index]:
                continue
            ignored: Any = getattr(model, "parameters_to_ignore", ())
            for name, parameter in self._named[index]:
                replicated.add(parameter)
                path = f"models[{index}].{name}"
                flags = str(parameter.dtype), tuple(parameter.shape), parameter.requires_grad
                yield "options", f"dtype, shape, and requires_grad of {path}", flags
                is_ignored = name in ignored or parameter in self._renormalized
                if is_unsharded(model) and not is_ignored:
                    yield "tensors", path, parameter
            if in_step:
                modes = [module.training for module in model.modules()]
                yield "options", f"the train or eval modes of models[{index}]", modes
        for index, path, _ in self._all_buffers():
            if compared[index]:
                yield "buffers", path, equal.get(path)
        for index, optimizer in enumerate(train_state.optimizers):
            if self._keeps_all_equal or replicated.issuperset(self._stepped):
                path, has_all = f"optimizers[{index}]", is_unsharded(optimizer)
                yield from _optimizer_contents(path, optimizer, replicated, has_all)
        for index, scheduler in enumerate(train_state.schedulers if self._keeps_all_equal else ()):
            yield from _contents_in(f"schedulers[{index}]", scheduler.state_dict())
        yield from _contents_in("scaler", train_state.precision.scaler_tensors())
        yield from _contents_in("averages", self._averaging.averages)
        for name, modules in ("models", train_state.models), ("criteria", train_state.criteria):
            for index, module in enumerate(modules if is_new else ()):
                if isinstance(module, torch.nn.Module):
                    yield from _hyperparameters(f"{name}[{index}]", user_module(module))


def _optimizer_contents(
    path: str, optimizer: Any, known: set[torch.Tensor], is_unsharded: bool
) -> Iterator[Content]:
    counter = itertools.count()
    for index, group in enumerate(optimizer.param_groups):
        in_group = f"{path}.param_groups[{index}]"
        yield "options", f"the parameters of {in_group}", len(group["params"])
        yield from _contents_in(in_group, {key: group[key] for key in group if key != "params"})
        for parameter in group["params"]:
            number = next(counter)
            if is_unsharded and parameter not in known:
                yield "tensors", f"parameter {number} of {path} (in no registered model)", parameter
            if is_unsharded and (state := optimizer.state.get(parameter)):
                yield from _contents_in(f"{path}.state[{number}]", state)


def _contents_in(path: str, value: Any) -> Iterator[Content]:
    """Iterate over the tensors and plain values in nested dicts, lists, and tuples."""
    if isinstance(value, torch.Tensor):
        yield "tensors", path, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _contents_in(f"{path}[{key!r}]", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _contents_in(f"{path}[{index}]", item)
    elif isinstance(value, numbers.Real):  # a loaded state may have another type of number
        yield "options", path, float(value)
    elif isinstance(value, str | None):
        yield "options", path, repr(value)


def _hyperparameters(path: str, model: torch.nn.Module) -> Iterator[Content]:
    """Iterate over options of PyTorch's own modules, such as the rate of a dropout."""
    for name, module in model.named_modules(prefix=path):
        if type(module).__module__.startswith("torch.nn.modules."):
            # Only arguments of the classes, because hooks of users may note values under others.
            functions = [vars(kind).get("__init__") for kind in type(module).__mro__]
            for key in (n for f in functions if f for n in inspect.signature(f).parameters):
                if isinstance(value := vars(module).get(key), int | float | str | tuple):
                    yield "options", f"{name}.{key}", value
        if type(module).__module__ == "torch.nn.modules.loss":  # such as the weights of classes
            yield from _contents_in(name, dict(module.named_buffers(recurse=False)))
