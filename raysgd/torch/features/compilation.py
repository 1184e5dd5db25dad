"""Models that ``register(compile=...)`` compiles in place, and what is said about them."""

from __future__ import annotations

import inspect
import logging
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import reset_code

from raysgd.loop.feature import StepFeature

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState

__all__ = ["Compilation", "CompiledModel", "checked_compile", "uncompile", "warn_of_idle_compilers"]

logger = logging.getLogger(__name__)

_REGIONAL = "regional"


def checked_compile(given: Any) -> dict[str, Any] | None:
    """Return the arguments of ``torch.compile``, and ``regional``; None where nothing is compiled.

    Raises:
        TypeError: if it is neither True nor False nor a dict, or ``regional`` no such value.
        ValueError: if ``torch.compile`` has no such argument.
    """
    if given is None or given is False:
        return None
    if given is not True and not isinstance(given, dict):
        raise TypeError(
            f"register(compile={given!r}): must be True, False, or a dict of arguments of "
            "torch.compile."
        )
    arguments = {} if given is True else dict(given)
    known = sorted({*inspect.signature(torch.compile).parameters, _REGIONAL} - {"model"})
    if unknown := [name for name in arguments if name not in known]:
        raise ValueError(
            f"register(compile=...) has {', '.join(map(repr, unknown))}; it may have "
            f"{', '.join(map(repr, known))}."
        )
    regional = arguments.get(_REGIONAL, False)
    if not isinstance(regional, bool):
        raise TypeError(f"register(compile={{'regional': {regional!r}}}): must be True or False.")
    return arguments


class Compilation(StepFeature):
    """Compiles models, and reports what was not compiled."""

    def __init__(self, state: TorchTrainState, arguments: Mapping[str, Any] | None) -> None:
        self._state = state
        models = [] if arguments is None else state.given_models
        self._compiled = [CompiledModel(model, arguments or {}) for model in models]

    @property
    def needs_warm_up(self) -> bool:
        state = self._state
        if any(feature.is_fully_sharded for feature in state.sharded):
            return False  # a replacement has no model before it joins
        compiled = any(
            module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
            for model in state.models
            for module in model.modules()
        )
        return compiled or state.settings.device.type == "cuda"

    @property
    def is_compiling(self) -> bool:
        return any(compiled.is_compiling for compiled in self._compiled)

    def end_segment(self) -> None:
        for reason in (reason for compiled in self._compiled for reason in compiled.left_eager):
            self._state.say(reason, "torch.compile leaves a part of the model as it is: %s", reason)

    def end_epoch(self, epoch: int) -> None:
        if idle := [compiled.name for compiled in self._compiled if compiled.is_idle]:
            self._state.say(
                "uncalled",
                "register(compile=...) has compiled nothing of %s in an epoch: what is compiled is "
                "a call of the model, as model(...), and not that of another method of it.",
                " and ".join(idle),
            )


class CompiledModel:
    """Compiles a model in its place, so that names, types and what is saved stay as they are.

    Args:
        model: the model.
        arguments: of ``torch.compile``, and ``regional``.

    Raises:
        TypeError: if ``torch.jit`` has compiled it.
        ValueError: if ``regional`` is asked for, and no block is there more than once.
    """

    def __init__(self, model: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError(
                f"register(compile=...): {model.original_name} is compiled by torch.jit. Register "
                "the module that it was made of, or leave compile out."
            )
        self._model = model
        self._was_called = False
        self._modes: set[tuple[bool, bool]] = set()
        self.is_compiling = False
        """Whether the first call with or without gradients is in progress."""
        self.left_eager: list[str] = []
        """Why torch has left code of this model uncompiled so far, each reason on one line."""
        options = {name: value for name, value in arguments.items() if name != _REGIONAL}
        self._is_whole = not arguments.get(_REGIONAL, False)
        blocks = [model] if self._is_whole else list(repeated_blocks(model))
        if not blocks:
            raise ValueError(
                f"register(compile={{'regional': True}}): {type(model).__name__} has no ModuleList "
                "or Sequential with several blocks of one class. Leave regional out."
            )
        _compile(blocks, options)
        self._compiled = [model, *blocks]
        self._run = model._compiled_call_impl or model._call_impl
        model._compiled_call_impl = self._call

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self._model).__name__

    @property
    def is_idle(self) -> bool:
        """Whether nothing of the model was compiled, since nobody has called it."""
        return self._is_whole and not self._was_called

    def undo(self) -> None:
        """Leave the model as it was, for one who registers it again."""
        for module in self._compiled:
            module._compiled_call_impl = None

    def _call(self, *arguments: Any, **keywords: Any) -> Any:
        self._was_called = True
        mode = self._model.training, torch.is_grad_enabled()
        _reasons.new()  # those of other code in this process, or of a call that has raised
        self.is_compiling = mode not in self._modes
        try:
            outputs = self._run(*arguments, **keywords)
        finally:
            self.is_compiling = False
        self._modes.add(mode)
        self.left_eager += _reasons.new()
        return outputs


