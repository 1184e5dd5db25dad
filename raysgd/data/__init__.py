"""The user's data, and its partition among the workers."""

from raysgd.data.dataset import Dataset
from raysgd.data.formats import jsonl, parquet, tar, text
from raysgd.data.stream import Stream, mix

__all__ = ["Dataset", "Stream", "jsonl", "mix", "parquet", "tar", "text"]
