"""Makes ``setup_mlflow`` and ``setup_wandb`` of Ray start a run on worker 0 only.

They ask Ray Train for the rank, which does not know the workers of raysgd.
"""

from __future__ import annotations

import functools
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from raysgd.train.worker_session import worker_context

_MODULES = ("ray.air.integrations.mlflow", "ray.air.integrations.wandb")


class Finder(PathFinder):
    """Finds the modules of these functions. To import them earlier would take seconds."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path) if fullname in _MODULES else None
        if spec is not None and spec.loader is not None:
            run, name = spec.loader.exec_module, f"setup_{fullname.rpartition('.')[2]}"

            def exec_and_wrap(module: ModuleType) -> None:
                run(module)
                setattr(module, name, functools.partial(_on_worker_0, getattr(module, name)))

            spec.loader.exec_module = exec_and_wrap  # type: ignore[method-assign]
        return spec


def _on_worker_0(setup: Any, *arguments: Any, rank_zero_only: bool = True, **others: Any) -> Any:
    if rank_zero_only and worker_context().world_rank != 0:
        return _IgnoredRun()
    return setup(*arguments, rank_zero_only=rank_zero_only, **others)


class _IgnoredRun:
    """A run that ignores everything."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self

    __enter__ = __getattr__ = __getitem__ = __call__

    def __exit__(self, *arguments: Any) -> None:
        pass

    __setitem__ = __exit__
