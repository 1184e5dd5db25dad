"""Takes the place of ``ray.air.session`` in training functions.

Ray's own functions only log a warning there. A script may import the module at its top or in the
function.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    api = importlib.import_module("raysgd.train.api")
    return getattr(api if hasattr(api, name) else api.get_context(), name)
