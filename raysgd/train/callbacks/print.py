"""Printing results."""

from __future__ import annotations

import json
from typing import Any

from raysgd.callbacks.values import json_dict
from raysgd.train.callbacks.callback import TrainingCallback

__all__ = ["PrintCallback"]


class PrintCallback(TrainingCallback):
    """Prints what the workers report as indented JSON: the list of their results by rank.

    What JSON has no form for is printed as text.
    """

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Print the results."""
        print(json.dumps([json_dict(result, repr) for result in results], indent=4))
