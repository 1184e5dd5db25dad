"""``torch._dynamo`` in a worker process: loaded when somebody needs it, and not before.

It takes two thirds as long to load as all the rest of torch, and nothing needs it but
``torch.compile``. But DistributedDataParallel, every optimizer and some functions of torch ask it
something as they run, and so would load it in each worker. Until anybody wants more of it, a module
under its name gives them the answers that it gives where nothing is compiled. Whatever else it is
asked for, also as ``import torch._dynamo.config``, loads the real one, which takes its place for
good.

The questions are those of torch 2.1 to 2.13. One that a later torch may ask, and that is not among
them, costs the time of loading.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["postpone_dynamo"]

_NAME = "torch._dynamo"


def postpone_dynamo() -> None:
    """Let ``torch._dynamo`` be loaded when it is needed; does nothing where it is loaded already.

    For processes of our own alone: others may have looked at ``sys.modules`` before.
    """
    import torch

    if _NAME in sys.modules:
        return
    spec = importlib.util.find_spec(_NAME)
    if spec is not None:  # a torch without it needs none
        torch._dynamo = sys.modules[_NAME] = _Postponed(spec)


class _Postponed(ModuleType):
    """Stands for ``torch._dynamo`` until it is loaded, and refers to it afterwards."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_NAME)
        own = vars(self)  # what is set as an attribute goes to the real one
        own["__spec__"] = spec
        own["_not_disabled"] = []
        own["graph_break"] = _graph_break
        own["utils"] = _Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        own["trace_rules"] = _Part("trace_rules", clear_lru_cache=lambda: None)

    def disable(self, fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return a function of torch's as it is, since nothing is compiled that could call it."""
        if sys._getframe(1).f_globals.get("__name__") != "torch._compile":
            return _real().disable(fn, *args, **kwargs)
        self._not_disabled.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # asked of every module there is, by inspect for example
        found = getattr(_real(), name)
        if name == "__path__":
            _Loaded.expect()
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_real(), name, value)


class _Part:
    """Stands for a module in ``torch._dynamo``."""

    def __init__(self, part: str, **answers: Callable[[], Any]) -> None:
        self._part = part
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_real(), self._part), name)


def _graph_break(msg: str = "") -> None:
    """Do nothing, as the real one does where nothing is compiled."""


def _real() -> ModuleType:
    """Return ``torch._dynamo`` itself."""
    held = sys.modules.get(_NAME)
    if isinstance(held, _Postponed):
        import torch

        sys.modules.pop(_NAME, None)
        vars(torch).pop("_dynamo", None)
        for function in held._not_disabled:  # torch keeps what it was given, under this name
            with contextlib.suppress(AttributeError):
                del function.__dynamo_disable
    return importlib.import_module(_NAME)


class _Loaded:
    """Finds a module in ``torch._dynamo`` that came with it, for an import that caused all that.

    ``import torch._dynamo.config`` looks first whether the module is there, then asks the package
    for its ``__path__``, which loads the package and the module with it, and then would load the
    module once more.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    @classmethod
    def expect(cls) -> None:
        """Be there for the import under way in this thread."""
        sys.meta_path.insert(0, cls())

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to find a module that is there; only once."""
        if threading.get_ident() != self._thread:
            return None
        sys.meta_path.remove(self)
        there = sys.modules.get(name) if name.startswith(f"{_NAME}.") else None
        return None if there is None else ModuleSpec(name, _Existing(there))


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
