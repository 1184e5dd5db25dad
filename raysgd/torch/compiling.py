"""Models that ``register(compile=...)`` compiles, where they are."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import logging
import pickle
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raysgd.torch import ddp
from raysgd.torch.batches import tensors_in

__all__ = ["CompiledModel", "SeenCall", "checked_compile", "uncompile", "warn_of_idle_compilers"]

logger = logging.getLogger(__name__)

_REGIONAL = "regional"
_MOST_CALLS = 16
"""How many kinds of calls are remembered of a model; torch compiles fewer for one function."""

_OF_NUMPY = "array"

_MOST_STATIC = 8
"""How often one function is compiled for a single size beyond what torch allows: batches have parts
of four sizes at the most, and of several blocks only the first has input without gradients."""


@dataclass(frozen=True)
class SeenCall:
    """A call of a compiled model, as far as what is compiled follows from it."""

    arguments: bytes
    """Positional ones and keywords, packed by `_Packer`."""
    training: bool
    grad: bool
    inference: bool
    autocast: torch.dtype | None
    """The type of ``torch.autocast``; None without."""


class _Packer(pickle.Pickler):
    """Pickles what a tensor or an array is like in place of it, wherever it is."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._numbers: dict[int, int] = {}

    def persistent_id(self, held: Any) -> Any:
        if isinstance(held, np.ndarray) and not held.dtype.hasobject:  # torch compiles for those
            return _OF_NUMPY, held.shape, held.dtype
        if not isinstance(held, torch.Tensor):
            return None
        # torch compiles another function where two arguments are one tensor
        number = self._numbers.setdefault(id(held), len(self._numbers))
        layout = tuple(held.shape), held.stride(), held.dtype
        return number, layout, held.device.type, held.requires_grad, held.is_inference()


class _Maker(pickle.Unpickler):
    """Makes tensors and arrays that are like those that were packed."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == _OF_NUMPY:
            return np.zeros(*pid[1:])
        number, (shape, stride, dtype), device, requires_grad, is_inference = pid
        if number not in self._made:
            with torch.inference_mode(is_inference):
                tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            storage: Any = tensor.untyped_storage()  # of which some may be there twice
            storage.fill_(0)  # zeros are good as numbers and as indices
            self._made[number] = tensor.requires_grad_(requires_grad)
        return self._made[number]


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
        self.dynamic = bool(arguments.get("dynamic"))
        """Whether it is compiled for all sizes at once."""
        self.is_static = False
        """Whether a new size is compiled by itself, and not as one that varies.

        What torch compiles for any size is slower, and once it is there torch prefers it.
        """
        self.seen: dict[SeenCall, tuple[list[bool], bool]] = {}
        """Kinds of calls so far, oldest first: which modules were in train mode; `is_static`."""
        self.is_compiling = False
        """Whether the newest call was the first of its kind."""
        self.left_eager: list[str] = []
        """Why torch has left code of this model uncompiled so far, each reason on one line."""
        options = {name: value for name, value in arguments.items() if name != _REGIONAL}
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            limit = torch._dynamo.config.recompile_limit + _MOST_STATIC
            options.setdefault("recompile_limit", limit)
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
        self._note(arguments, keywords)
        _reasons.new()  # those of other code in this process, or of a call that has raised
        with (
            torch._dynamo.config.patch(automatic_dynamic_shapes=False)
            if self.is_static
            else contextlib.nullcontext()
        ):
            outputs = self._run(*arguments, **keywords)
        self.left_eager += _reasons.new()
        return outputs

    def _note(self, arguments: Any, keywords: Any) -> None:
        self.is_compiling, packed = False, io.BytesIO()
        try:
            _Packer(packed).dump((arguments, keywords))
        except Exception:  # what cannot be sent to another worker
            return
        kind = _device_type(self._model)
        has_autocast = torch.is_autocast_enabled(kind)
        call = SeenCall(
            packed.getvalue(),
            self._model.training,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_autocast_dtype(kind) if has_autocast else None,
        )
        if call not in self.seen and len(self.seen) < _MOST_CALLS:
            self.is_compiling = True
            modes = [module.training for module in self._model.modules()]
            self.seen[call] = modes, self.is_static

    def repeat(
        self,
        calls: Sequence[tuple[SeenCall, tuple[Sequence[bool], bool]]],
        wrapped: torch.nn.Module,
    ) -> None:
        """Make calls that another worker has seen, forward and backward, with zeros.

        Args:
            calls: of the same model there, as in `seen`.
            wrapped: the model in its wrapper, if it has one: it takes no part in any exchange.
        """
        for call, (modes, self.is_static) in calls:
            arguments, keywords = _Maker(io.BytesIO(call.arguments)).load()
            for module, training in zip(self._model.modules(), modes, strict=True):
                module.training = training
            kind = _device_type(self._model)
            autocast = torch.autocast(kind, call.autocast, enabled=call.autocast is not None)
            in_forward = ddp.as_in_forward(wrapped) if call.grad else contextlib.nullcontext()
            with (
                torch.inference_mode(call.inference),
                torch.set_grad_enabled(call.grad),
                autocast,
                in_forward,
            ):
                outputs = self._model(*arguments, **keywords)
            found = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
            parameters = [p for p in self._model.parameters() if p.requires_grad]
            if found and parameters:
                # not by backward(), which wrappers would take for that of a step
                ones = [torch.ones_like(each) for each in found]
                torch.autograd.grad(found, parameters, ones, allow_unused=True)
        self.is_compiling = self.is_static = False


def uncompile(models: Iterable[torch.nn.Module]) -> None:
    """Undo what an earlier trainer in this process has compiled."""
    for module in {module for model in models for module in model.modules()}:
        earlier = getattr(module._compiled_call_impl, "__self__", None)
        if isinstance(earlier, CompiledModel):
            earlier.undo()


def _device_type(model: torch.nn.Module) -> str:
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def _compile(blocks: Sequence[torch.nn.Module], options: Mapping[str, Any]) -> None:
    """Compile each block, and alike ones once.

    Not by ``block.compile()``: torch passes over the code of its own modules, but not over a
    function that calls it. The function has the globals of the user's code that is called from
    there: torch would look for those of a script in the worker's ``__main__``, which is not the
    script. And its code is a copy: by the code torch knows what it has compiled and which sizes
    vary, and an earlier model of this process may have had others, or breaks that nobody would be
    told of again.
    """
    code = _caller(blocks[0]).__code__.replace(co_name=f"compiled_{next(_numbers)}")
    for block in blocks:
        call = _caller(block)
        own = (type(part).forward for part in block.modules() if not _is_torchs(part))
        of_user = next((f.__globals__ for f in own if inspect.isfunction(f)), call.__globals__)
        begin = types.FunctionType(code, of_user, closure=call.__closure__)
        block._compiled_call_impl = torch.compile(begin, **options)


_numbers = itertools.count()


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
