"""State on disk."""

from raysgd.checkpoint.file import check_writable, read_file, write_file

__all__ = ["check_writable", "read_file", "write_file"]
