"""Training functions for PyTorch."""

from __future__ import annotations

from raysgd.train.callbacks.profile import TorchWorkerProfiler
from raysgd.train.torch.accelerator import (
    TorchAccelerator,
    accelerate,
    backward,
    enable_reproducibility,
    get_device,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from raysgd.train.torch.config import TorchBackend, TorchConfig, TorchTrainer

__all__ = [
    "TorchAccelerator",
    "TorchBackend",
    "TorchConfig",
    "TorchTrainer",
    "TorchWorkerProfiler",
    "accelerate",
    "backward",
    "enable_reproducibility",
    "get_device",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
]
