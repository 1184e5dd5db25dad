"""``torch._dynamo`` in a worker process: loaded when somebody needs it, and not before.

It takes two thirds as long to load as all the rest of torch, and nothing needs it but
``torch.compile``. But DistributedDataParallel, every optimizer and some functions of torch ask it
something as they run, and so would load it in each worker. Until anybody wants more of it, a module
under its name gives them the answers that it gives where nothing is compiled. Whatever else it is
asked for, also as ``import torch._dynamo.config``, loads the real one, which takes its place for
good.

The questions are those of torch 2.13. One more that another torch may ask costs the time of loading
it, and nothing else. Only workers call it, as they set up (``torch/runner.py``,
``train/torch/config.py``), never the driver. ``tests/unit/test_dynamo.py`` shows all that it does.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
import weakref
from collections.abc import Sequence
from importlib.abc import Loader
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

    if _NAME in sys.modules:
        return
    spec = importlib.util.find_spec(_NAME)
    if spec is not None:  # a torch without it needs none
        sys.meta_path.insert(0, _Finder())
        torch._dynamo = sys.modules[_NAME] = _Postponed(spec)


class _Postponed(ModuleType):
    """Stands for ``torch._dynamo`` until it is loaded, and is as good as that afterwards."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_NAME)
        _own(self).update(
            __spec__=spec,
            answers={
                "disable": _disable,
                "graph_break": lambda msg="": None,
                "utils": _Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
                "trace_rules": _Part("trace_rules", clear_lru_cache=lambda: None),
            },
        )

    def __getattribute__(self, name: str) -> Any:
        if sys.modules.get(_NAME) is not self:
            return getattr(_real(), name)
        answers = _own(self)["answers"]
        if name in answers:
            return answers[name]
        if name.startswith("__") and name != "__path__":  # asked of every module that there is
            return super().__getattribute__(name)
        found = getattr(_real(), name)
        _Finder.mark.expected = name == "__path__"
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_real(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_real(), name)

    def __dir__(self) -> list[str]:
        return dir(_real())


class _Part:
    """Stands for a module in ``torch._dynamo`` in the same way."""

    def __init__(self, part: str, **answers: Any) -> None:
        _own(self).update(part=part, answers=answers)

    def __getattribute__(self, name: str) -> Any:
        own = _own(self)
        is_loaded = type(sys.modules.get(_NAME)) is not _Postponed
        if not is_loaded and name in own["answers"]:
            return own["answers"][name]
        if not is_loaded and name.startswith("__"):
            return super().__getattribute__(name)
        return getattr(getattr(_real(), own["part"]), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(_real(), _own(self)["part"]), name, value)


def _own(stand_in: Any) -> dict[str, Any]:
    """Return what a stand-in holds itself."""
    held: dict[str, Any] = object.__getattribute__(stand_in, "__dict__")
    return held


def _disable(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return a function of torch's as it is, since nothing is compiled that could call it."""
    if sys._getframe(1).f_globals.get("__name__") != "torch._compile":
        return _real().disable(fn, *args, **kwargs)
    _not_disabled.add(fn)
    return fn


def _real() -> ModuleType:
    """Return ``torch._dynamo`` itself, loading it where nobody has."""
    import torch

    with _swapping:  # not for as long as it loads: that is what the locks of modules are for
        if type(sys.modules.get(_NAME)) is _Postponed:
            del sys.modules[_NAME]
            vars(torch).pop("_dynamo", None)
            for function in list(_not_disabled):  # torch keeps what it was given, by this name
                with contextlib.suppress(AttributeError):
                    del function.__dynamo_disable
            _not_disabled.clear()
    return importlib.import_module(_NAME)


class _Finder:
    """Finds a module in ``torch._dynamo`` that came with it, for the import that caused all that.

    ``import torch._dynamo.config`` looks first whether the module is there, then asks the package
    for its ``__path__``, which loads the package and the module with it, and then would load the
    module once more (before Python 3.13.3).
    """

    mark = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to find a module that is there, if this thread's ``__path__`` loaded it."""
        expected, self.mark.expected = getattr(self.mark, "expected", False), False
        if not expected or target is not None or not name.startswith(f"{_NAME}."):
            return None
        there = sys.modules.get(name)
        if there is None:
            return None
        spec = there.__spec__
        return ModuleSpec(name, _Existing(there), origin=None if spec is None else spec.origin)


class _Existing(Loader):
    """A loader of a module that is loaded."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return it."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is."""
        with contextlib.suppress(AttributeError):  # those of settings have none that can be set
            module.__spec__ = self._spec
