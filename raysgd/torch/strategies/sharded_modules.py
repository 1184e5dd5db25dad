"""Models that PyTorch's ``fully_shard`` shards, and that become plain modules again.

``fully_shard`` has no inverse, so raysgd passes a `_Unit` for each block to it, and never a module
of the user. A new generation discards the units and creates new units.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

_generations = itertools.count()


class _Unit(torch.nn.Module):
    """A block, and the parameters to gather together for its computation.

    ``fully_shard`` changes the class, hooks, and attributes of this module instead of the block. It
    assigns complete parameters before a pass, and shards after the pass. `__setattr__` assigns the
    same values in all `owners`: the user's modules, and the names of the parameter in each module.
    A call of the block becomes a call of the unit.
    """

    def __init__(
        self,
        block: torch.nn.Module,
        owners: Mapping[str, Sequence[tuple[torch.nn.Module, str]]],
        inner: Sequence[_Unit],
    ) -> None:
        super().__init__()
        self._owners = owners
        self.inner = torch.nn.ModuleList(inner)  # fully_shard finds the units of inner blocks here
        self.was_called = False
        kind = type(block)
        self._compute = functools.partial(kind.__call__, block)
        self.release = functools.partial(setattr, block, "__class__", kind)

        def call(_: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.was_called = True
            return self(*args, **kwargs)

        members = {"__call__": call, "__deepcopy__": _refuse_copy, "__module__": kind.__module__}
        block.__class__ = type(kind.__name__, (kind,), members)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, torch.nn.Parameter):
            for module, name_there in self._owners[name]:
                setattr(module, name_there, value)


def _repeated_blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the outermost blocks of lists that contain several blocks of one class."""
    is_list = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    kinds = Counter(type(child) for child in module.children())
    for child in module.children():
        if is_list and kinds[type(child)] > 1 and next(child.children(), None) is not None:
            yield child
        else:
            yield from _repeated_blocks(child)


def _refuse_copy(module: torch.nn.Module, memo: Any) -> NoReturn:
    raise RuntimeError(
        f"{type(module).__name__} is sharded and cannot be copied. Use trainer.get_model()."
    )


