"""Models that ``register(compile=...)`` compiles in place."""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from raysgd.loop.feature import StepFeature
from raysgd.torch import ddp

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState

_REGIONAL = "regional"


def checked_compile(given: Any) -> dict[str, Any] | None:
    """Return ``regional`` and arguments of ``torch.compile``, or None for no compilation."""
    if given is None or given is False:
        return None
    if given is not True and not isinstance(given, dict):
        raise TypeError(
            f"register(compile={given!r}): must be True, False, or a dict of arguments of "
            "torch.compile."
        )
    return {} if given is True else given


class Compilation(StepFeature):
    def __init__(self, state: TorchTrainState, arguments: Mapping[str, Any] | None) -> None:
        self._state = state
        models = [] if arguments is None else state.models
        self._compiled = [CompiledModel(model, arguments or {}) for model in models]

    @property
    def needs_warm_up(self) -> bool:  # type: ignore[override]
        state = self._state
        if any(feature.is_fully_sharded for feature in state.sharded):
            return False  # a replacement worker has no compiled model before it joins
        compiled = any(
            module._compiled_call_impl is not None or ddp.plain(module) is not ddp.unwrap(module)
            for model in state.models
            for module in model.modules()
        )
        return compiled or state.settings.device.type == "cuda"

    @property
    def is_compiling(self) -> bool:  # type: ignore[override]
        return any(compiled.is_compiling for compiled in self._compiled)


class CompiledModel:
    """Compiles a model in place, so that names, types and saved state do not change."""

    def __init__(self, model: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError(
                f"register(compile=...): torch.jit has already compiled {model.original_name}. "
                "Register the original module, or leave out compile."
            )
        self._model = model
        self._modes: set[tuple[bool, bool]] = set()
        self.is_compiling = False
        options = {name: value for name, value in arguments.items() if name != _REGIONAL}
        is_regional = arguments.get(_REGIONAL, False)
        blocks = list(repeated_blocks(model)) if is_regional else [model]
        if not blocks:
            raise ValueError(
                f"register(compile={{'regional': True}}): {type(model).__name__} has no ModuleList "
                "or Sequential with several blocks of one class. Leave out regional."
            )
        _compile(blocks, options)
        self._compiled = [model, *blocks]
        self._run = model._compiled_call_impl or model._call_impl
        model._compiled_call_impl = self._call

    def undo(self) -> None:
        for module in self._compiled:
            module._compiled_call_impl = None

    def _call(self, *arguments: Any, **keywords: Any) -> Any:
        mode = self._model.training, torch.is_grad_enabled()
        self.is_compiling = mode not in self._modes
        try:
            outputs = self._run(*arguments, **keywords)
        finally:
            self.is_compiling = False
        self._modes.add(mode)
        return outputs


def uncompile(models: Iterable[torch.nn.Module]) -> None:
    """Undo what an earlier trainer in this process has compiled."""
    for module in {module for model in models for module in model.modules()}:
        earlier = getattr(module._compiled_call_impl, "__self__", None)
        if isinstance(earlier, CompiledModel):
            earlier.undo()


def _compile(blocks: Sequence[torch.nn.Module], options: Mapping[str, Any]) -> None:
    """Compile each block.

    ``torch.compile`` skips modules whose code is in PyTorch, such as Sequential, so compile a
    function that calls the block. The function has the globals of the user's module, because
    ``torch.compile`` looks up names of a script in ``__main__``, which is another module in a
    worker.
    """
    # PyTorch keeps graphs and graph breaks per code object, so each model gets its own.
    code = _caller(blocks[0]).__code__.replace()
    for block in blocks:
        call = _caller(block)
        own = (type(part).forward for part in block.modules() if not _is_torchs(part))
        of_user = next((f.__globals__ for f in own if inspect.isfunction(f)), call.__globals__)
        begin = types.FunctionType(code, of_user, closure=call.__closure__)
        block._compiled_call_impl = torch.compile(begin, **options)


def _caller(module: torch.nn.Module) -> Any:
    def call(*arguments: Any, **keywords: Any) -> Any:
        return module._call_impl(*arguments, **keywords)

    return call


def _is_torchs(module: torch.nn.Module) -> bool:
    return type(module).forward.__module__.startswith("torch.nn.")


def repeated_blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the outermost blocks of lists that contain several blocks of one class."""
    is_list = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    kinds = Counter(type(child) for child in module.children())
    for child in module.children():
        if is_list and kinds[type(child)] > 1 and next(child.children(), None) is not None:
            yield child
        else:
            yield from repeated_blocks(child)
