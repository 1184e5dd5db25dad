"""Where older scripts import operators from."""

from raysgd.torch.interop.creators import CreatorOperator
from raysgd.torch.operator import TrainingOperator

__all__ = ["CreatorOperator", "TrainingOperator"]
