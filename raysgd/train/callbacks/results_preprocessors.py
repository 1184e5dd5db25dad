"""The preprocessors of results, by the module that older scripts import them from."""

from raysgd.train.callbacks.preprocessors import *  # noqa: F403
from raysgd.train.callbacks.preprocessors import __all__ as __all__
