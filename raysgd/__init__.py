"""Class-based distributed training on Ray.

>>> from raysgd import TorchTrainer, TrainingOperator  # doctest: +SKIP

Importing raysgd imports neither torch nor Ray. Each name of raysgd loads on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.elastic.config import ElasticConfig
    from raysgd.tf import TFTrainer
    from raysgd.torch import CreatorOperator, TorchTrainer, TrainingOperator
    from raysgd.torch.options import EqualBits, Guard

__version__ = "0.1.0"

__all__ = [
    "CreatorOperator",
    "ElasticConfig",
    "EqualBits",
    "Guard",
    "TFTrainer",
    "TorchTrainer",
    "TrainingOperator",
    "__version__",
]

_HOMES = {
    "CreatorOperator": "raysgd.torch",
    "ElasticConfig": "raysgd.elastic.config",
    "EqualBits": "raysgd.torch.options",
    "Guard": "raysgd.torch.options",
    "TFTrainer": "raysgd.tf",
    "TorchTrainer": "raysgd.torch",
    "TrainingOperator": "raysgd.torch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raysgd' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
