"""Data of the user, and how it is shared out among workers."""

from raysgd.data.dataset import Dataset

__all__ = ["Dataset"]
