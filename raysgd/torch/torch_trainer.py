"""Import path of the trainer and its Trainable in older scripts."""

from raysgd.torch.trainer import TorchTrainer
from raysgd.torch.trainer import __getattr__ as __getattr__

__all__ = ["TorchTrainer"]
