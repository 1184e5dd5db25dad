"""Names of Ray Train up to 1.13."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)


class OldNames:
    """Methods of the first versions of ``ray.util.sgd.v2``."""

    def get_latest_checkpoint(self) -> Any:
        """Return ``latest_checkpoint``."""
        return getattr(self, "latest_checkpoint")  # noqa: B009


class TorchAccelerator:
    """The functions of ``raysgd.train.torch`` as methods."""

    def __init__(self, amp: bool = False) -> None:
        self.accelerate(amp)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("raysgd.train.torch"), name)


def alias_modules(module: str, *names: str) -> None:
    """Let older scripts import these submodules of a module. They are the module itself."""
    for name in names:
        sys.modules[f"{module}.{name}"] = sys.modules[module]


def warn_of_old_methods(backend_cls: type[Any]) -> None:
    """Warn of methods of old backends that raysgd does not call."""
    if hasattr(backend_cls, "handle_failure"):
        logger.warning(
            "raysgd does not call %s.handle_failure. After a failure, raysgd calls on_start again.",
            backend_cls.__name__,
        )
