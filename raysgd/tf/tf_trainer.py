"""Import path of the trainer and its Trainable in older scripts."""

from raysgd.tf import TFTrainer as TFTrainer
from raysgd.tf import __getattr__ as __getattr__
