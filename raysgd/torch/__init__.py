"""The class-based family for PyTorch."""

from raysgd.torch.creator_operator import CreatorOperator
from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.torch.training_operator import TrainingOperator

__all__ = ["CreatorOperator", "TorchTrainer", "TrainingOperator"]