def uncompile(models: Iterable[torch.nn.Module]) -> None:
    """Undo what an earlier trainer in this process has compiled."""
    for module in {module for model in models for module in model.modules()}:
        earlier = getattr(module._compiled_call_impl, "__self__", None)
        if isinstance(earlier, CompiledModel):
            earlier.undo()


def _compile(blocks: Sequence[torch.nn.Module], options: Mapping[str, Any]) -> None:
    """Compile each block.

    ``block.compile()`` would compile nothing of a module whose code is PyTorch's own, such as
    Sequential. It compiles a function that calls one. The function has the globals of the user's
    module, because ``torch.compile`` looks up names of a script in the worker's ``__main__``, which
    is another script.
    """
    # All models share the code of `_caller`. Forget the graphs and graph breaks of earlier models:
    # torch.compiler.reset() would forget those of user code as well.
    reset_code(_caller(blocks[0]).__code__)
    for block in blocks:
        call = _caller(block)
        own = (type(part).forward for part in block.modules() if not _is_torchs(part))
        of_user = next((f.__globals__ for f in own if inspect.isfunction(f)), call.__globals__)
        begin = types.FunctionType(call.__code__, of_user, closure=call.__closure__)
        block._compiled_call_impl = torch.compile(begin, **options)


def _caller(module: torch.nn.Module) -> Any:
    def call(*arguments: Any, **keywords: Any) -> Any:
        return module._call_impl(*arguments, **keywords)

    return call


def _is_torchs(module: torch.nn.Module) -> bool:
    """Whether the code of its own forward pass is torch's."""
    return type(module).forward.__module__.startswith("torch.nn.")


def repeated_blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the outermost blocks of which a list has several of one class."""
    is_list = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    kinds = Counter(type(child) for child in module.children())
    for child in module.children():
        if is_list and kinds[type(child)] > 1 and next(child.children(), None) is not None:
            yield child
        else:
            yield from repeated_blocks(child)


class _Reasons:
    """Why torch has left code of this process uncompiled; torch counts how often."""

    def __init__(self) -> None:
        self._num_seen: Counter[str] = Counter()

    def new(self) -> list[str]:
        """Return the reasons since the last time."""
        from torch._dynamo.utils import counters

        counted = counters["graph_break"], counters["unimplemented"]
        if sum(each.total() for each in counted) == self._num_seen.total():
            return []
        seen, self._num_seen = self._num_seen, counted[0] + counted[1]
        return [_on_one_line(reason) for reason in self._num_seen - seen]


_reasons = _Reasons()


def _on_one_line(reason: str) -> str:
    title, _, explained = reason.partition("\n")
    lines = (line.strip() for line in explained.split("\n"))
    explanation = next((line for line in lines if line.startswith("Explanation: ")), "")
    return f"{title}. {explanation.removeprefix('Explanation: ')}".strip()


def warn_of_idle_compilers(models: Sequence[torch.nn.Module]) -> None:
    """Say where ``compile()`` of a module of torch's own has compiled nothing, without a word."""
    for model in models:
        for module in model.modules():
            if _is_idle(module):
                kind = type(module).__name__
                logger.warning(
                    "%s.compile() compiles nothing: torch passes over the code of its own modules, "
                    "and this one has no other. Pass register(compile=True), or register "
                    "torch.compile(model).",
                    kind,
                )


def _is_idle(module: torch.nn.Module) -> bool:
    compiled = module._compiled_call_impl
    origin = getattr(compiled, "_torchdynamo_orig_callable", None)
    if getattr(origin, "__func__", None) is not torch.nn.Module._call_impl:
        return False
    return all(map(_is_torchs, module.modules()))
