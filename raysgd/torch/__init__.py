"""The class-based family for PyTorch."""

from raysgd.torch.operator import CreatorOperator, TrainingOperator
from raysgd.torch.trainer import TorchTrainer
from raysgd.torch.trainer import __getattr__ as __getattr__

__all__ = ["CreatorOperator", "TorchTrainer", "TrainingOperator"]
