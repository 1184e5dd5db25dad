"""Lazy loading of ``torch._dynamo`` in worker processes, which shortens their start by a third.

DistributedDataParallel and every optimizer load ``torch._dynamo``, though only ``torch.compile``
needs it. A placeholder module answers their calls as if nothing were compiled. Any other access
loads the real module, which replaces the placeholder. The list of calls matches PyTorch 2.13. If
another version makes further calls, it only loads the module earlier.
"""

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

_NAME = "torch._dynamo"
_swapping = threading.Lock()
_not_disabled: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions for which PyTorch disabled compilation before the real module was loaded."""


def postpone_dynamo() -> None:
    """Load ``torch._dynamo`` on first use. Does nothing if it is already loaded.

    Use it only in raysgd's own processes, because other code may keep a reference to the module.
    """
    import torch

    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is None:  # this PyTorch has no such module
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
    sys.meta_path.insert(0, _SubmoduleFinder())


class _StandIn(ModuleType):
    """A placeholder for a module. It imports the module when code uses one of its attributes."""

    def __init__(self, name: str, **answers: Any) -> None:
        super().__init__(name)
        super().__getattribute__("__dict__").update(answers)

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__
        if name.startswith("__reduce"):  # cloudpickle asks this when it pickles a class by value
            return own(name)
        # Code that scans all modules asks for dunder names. `__path__` imports submodules.
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
    import torch

    with _swapping:  # do not hold this lock during the import, which has its own locks
        if is_first := _is_postponed():
            del sys.modules[_NAME]
            vars(torch).pop("_dynamo", None)
            for function in list(_not_disabled):  # PyTorch caches the result of `disable`
                with contextlib.suppress(AttributeError):
                    del function.__dynamo_disable
            _not_disabled.clear()
    module = importlib.import_module(_NAME)
    if is_first:  # DistributedDataParallel calls the process group within compiled models
        importlib.import_module(f"{_NAME}.trace_rules").add("raysgd.comm")
    return module


def _disable(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Leave a PyTorch function unchanged until something is compiled."""
    if sys._getframe(1).f_globals.get("__name__") != "torch._compile":
        return _load().disable(fn, *args, **kwargs)
    _not_disabled.add(fn)
    return fn


class _SubmoduleFinder(MetaPathFinder, Loader):
    """Finds a submodule of ``torch._dynamo`` that was loaded together with it.

    ``import torch._dynamo.config`` first checks ``sys.modules``, and then asks the package for its
    ``__path__``. That loads the package with the submodule. Before Python 3.13.3, the import would
    then load the submodule a second time.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        there = sys.modules.get(name)
        if there is None or target is not None or not name.startswith(f"{_NAME}."):
            return None
        origin = None if there.__spec__ is None else there.__spec__.origin
        return ModuleSpec(name, self, origin=origin, loader_state=there)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        sys.modules[module.__name__] = module.__spec__.loader_state
