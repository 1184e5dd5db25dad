"""Refuses Horovod's Keras optimizer where it would not synchronize, and say nothing.

With Keras 3, ``fit()`` does not call the method in which its ``DistributedOptimizer`` exchanges
gradients: each worker trains on its own, without a warning (Horovod 0.28.1, Keras 3.15).
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["refuse_with_keras_3"]

_MODULES = ("horovod.tensorflow.keras", "horovod.keras")
_WHY = (
    "Horovod's DistributedOptimizer does not synchronize with Keras 3: fit() never calls the "
    "method that exchanges gradients, and every worker trains on its own without a word. Use "
    "tf_keras (TF_USE_LEGACY_KERAS=1 before TensorFlow is imported), average gradients by "
    "hvd.allreduce in a step of your own, or use TFTrainer(backend='horovod'), which does that."
)


def refuse_with_keras_3() -> None:
    """Let ``DistributedOptimizer`` of Horovod's Keras modules raise, where Keras is Keras 3.

    Runs in a worker. It holds for modules that are imported already and for those that will be.
    """
    for name in _MODULES:
        if name in sys.modules:
            _guard(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds Horovod's Keras modules as Python does, and guards them once they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_guard(module: ModuleType) -> None:
                load(module)
                _guard(module)

            spec.loader.exec_module = load_and_guard  # type: ignore[method-assign]
        return spec


def _guard(module: ModuleType) -> None:
    given: Callable[..., Any] = module.DistributedOptimizer
    if getattr(given, "guarded", False):
        return

    def distributed_optimizer(*arguments: Any, **named: Any) -> Any:
        import tensorflow as tf

        if str(getattr(tf.keras, "__version__", "2")).startswith("3"):
            raise RuntimeError(_WHY)
        return given(*arguments, **named)

    distributed_optimizer.guarded = True  # type: ignore[attr-defined]
    distributed_optimizer.__name__ = "DistributedOptimizer"
    distributed_optimizer.__doc__ = given.__doc__
    vars(module)["DistributedOptimizer"] = distributed_optimizer
