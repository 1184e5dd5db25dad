"""``torch._dynamo`` in a worker process: loaded when somebody needs it, and not before.

It takes two thirds as long to load as all the rest of torch, and nothing needs it but
``torch.compile``. But DistributedDataParallel, every optimizer and some functions of torch ask it
something as they run, and so would load it in each worker. Until anybody wants more of it, a module
under its name gives them the answers that it gives where nothing is compiled. Whatever else it is
asked for, also as ``import torch._dynamo.config``, loads the real one, which takes its place for
good.

The questions are those of torch 2.13. One more that another torch may ask costs the time of loading
it, and nothing else. Only workers call it, as they set up (``torch/runner.py``,
``train/torch/config.py``), never the driver. The tests in
``tests/unit/_internal/test_dynamo.py`` show all that it does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import weakref
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["postpone_dynamo"]

_NAME = "torch._dynamo"
_swapping = threading.Lock()
_not_disabled: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions that torch wanted to be kept from being compiled when nothing was."""


def postpone_dynamo() -> None:
    """Let ``torch._dynamo`` be loaded when it is needed; does nothing where it is loaded already.

    For processes of our own alone: others may have looked at ``sys.modules`` before.
    """
    import torch

    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is None:  # a torch without it needs none
        return
    utils = _StandIn(f"{_NAME}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    trace_rules = _StandIn(f"{_NAME}.trace_rules", clear_lru_cache=lambda: None)
    torch._dynamo = sys.modules[_NAME] = _StandIn(
        _NAME,
        disable=_disable,
        graph_break=lambda msg="": None,
        utils=utils,
        trace_rules=trace_rules,
        __spec__=spec,
    )
    sys.meta_path.insert(0, _PartFinder())


class _StandIn(ModuleType):
    """Stands for a module until more is wanted of it, and is as good as that afterwards."""

    def __init__(self, name: str, **answers: Any) -> None:
        super().__init__(name)
        super().__getattribute__("__dict__").update(answers)

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__
        if name.startswith("__reduce"):  # of a class in a script, which is pickled by value
            return own(name)
        # asked of every module that there is, but for the path, by which its parts are imported
        is_common = name.startswith("__") and name != "__path__"
        if _is_postponed() and (is_common or name in own("__dict__")):
            return own(name)
        _load()
        return getattr(sys.modules[own("__name__")], name)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (super().__getattribute__("__name__"),)

    def __setattr__(self, name: str, value: Any) -> None:
        _load()
        setattr(sys.modules[super().__getattribute__("__name__")], name, value)


def _is_postponed() -> bool:
    return type(sys.modules.get(_NAME)) is _StandIn


def _load() -> ModuleType:
    """Return ``torch._dynamo`` itself, loading it where nobody has."""
    import torch

    with _swapping:  # not for as long as it loads: that is what the locks of modules are for
        if _is_postponed():
            del sys.modules[_NAME]
            vars(torch).pop("_dynamo", None)
            for function in list(_not_disabled):  # torch keeps what it was given, by this name
                with contextlib.suppress(AttributeError):
                    del function.__dynamo_disable
            _not_disabled.clear()
    return importlib.import_module(_NAME)


def _disable(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return a function of torch's as it is, since nothing is compiled that could call it."""
    if sys._getframe(1).f_globals.get("__name__") != "torch._compile":
        return _load().disable(fn, *args, **kwargs)
    _not_disabled.add(fn)
    return fn


class _PartFinder(MetaPathFinder):
    """Finds a module in ``torch._dynamo`` that came with it, for the import that caused all that.

    ``import torch._dynamo.config`` looks first whether the module is there, then asks the package
    for its ``__path__``, which loads the package and the module with it, and then would load the
    module once more (before Python 3.13.3).
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to find a module that is there; a `target` is one to be loaded anew."""
        there = sys.modules.get(name)
        if there is None or target is not None or not name.startswith(f"{_NAME}."):
            return None
        origin = None if there.__spec__ is None else there.__spec__.origin
        return ModuleSpec(name, _Existing(there), origin=origin)


class _Existing(Loader):
    """A loader of a module that is loaded."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def exec_module(self, module: ModuleType) -> None:
        """Let it take the place of the new one."""
        sys.modules[module.__name__] = self._module
