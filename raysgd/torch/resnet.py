"""Import path of residual networks in older scripts, which raysgd does not have."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("ResNet"):
        # `from ... import` drops the text of an AttributeError
        raise ImportError(
            f"raysgd has no {name}. Use torchvision.models.{name.lower()}(num_classes=10), or a "
            "copy of the original file."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
