"""Training functions for PyTorch."""

from raysgd.train.callbacks.profile import TorchWorkerProfiler as TorchWorkerProfiler
from raysgd.train.torch.accelerator import TorchAccelerator as TorchAccelerator
from raysgd.train.torch.accelerator import accelerate as accelerate
from raysgd.train.torch.accelerator import backward as backward
from raysgd.train.torch.accelerator import enable_reproducibility as enable_reproducibility
from raysgd.train.torch.accelerator import get_device as get_device
from raysgd.train.torch.accelerator import prepare_data_loader as prepare_data_loader
from raysgd.train.torch.accelerator import prepare_model as prepare_model
from raysgd.train.torch.accelerator import prepare_optimizer as prepare_optimizer
from raysgd.train.torch.config import TorchBackend as TorchBackend
from raysgd.train.torch.config import TorchConfig as TorchConfig
from raysgd.train.torch.config import TorchTrainer as TorchTrainer

# Export every function and class above.
__all__ = sorted(name for name, value in globals().items() if callable(value))
