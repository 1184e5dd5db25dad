"""Import path of operators in older scripts."""

from raysgd.torch.operator import CreatorOperator, TrainingOperator

__all__ = ["CreatorOperator", "TrainingOperator"]
