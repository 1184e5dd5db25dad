"""Imports of large libraries and of optional dependencies."""

import gc
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Exclude imported objects from garbage collection, now and later.

    An import creates hundreds of thousands of permanent objects. Scanning them takes 20 to 25% of
    the import time of PyTorch and TensorFlow, and later pauses training for 0.2 to 0.5 s. It also
    copies memory that forked loader processes share.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(0)  # not gc.disable(): an imported module can change it
    try:
        yield
    finally:
        gc.freeze()
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*threshold)


def load_triton_first() -> None:
    """Load Triton before TensorFlow. If TensorFlow is loaded already, make imports of Triton fail.

    Ordinary builds of PyTorch for Linux bring Triton, and ``torch._dynamo`` imports it. If a
    process loads TensorFlow 2.21 before Triton, LLVM ends the process.
    """
    if "tensorflow" in sys.modules:
        refuse_triton()
    else:
        with suppress(ImportError):  # this PyTorch has no Triton
            importlib.import_module("triton")


def refuse_triton() -> None:
    """Make imports of Triton fail, unless it is loaded. See `load_triton_first`.

    Triton 3.9 prints its objects at the end of a process that called ``gc.freeze``. So workers do
    not load it first.
    """
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]


def lazy_names(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module. It imports each name from its home on first use.

    A home is a module, or ``module:name``.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return pkgutil.resolve_name(homes[name])

    return __getattr__


def import_extra(owner: str, module: str, extra: str) -> Any:
    """Import a module that an extra of raysgd installs, for the feature `owner`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{owner} needs {module.partition('.')[0]}, which cannot be imported here ({error}). "
            f'Install it on the driver and all workers: pip install "raysgd[{extra}]"'
        ) from error
