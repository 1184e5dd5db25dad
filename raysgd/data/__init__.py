"""The user's data, and its partition among the workers."""

from raysgd.data.dataset import Dataset

__all__ = ["Dataset"]
