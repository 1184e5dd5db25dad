"""Class-based distributed training on Ray.

>>> from raysgd import TorchTrainer, TrainingOperator  # doctest: +SKIP

Importing raysgd imports neither torch nor Ray. Each name of raysgd loads on first use.
"""

from typing import TYPE_CHECKING

from raysgd._internal.imports import lazy_names

if TYPE_CHECKING:
    from raysgd.elastic.config import ElasticConfig
    from raysgd.tf import TFTrainer
    from raysgd.torch import CreatorOperator, TorchTrainer, TrainingOperator
    from raysgd.torch.options import BadSteps, EqualBits, Guard

__version__ = "0.1.0"

__all__ = [
    "BadSteps",
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
    "BadSteps": "raysgd.torch.options",
    "CreatorOperator": "raysgd.torch",
    "ElasticConfig": "raysgd.elastic.config",
    "EqualBits": "raysgd.torch.options",
    "Guard": "raysgd.torch.options",
    "TFTrainer": "raysgd.tf",
    "TorchTrainer": "raysgd.torch",
    "TrainingOperator": "raysgd.torch",
}


__getattr__ = lazy_names(__name__, {name: f"{home}:{name}" for name, home in _HOMES.items()})


def __dir__() -> list[str]:
    return __all__
