"""Prints results."""

import json
from typing import Any

from raysgd._internal.values import to_json_dict
from raysgd.train.callbacks.callback import TrainingCallback

__all__ = ["PrintCallback"]


class PrintCallback(TrainingCallback):
    """Prints the reports of all workers as indented JSON. Other values appear as their repr."""

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        print(json.dumps([to_json_dict(result, repr) for result in results], indent=4))