class ShardedModules:
    """The parameters of models, sharded by rows over the workers.

    Each generation replaces the parameters. The modules remain the same objects. `docs/sharding.md`
    explains the arguments. `dtype` is used for computation. None means the parameters' dtype.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        wrap_classes: Any,
        dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        if not hasattr(FSDPModule, "reset_iter_state"):
            raise ImportError(
                'register(sharding="full") needs PyTorch 2.13 or newer, but this is PyTorch '
                f'{torch.__version__}. Upgrade it, or use sharding="optimizer".'
            )
        self.models, self.device = models, device
        reduce_dtype = None if dtype is None else torch.float32
        self._policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
        owners: dict[torch.nn.Parameter, list[tuple[torch.nn.Module, str]]] = {}
        for module in dict.fromkeys(m for model in models for m in model.modules()):
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                owners.setdefault(parameter, []).append((module, name))
        self.parameters: list[torch.nn.Parameter] = list(owners)
        self._owners = list(owners.values())
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.trained = [parameter.requires_grad for parameter in self.parameters]
        self.names: list[dict[str, int]] = [
            {name: self._index[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
            for model in models
        ]
        self._blocks: dict[torch.nn.Module, list[int]] = {}
        """Indices of the parameters to gather for each wrapped module. Inner modules come first."""
        self._units: dict[torch.nn.Module, _Unit] = {}
        seen: set[int] = set()
        for block in self._chosen_blocks(wrap_classes):
            inside = [self._index[id(parameter)] for parameter in block.parameters()]
            self._blocks[block] = [index for index in inside if index not in seen]
            seen.update(inside)

    def _chosen_blocks(self, wrap_classes: Any) -> Iterator[torch.nn.Module]:
        inside = dict.fromkeys(module for model in self.models for module in model.modules())
        if wrap_classes is None:
            blocks = {block for model in self.models for block in _repeated_blocks(model)}
        else:
            kinds = wrap_classes if isinstance(wrap_classes, type) else tuple(wrap_classes)
            blocks = {module for module in inside if isinstance(module, kinds)}
            if not blocks:
                names = sorted({type(module).__name__ for module in inside})
                raise ValueError(
                    f"register(sharding_args={{'wrap_classes': {wrap_classes!r}}}): the models "
                    f"have no module of this class. They have {', '.join(names)}."
                )
        for module in reversed(inside):
            if (module in blocks and not self._shares_parameters(module)) or module in self.models:
                yield module

    def _shares_parameters(self, block: torch.nn.Module) -> bool:
        """Return whether a block shares a parameter with modules outside of it."""
        within = set(block.modules())
        indices = [self._index[id(parameter)] for parameter in block.parameters()]
        return any(module not in within for i in indices for module, _ in self._owners[i])

    def shard(self) -> None:
        """Shard the models over the current group. The rows are uninitialized."""
        group = dist.group.WORLD
        assert group is not None
        # PyTorch caches meshes by name and size, but the rank may differ between groups.
        name = f"workers_{next(_generations)}"
        mesh = DeviceMesh.from_group(group, self.device.type, mesh_dim_names=(name,))
        self.release()
        for block, indices in self._blocks.items():
            names = {index: f"parameter_{index}" for index in indices}
            owners = {name: self._owners[index] for index, name in names.items()}
            inner = [self._units[module] for module in block.modules() if module in self._units]
            unit = self._units[block] = _Unit(block, owners, inner)
            for index, name in names.items():
                old = self.parameters[index]
                new = torch.empty(old.shape, dtype=old.dtype, device=self.device)
                setattr(unit, name, torch.nn.Parameter(new, self.trained[index]))
            fully_shard(unit, mesh=mesh, mp_policy=self._policy)
            for index, name in names.items():
                self.parameters[index] = getattr(unit, name)

    def unshard_with(self, values: Sequence[torch.Tensor]) -> None:
        """Give the models complete parameters until `shard`."""
        self.release()
        for index, value in enumerate(values):
            parameter = torch.nn.Parameter(value, self.trained[index])
            for module, name in self._owners[index]:
                setattr(module, name, parameter)

    def release(self) -> None:
        """Convert the models back to plain modules. Their parameters become unusable."""
        for unit in self._units.values():
            unit.release()
        self._units = {}

    def rows(self, index: int) -> torch.Tensor:
        """Return this rank's rows of a parameter as a flat tensor."""
        parameter: Any = self.parameters[index]
        rows: torch.Tensor = parameter.detach().to_local()
        return rows.view(-1)

    def gradient(self, index: int) -> torch.Tensor | None:
        """Return the gradient of the tensor from `rows`."""
        gradient: Any = self.parameters[index].grad
        return None if gradient is None else gradient.detach().to_local().view(-1)

    def reset(self) -> None:
        """Discard the state of a failed forward or backward pass."""
        for model in self.models:
            unit = self._units.get(model)
            if unit is not None and unit.was_called:  # otherwise PyTorch has nothing to reset
                with contextlib.suppress(RuntimeError):  # a collective has failed
                    cast(FSDPModule, unit).reset_iter_state()

    @contextlib.contextmanager
    def gathering_on_demand(self) -> Iterator[None]:
        """Let ranks make different numbers of forward passes, without gradients.

        Before each gathering, the ranks agree on the unit. Ranks without further passes take part
        until all are done. All ranks must enter the context.
        """
        units: list[Any] = [unit for block, unit in self._units.items() if self._blocks[block]]
        handles = []
        for number, unit in enumerate(units):
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
            hook = functools.partial(self._before_gathering, number)
            handles.append(unit.register_forward_pre_hook(hook, prepend=True))
        try:
            yield
            while (wanted := self._agree_on_next_unit(None)) is not None:
                units[wanted].unshard()
                units[wanted].reshard()
        finally:
            for handle in handles:
                handle.remove()
            self.reset()
            outermost = {self._units[model] for model in self.models}
            for unit in units:  # the default of PyTorch
                unit.set_reshard_after_forward(unit not in outermost, recurse=False)
                unit.reshard()

    def _before_gathering(self, number: int, *_: Any) -> None:
        self._agree_on_next_unit(number)

    def _agree_on_next_unit(self, number: int | None) -> int | None:
        """Return the unit that all ranks gather next, given the unit that this rank needs.

        As an argument, None means that this rank needs no more units. As a result, None means that
        no rank needs more units.
        """
        bounds = [-1, -len(self._units)] if number is None else [number, -number]
        reduced = torch.tensor(bounds, device=self.device)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        last, first = (int(bound) for bound in reduced)
        if last != -first and last >= 0:
            raise RuntimeError(
                "Workers evaluate different blocks of a model at the same time. With register("
                'sharding="full"), each forward pass must use the same blocks in the same order on '
                "every worker."
            )
        return None if last < 0 else last
