"""Where older scripts import operators from."""

from raysgd.torch.operator import CreatorOperator, TrainingOperator

__all__ = ["CreatorOperator", "TrainingOperator"]
