"""Redirects functions of Ray, such as ``ray.air.session.report``, to those of `raysgd.train`.

In a training function of raysgd, Ray's own functions only log a warning in the worker.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MODULES = ("ray.train._internal.session", "ray.train.v2.api.train_fn_utils")
"""Modules that define the functions. Others, such as ``ray.air.session``, import them."""


def redirect(api: Any) -> None:
    """Replace the functions of Ray in this process, now or when they are imported.

    `api` has the functions of raysgd, and in ``api.TrainContext`` further ones as methods.
    """
    if any(isinstance(finder, _Redirection) for finder in sys.meta_path):
        return
    redirection = _Redirection(api)
    for name in (*_MODULES, "ray.air.session", "ray.train"):
        if name in sys.modules:
            redirection.replace(sys.modules[name])
    sys.meta_path.insert(0, redirection)


class _Redirection(MetaPathFinder):
    """Replaces the functions of a module as soon as it is imported."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in _MODULES else None
        if spec is not None:
            loader: Any = spec.loader
            run = loader.exec_module
            loader.exec_module = lambda module: (run(module), self.replace(module))
        return spec

    def replace(self, module: ModuleType) -> None:
        api = self._api

        def function(name: str) -> Any:
            if hasattr(api, name):
                return lambda *args, **kwargs: getattr(api, name)(*args, **kwargs)
            return lambda: getattr(api.get_context(), name)()

        for name in list(vars(module)):
            is_ours = hasattr(api, name) or hasattr(api.TrainContext, name)
            if is_ours and (name == "report" or name.startswith("get_")):
                setattr(module, name, function(name))
