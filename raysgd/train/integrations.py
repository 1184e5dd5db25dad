"""Helpers for Lightning, Transformers, and the integrations of Ray."""

import functools
import shutil
import weakref
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from raysgd.train.session import get_checkpoint, world_rank, world_size
from raysgd.train.worker_session import process_state, worker_context

_INTEGRATIONS = ("ray.air.integrations.mlflow", "ray.air.integrations.wandb")


def newest_checkpoint_path(name: str) -> str | None:
    """Return the path of a file or folder in the newest checkpoint; None without a checkpoint.

    The files are a temporary copy, which is removed after the run.
    """
    if (checkpoint := get_checkpoint()) is None:
        return None
    folder = checkpoint.to_directory()
    weakref.finalize(process_state.session, shutil.rmtree, folder, ignore_errors=True)
    return str(Path(folder, name))


def check_rank(rank: int, size: int, advice: str) -> None:
    """Check the rank and the world size that another library has found."""
    if process_state.context is not None and (rank, size) != (world_rank(), world_size()):
        raise RuntimeError(
            f"prepare_trainer(): this is worker {world_rank()} of {world_size()}, but the trainer "
            f"has rank {rank} of {size}. {advice}"
        )


# ---- functions of Ray that ask for the rank


class IntegrationFinder(PathFinder):
    """Makes ``setup_mlflow`` and ``setup_wandb`` of Ray start a run on worker 0 only.

    They ask Ray Train for the rank, which does not know the workers of raysgd. To import their
    modules earlier would take seconds.
    """

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path) if fullname in _INTEGRATIONS else None
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
