"""Decompression of files. A file that is cut or damaged is an error."""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

_GZIP = "zlib", lambda zlib: zlib.decompressobj(31)
_XZ = "lzma", lambda lzma: lzma.LZMADecompressor()
_FORMATS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "gz": _GZIP,
    "tgz": _GZIP,
    "bz2": ("bz2", lambda bz2: bz2.BZ2Decompressor()),
    "xz": _XZ,
    "lzma": _XZ,
    "zst": ("zstandard", lambda zstandard: zstandard.ZstdDecompressor().decompressobj()),
    "lz4": ("lz4.frame", lambda lz4: lz4.LZ4FrameDecompressor()),
}
"""The module of each file ending, and a function that makes its decompressor of one part."""


def decompressor_of(path: str) -> Callable[[Any], Iterator[bytes]] | None:
    """Return a function that yields the content of an open compressed file."""
    ending = path.lower().rpartition(".")[2]
    if ending == "zip":
        raise ValueError("cannot read .zip files. Unpack them, or use another compression")
    if ending not in _FORMATS:
        return None
    module, make = _FORMATS[ending]
    try:
        return functools.partial(_decompress, make, importlib.import_module(module))
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(f"to read .{ending} files, install {package}") from None


def _decompress(make: Callable[[Any], Any], module: Any, source: Any) -> Iterator[bytes]:
    decompressor = make(module)
    while data := source.read(2**16):
        while data := data.lstrip(b"\0") if decompressor.eof else data:  # without padding
            decompressor = make(module) if decompressor.eof else decompressor
            try:
                yield decompressor.decompress(data)
            except Exception as error:  # of any class
                raise ValueError(str(error)) from error
            data = decompressor.unused_data or b""
    if not decompressor.eof:
        raise EOFError("Compressed file ended before its end marker")
