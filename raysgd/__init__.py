"""Class-based distributed training on Ray.

>>> from raysgd import TorchTrainer, TrainingOperator  # doctest: +SKIP

Importing raysgd imports neither torch nor Ray. Each name of raysgd loads on first use.
"""

from typing import TYPE_CHECKING

from raysgd._internal.imports import lazy_names

if TYPE_CHECKING:
    from raysgd.elastic.config import ElasticConfig as ElasticConfig
    from raysgd.tf import TFTrainer as TFTrainer
    from raysgd.torch import CreatorOperator as CreatorOperator
    from raysgd.torch import TorchTrainer as TorchTrainer
    from raysgd.torch import TrainingOperator as TrainingOperator
    from raysgd.torch.options import BadSteps as BadSteps
    from raysgd.torch.options import EqualBits as EqualBits
    from raysgd.torch.options import Guard as Guard

__version__ = "0.1.0"

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

__all__ = sorted([*_HOMES, "__version__"])
__getattr__ = lazy_names(__name__, {name: f"{home}:{name}" for name, home in _HOMES.items()})


def __dir__() -> list[str]:
    return __all__
