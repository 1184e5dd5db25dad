"""The user's data, and its partition among the workers."""

from raysgd.data.dataset import Dataset
from raysgd.data.formats import jsonl, tar, text
from raysgd.data.parquet_files import parquet
from raysgd.data.stream import Stream, mix

__all__ = ["Dataset", "Stream", "jsonl", "mix", "parquet", "tar", "text"]
