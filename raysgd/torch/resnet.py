"""Where older scripts import residual networks from, which raysgd has not."""

from typing import Any

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name.startswith("ResNet"):
        # no AttributeError, of which `from ... import` drops the text
        raise ImportError(
            f"raysgd has no {name}: it holds no models. Take torchvision.models.{name.lower()}"
            "(num_classes=10), or keep a copy of the file that the script was written for."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
