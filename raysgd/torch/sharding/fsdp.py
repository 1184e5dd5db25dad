"""Models whose parameters are divided over the workers, by torch's ``fully_shard``, in place.

What torch has no public name for stands in this file: to take back what ``fully_shard`` has done
to a module, so that the same module can be divided over another group.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from raysgd.torch.features.compilation import repeated_blocks

__all__ = ["SEEN_IN", "ShardedModels"]

SEEN_IN = ("2.13",)
"""Releases of torch that had the private names below, and in which the tests passed."""


@dataclass(eq=False)
class _Unit:
    """A module whose parameters are gathered together."""

    module: torch.nn.Module
    which: list[int]
    """Its parameters, but for those of units inside of it."""


class ShardedModels:
    """The parameters of models, each held in rows by the workers.

    The modules stay the same objects; their parameters are others after each division.

    Args:
        models: as the user made them.
        wrap: which modules are gathered by themselves: classes, or a predicate; None for the
            blocks that a model has several of.
        reshard_after_forward: see ``fully_shard``.
        dtype: in which the forward and backward passes compute; None for that of the parameters.
        device: where the parameters are gathered, and models compute.
        offload: whether the rows of this rank, and their gradients, are on the CPU.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        wrap: Any,
        reshard_after_forward: bool | None,
        dtype: torch.dtype | None,
        device: torch.device,
        offload: bool = False,
    ) -> None:
        self.models, self.device = models, device
        self.rows_device = torch.device("cpu") if offload else device
        self._offload = OffloadPolicy()
        if offload:  # where nothing is copied to a GPU there is no memory to pin
            self._offload = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        self.reshard_after_forward = reshard_after_forward
        self._policy = (
            MixedPrecisionPolicy()
            if dtype is None
            else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        )
        found: dict[torch.nn.Parameter, list[tuple[torch.nn.Module, str]]] = {}
        modules = list(dict.fromkeys(m for model in models for m in model.modules()))
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(parameter, []).append((module, name))
        self.parameters: list[torch.nn.Parameter] = list(found)
        self._places = list(found.values())
        index = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._index = index
        self.trained = [parameter.requires_grad for parameter in self.parameters]
        self.names: list[dict[str, int]] = [
            {
                name: index[id(parameter)]
                for name, parameter in model.named_parameters(remove_duplicate=False)
            }
            for model in models
        ]
        self._before: list[tuple[torch.nn.Module, Any]] = []
        self._handles: list[Any] = []
        self._rows_mesh: DeviceMesh | None = None
        self._units: list[_Unit] = []
        seen: set[int] = set()
        for module in self._divided(wrap):
            inside = [index[id(p)] for p in module.parameters()]
            self._units.append(_Unit(module, [each for each in inside if each not in seen]))
            seen.update(inside)

    def _divided(self, wrap: Any) -> Iterator[torch.nn.Module]:
        """Yield what is to be gathered by itself, and the models, the inner ones first."""
        inside = dict.fromkeys(module for model in self.models for module in model.modules())
        if wrap is None:
            blocks = {block for model in self.models for block in repeated_blocks(model)}
            chosen = {block for block in blocks if not self._shared(block)}
        else:
            kinds = tuple(wrap) if isinstance(wrap, list | tuple) else wrap
            if isinstance(kinds, type | tuple):
                chosen = {module for module in inside if isinstance(module, kinds)}
                if not chosen:
                    names = sorted({type(module).__name__ for module in inside})
                    raise ValueError(
                        f"register(sharding_args={{'wrap': {wrap!r}}}): the models have no such "
                        f"module. They have {', '.join(names)}."
                    )
            else:
                chosen = {module for module in inside if kinds(module)}
            for block in chosen:
                if name := self._shared(block):
                    raise ValueError(
                        f"register(sharding_args={{'wrap': ...}}): {type(block).__name__} shares "
                        f"its parameter {name} with modules outside of it, which are gathered at "
                        "another time. Leave it out of wrap."
                    )
        roots = set(self.models)
        for module in reversed(inside):
            if module in chosen or module in roots:
                yield module

    def _shared(self, block: torch.nn.Module) -> str:
        """Return the name of a parameter that a block has together with modules outside."""
        within, index = set(block.modules()), self._index
        for name, parameter in block.named_parameters():
            if any(module not in within for module, _ in self._places[index[id(parameter)]]):
                return name
        return ""

    def shard(self) -> None:
        """Divide over the group that there is; the rows of this rank have no content yet."""
        group = dist.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, self.device.type)
        self._rows_mesh = DeviceMesh.from_group(group, self.rows_device.type)
        self.strip()
        for unit in self._units:
            for number in unit.which:
                old = self.parameters[number]
                room = torch.empty(old.shape, dtype=old.dtype, device=self.device)
                self._put(number, torch.nn.Parameter(room, self.trained[number]))
            fully_shard(
                unit.module,
                mesh=mesh,
                reshard_after_forward=self.reshard_after_forward,
                mp_policy=self._policy,
                offload_policy=self._offload,
            )
            for number in unit.which:
                module, name = self._places[number][0]
                self.parameters[number] = module._parameters[name]  # type: ignore[assignment]
        self._handles = [m.register_forward_pre_hook(hook) for m, hook in self._before]

    def call_before(self, model: torch.nn.Module, hook: Any) -> None:
        """Call a hook before each forward pass of a model, as long as it is divided."""
        self._before.append((model, hook))
        self._handles.append(model.register_forward_pre_hook(hook))

    def _put(self, number: int, parameter: torch.nn.Parameter) -> None:
        self.parameters[number] = parameter
        for module, name in self._places[number]:
            module._parameters[name] = parameter

    def put_whole(self, values: Sequence[torch.Tensor]) -> None:
        """Let the models have whole parameters, until `shard`."""
        self.strip()
        for number, value in enumerate(values):
            self._put(number, torch.nn.Parameter(value, self.trained[number]))

    def strip(self) -> None:
        """Make plain modules of the models again, whose parameters are of no use."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in (module for model in self.models for module in model.modules()):
            vars(module).pop("_is_fsdp_managed_module", None)
            vars(module).pop("_fsdp_use_orig_params", None)
        for unit in self._units:
            module = unit.module
            if not isinstance(module, FSDPModule):
                continue
            state = module._get_fsdp_state()
            handles: list[Any] = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
            for group in state._fsdp_param_groups:
                handles += group._module_to_pre_save_state_dict_hook_handle.values()
                handles += group._module_to_pre_load_state_dict_hook_handle.values()
                handles += [each._post_load_hook_handle for each in group.fsdp_params]
            for handle in handles:
                handle.remove()
            _module_state_mapping.pop(module, None)
            vars(module).pop(STATE_KEY, None)
            vars(module).pop(REGISTRY_KEY, None)
            module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]

    def local(self, number: int) -> torch.Tensor:
        """Return this rank's rows of a parameter, in one row."""
        held: Any = self.parameters[number]
        rows: torch.Tensor = held.detach().to_local()
        return rows.view(-1)

    def rows_as(self, number: int, rows: torch.Tensor) -> DTensor:
        """Return what has an element for each of this rank's rows of a parameter, divided alike."""
        parameter = self.parameters[number]
        # not in the mesh of the parameter: torch may have that from an equal group, as another rank
        return DTensor.from_local(
            rows.view(-1, *parameter.shape[1:]),
            self._rows_mesh,
            [Shard(0)],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def gradient(self, number: int) -> torch.Tensor | None:
        """Return the gradient of these."""
        held: Any = self.parameters[number].grad
        return None if held is None else held.detach().to_local().view(-1)

    def reset(self) -> None:
        """Forget a forward or backward pass that has failed."""
        for model in self.models:
            # torch has nothing to reset, and fails, where no forward pass has begun
            if isinstance(model, FSDPModule) and model._get_fsdp_state()._is_root is not None:
                with contextlib.suppress(RuntimeError):  # a work that failed in another thread
                    model.reset_iter_state()

    @contextlib.contextmanager
    def on_demand(self) -> Iterator[None]:
        """Return a context in which ranks make different numbers of forward passes.

        Before each gathering the ranks tell each other of what, and those that are done take part
        until all are. All ranks must enter it; gradients cannot be computed in it.
        """
        units = [unit.module for unit in self._units if unit.which]
        handles = []
        for number, module in enumerate(units):
            assert isinstance(module, FSDPModule)
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()
            hook = functools.partial(self._before_gathering, number)
            handles.append(module.register_forward_pre_hook(hook, prepend=True))
        try:
            yield
            while (wanted := self._say_next(None)) is not None:
                needed: Any = units[wanted]
                needed.unshard()
                needed.reshard()
        finally:
            for handle in handles:
                handle.remove()
            self.reset()
            given, models = self.reshard_after_forward, set(self.models)
            for module in units:
                again = module not in models if given is None else given
                cast(FSDPModule, module).set_reshard_after_forward(again, recurse=False)
                cast(FSDPModule, module).reshard()

    def _before_gathering(self, number: int, *_: Any) -> None:
        self._say_next(number)

    def _say_next(self, number: int | None) -> int | None:
        """Tell the others of which unit this rank needs the parameters; None: of none any more.

        Returns:
            Of which they are gathered now; None when no rank needs any.
        """
        none = -len(self._units)
        told = [-1, none] if number is None else [number, -number]
        held = torch.tensor(told, device=self.device)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        last, first = (int(each) for each in held)
        if last != -first and last >= 0:
            raise RuntimeError(
                "The workers evaluate different blocks of a model at the same time, and register("
                'sharding="full") gathers a block from all of them: let each forward pass use the '
                "same blocks in the same order on every worker."
            )
        return None if last < 0 else last
