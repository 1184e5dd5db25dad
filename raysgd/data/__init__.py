"""The user's data, and its partition among the workers."""

from raysgd.data.dataset import Dataset
from raysgd.data.formats import jsonl, text
from raysgd.data.parquet_files import parquet
from raysgd.data.stream import Stream, mix
from raysgd.data.tar_files import tar

__all__ = ["Dataset", "Stream", "jsonl", "mix", "parquet", "tar", "text"]
