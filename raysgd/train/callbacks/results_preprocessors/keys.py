"""Import path of older scripts."""

from raysgd.train.callbacks.results_preprocessors import *  # noqa: F403
